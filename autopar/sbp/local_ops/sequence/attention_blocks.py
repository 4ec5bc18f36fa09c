"""Attention block by block: fused kernels on parts of the queries and keys, merged by the log-sum-exp of the scores.

The weights of a block are exp(score - log-sum-exp over all blocks), so that backward runs each block alone, with the
merged result and log-sum-exp (Dao, FlashAttention-2, 2023; Liu et al., Ring Attention, arXiv:2310.01889).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from autopar.sbp.local_ops._arguments import sum_dtype

Tensor = torch.Tensor
QKV = tuple[Tensor, Tensor, Tensor]

_LARGEST_FLASH_HEAD = 256
# Most scores that exist at once where no fused kernel is.
_MOST_SCORES = 2**26


@dataclass(frozen=True, slots=True)
class Block:
    """Positions of some queries and keys in the tensors of a rank. is_causal: query i sees the keys up to i."""

    queries: slice
    keys: slice
    is_causal: bool = False


def seen_blocks(queries: Sequence[range], keys: Sequence[range], *, is_causal: bool) -> Iterator[Block]:
    """The blocks that cover all scores that are seen; `queries`, `keys`: global indices of the segments that the
    tensors hold one after the other.

    >>> [(b.queries.start, b.keys.start, b.is_causal) for b in seen_blocks([range(4, 8)], [range(6)], is_causal=True)]
    [(0, 0, False), (0, 4, True), (2, 4, False)]
    """
    row = 0
    for q in queries:
        column = 0
        for k in keys:
            for own, seen, is_diagonal in _causal(q, k) if is_causal else [(q, k, False)]:
                yield Block(_within(own, q, row), _within(seen, k, column), is_diagonal)
            column += len(k)
        row += len(q)


def _within(part: range, segment: range, at: int) -> slice:
    first = at + part.start - segment.start
    return slice(first, first + len(part))


def _causal(q: range, k: range) -> list[tuple[range, range, bool]]:
    """Keys before all of the queries, the square on the diagonal, and later queries on the keys of that square."""
    first = max(q.start, k.start)
    square = range(first, max(first, min(q.stop, k.stop)))
    found = [
        (q, range(k.start, max(k.start, min(k.stop, q.start))), False),
        (square, square, True),
        (range(square.stop, q.stop), square, False),
    ]
    return [one for one in found if len(one[0]) and len(one[1])]


class Merged:
    """The result and the log-sum-exp of the scores of all queries, over the blocks so far."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        wide = sum_dtype(query.dtype)
        self.out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        self.sums = query.new_full(query.shape[:-1], -math.inf, dtype=wide)

    def add(self, rows: slice, out: Tensor, sums: Tensor) -> None:
        """Take in a block of the queries `rows`."""
        old = self.sums[..., rows]
        # without data it is made of many ops written in Python, which take memory that the kernel does not
        both = torch.empty_like(old) if old.is_meta else torch.logaddexp(old, sums)
        base = both.masked_fill(both == -math.inf, 0.0)
        kept, new = ((x - base).exp()[..., None] for x in (old, sums))
        self.out[..., rows, :] = self.out[..., rows, :] * kept + out * new
        self.sums[..., rows] = both


@dataclass(frozen=True)
class Scores:
    """How the scores of queries and keys are computed. mask: of all queries here and the keys that it has, booleans
    or numbers to add; `keys_at`: the first of these keys.
    """

    scale: float
    mask: Tensor | None = None
    keys_at: int = 0

    def forward(self, block: Block, query: Tensor, key: Tensor, value: Tensor, merged: Merged) -> None:
        """Add a block to `merged`."""
        for part in self._parts(block, query, key, value):
            q, k, v = query[..., part.queries, :], key[..., part.keys, :], value[..., part.keys, :]
            if self._has_kernel(q, k, v):
                merged.add(part.queries, *_fused(q, k, v, part.is_causal, self.scale))
            else:
                scores = self._scores(part, q, k)
                sums = scores.logsumexp(-1)
                base = sums.masked_fill(sums == -math.inf, 0.0)
                weights = (scores - base[..., None]).exp().to(v.dtype)
                merged.add(part.queries, weights @ _like_query(v, q), sums)

    def backward(self, block: Block, given: QKV, grad: Tensor, out: Tensor, sums: Tensor, grads: QKV) -> None:
        """Add the gradients by a block to `grads`; `out`, `sums`: merged over all blocks."""
        query, key, value = given
        for part in self._parts(block, query, key, value):
            rows, columns = part.queries, part.keys
            q, k, v = query[..., rows, :], key[..., columns, :], value[..., columns, :]
            outer = grad[..., rows, :], out[..., rows, :], sums[..., rows]
            if self._has_kernel(q, k, v):
                found = _fused_backward((q, k, v), *outer, part.is_causal, self.scale)
            else:
                found = self._dense_backward(part, (q, k, v), *outer)
            for whole, at, one in zip(grads, (rows, columns, columns), found):
                whole[..., at, :] += one

    def _parts(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Block]:
        """The block, in several parts along its queries where its scores are written out."""
        rows, width = block.queries, block.keys.stop - block.keys.start
        if self._has_kernel(query, key, value):
            yield block
            return
        step = max(1, _MOST_SCORES // (width * math.prod(query.shape[:-2])))
        stop = rows.start + 1 if query.is_meta else rows.stop  # without data: all parts take the memory of the first
        for first in range(rows.start, stop, step):
            part = slice(first, min(first + step, rows.stop))
            if not block.is_causal:
                yield Block(part, block.keys)
                continue
            # the diagonal square of a part, and the keys before it
            before, size = first - rows.start, part.stop - part.start
            at = block.keys.start + before
            if before:
                yield Block(part, slice(block.keys.start, at))
            yield Block(part, slice(at, at + size), is_causal=True)

    def _has_kernel(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        is_alike = query.ndim == 4 and query.shape[0] == key.shape[0] and query.shape[-1] == value.shape[-1]
        if self.mask is not None or not is_alike:
            return False
        return query.device.type == "cpu" or (query.itemsize == 2 and query.shape[-1] <= _LARGEST_FLASH_HEAD)

    def _scores(self, part: Block, query: Tensor, key: Tensor) -> Tensor:
        wide = sum_dtype(query.dtype)
        scores = query.to(wide) @ _like_query(key, query).to(wide).mT * self.scale
        if part.is_causal:
            is_seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~is_seen, -math.inf)
        if self.mask is None:
            return scores
        mask = self.mask if self.mask.shape[-2] == 1 else self.mask[..., part.queries, :]
        if mask.shape[-1] > 1:
            mask = mask[..., slice(part.keys.start + self.keys_at, part.keys.stop + self.keys_at)]
        return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask

    def _dense_backward(self, part: Block, given: QKV, grad: Tensor, out: Tensor, sums: Tensor) -> QKV:
        query, key, value = given
        wide = sum_dtype(query.dtype)
        q, grad, k, v = (x.to(wide) for x in (query, grad, _like_query(key, query), _like_query(value, query)))
        base = sums.masked_fill(sums == -math.inf, 0.0)
        weights = (self._scores(part, query, key) - base[..., None]).exp()
        shared = (grad * out).sum(-1, keepdim=True)
        of_scores = weights * (grad @ v.mT - shared) * self.scale
        return of_scores @ k, _like_key(of_scores.mT @ q, key), _like_key(weights.mT @ grad, value)


def _groups(key: Tensor, query: Tensor) -> int:
    return query.shape[-3] // key.shape[-3] if query.ndim > 2 else 1


def _like_query(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values with the batch and heads of the query."""
    groups = _groups(x, query)
    return (x.repeat_interleave(groups, -3) if groups > 1 else x).expand(*query.shape[:-2], -1, -1)


def _like_key(grad: Tensor, key: Tensor) -> Tensor:
    """The gradient of keys or values from that of `_like_query` of them."""
    groups = _groups(key, grad)
    return (grad.unflatten(-3, (-1, groups)).sum(-3) if groups > 1 else grad).sum_to_size(key.shape)


def _fused(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    if query.is_meta:
        return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=sum_dtype(query.dtype))
    if query.device.type == "cpu":
        given = map(_in_rows, (query, _like_query(key, query), _like_query(value, query)))
        return aten._scaled_dot_product_flash_attention_for_cpu.default(*given, 0.0, is_causal, scale=scale)
    given = (_padded(_in_rows(x)) for x in (query, key, value))
    found = aten._scaled_dot_product_flash_attention.default(*given, 0.0, is_causal, scale=scale)
    return found[0][..., : value.shape[-1]], found[1]


def _fused_backward(given: QKV, grad: Tensor, out: Tensor, sums: Tensor, is_causal: bool, scale: float) -> QKV:
    aten, (query, key, value) = torch.ops.aten, given
    if query.is_meta:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    grad, out, sums = _in_rows(grad.to(query.dtype)), _in_rows(out.to(query.dtype)), sums.contiguous()
    query, key, value = (_in_rows(x) for x in given)
    if query.device.type == "cpu":
        k, v = _like_query(key, query), _like_query(value, query)
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found = kernel(grad, query, k, v, out, sums, 0.0, is_causal, scale=scale)
        return found[0], _like_key(found[1], key), _like_key(found[2], value)
    lengths = query.shape[-2], key.shape[-2]
    tensors = [_padded(x) for x in (grad, query, key, value, out)]
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
    kernel = aten._scaled_dot_product_flash_attention_backward.default
    state = None, None, *lengths, 0.0, is_causal, seed, seed.new_empty(())
    found = kernel(*tensors, sums, *state, scale=scale)
    return found[0][..., : query.shape[-1]], found[1][..., : key.shape[-1]], found[2][..., : value.shape[-1]]


def _in_rows(x: Tensor) -> Tensor:
    """`x` with features next to one another: the kernels, called as such, read them so whatever the strides are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(x: Tensor) -> Tensor:
    """`x` padded to a head size of FlashAttention's kernels, a multiple of 8."""
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x
