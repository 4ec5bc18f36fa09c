"""`autopar.flex_attention`: torch's `flex_attention` as one op, whose functions of indices are graphs.

On a GPU it is compiled, as torch asks of its users; elsewhere, where torch has no backward for it, the scores are
computed whole, and again for backward. On the meta device it keeps what the compiled one keeps.
"""

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from autopar.errors import AutoparError
from autopar.ir.attention.index_functions import functions_called, over_indices

FLEX = "autopar.flex_attention.default"
# Tensors of a BlockMask, in the order of the op's argument: first those by blocks of queries, then by blocks of keys.
BLOCKS_OF_QUERIES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
BLOCKS_OF_KEYS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")

Tensors = Sequence[torch.Tensor]
Tensor = torch.Tensor

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor?[] block_mask, Tensor[] captured, str functions,"
    " float scale, int[] block_size) -> (Tensor, Tensor)"
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Sequence[Tensor | None],
    captured: Tensors,
    *call_of: Any,
    first: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp of the scores) of [batch, heads, tokens, head size].

    `block_mask`: the tensors of a `BlockMask`, empty without one. `call_of`: the op's further arguments. `first`: the
    index of the first sample, head, query and key, from which the functions count.
    """
    functions, scale, block_size = call_of
    call = _Scoring(functions, scale, first)
    if query.is_cuda:
        return _compiled_attention(call, query, key, value, block_mask, captured, block_size)
    return _FlexAttention.apply(call, query, key, value, *captured)


_LIBRARY.impl("flex_attention", attend, "CompositeImplicitAutograd")


class _Scoring:
    """The scores of a call, with `first` as of `attend`."""

    def __init__(self, functions: str, scale: float, first: tuple[int, int, int, int]) -> None:
        known = functions_called(functions)
        self.score, self.mask, self.scale, self.first = known.score, known.mask, scale, first

    def shifted(self, function: Callable[..., Tensor], captured: Tensors, at: int) -> Callable[..., Tensor]:
        """`function` of indices of this part, the first of which is argument `at`."""
        batch, head, query, key = self.first

        def counted(*args: Any) -> Tensor:
            score, (b, h, q, k) = args[:at], args[at:]
            return function(*score, b + batch, h + head, q + query, k + key, *captured)

        return counted

    def dense(self, query: Tensor, key: Tensor, value: Tensor, captured: Tensors) -> tuple[Tensor, Tensor]:
        """Attention by its formula; queries that see no key give zeros."""
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1).expand(query.shape[0], -1, -1, -1) for x in (key, value))
        scores = query.to(wide) @ key.to(wide).mT * self.scale
        indices = [
            torch.arange(start, start + size, dtype=torch.int32, device=query.device)
            for start, size in zip(self.first, scores.shape)
        ]
        if self.score is not None:
            scores = over_indices(self.score, indices, captured, scores).to(wide)
        if self.mask is not None:
            scores = scores.masked_fill(~over_indices(self.mask, indices, captured), -torch.inf)
        is_blind = (scores == -torch.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(is_blind, 0.0)
        weights = scores.softmax(-1).masked_fill(is_blind, 0.0)
        sums = scores.logsumexp(-1).masked_fill(is_blind[..., 0], -torch.inf)
        return weights.to(query.dtype) @ value, sums


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, query, key, value, *captured):
        ctx.set_materialize_grads(False)
        ctx.call = call
        if query.is_meta:
            out = query.new_empty(*query.shape[:-1], value.shape[-1])
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            sums = query.new_empty(query.shape[:-1], dtype=wide)
        else:
            out, sums = call.dense(query, key, value, captured)
        ctx.save_for_backward(query, key, value, out, sums, *captured)
        return out, sums

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():
            raise AutoparError("flex_attention has no second derivative, create_graph=True: write its scores out")
        query, key, value, _, _, *captured = ctx.saved_tensors
        given, wants = (query, key, value, *captured), ctx.needs_input_grad[1:]
        if query.is_meta:
            return None, *(torch.empty_like(x) if is_wanted else None for x, is_wanted in zip(given, wants))
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(is_wanted) for x, is_wanted in zip(given, wants)]
            outputs = ctx.call.dense(*leaves[:3], leaves[3:])
        pairs = [(x, gradient) for x, gradient in zip(outputs, gradients) if gradient is not None]
        inputs = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad([x for x, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True))
        return None, *(next(found) if is_wanted else None for is_wanted in wants)


def _compiled_attention(
    call: _Scoring,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Sequence[Tensor | None],
    captured: Tensors,
    block_size: Sequence[int],
) -> tuple[Tensor, Tensor]:
    score = None if call.score is None else call.shifted(_reading_tables(call.score), captured, 1)
    blocks = None
    if block_mask:
        assert call.mask is not None, "a BlockMask has a function"
        mask = call.shifted(_reading_tables(call.mask), captured, 0)
        blocks = _block_mask(mask, block_mask, (query.shape[-2], key.shape[-2]), block_size)
    asked = AuxRequest(lse=True)
    out, more = _compiled()(query, key, value, score, blocks, call.scale, enable_gqa=True, return_aux=asked)
    return out, more.lse


def _block_mask(
    mask: Callable[..., Tensor], tensors: Sequence[Tensor | None], lengths: tuple[int, int], block_size: Sequence[int]
) -> BlockMask:
    """The mask of this part's queries, whose blocks by keys follow from those by queries."""
    named: dict[str, Any] = dict(zip((*BLOCKS_OF_QUERIES, *BLOCKS_OF_KEYS), tensors))
    own = {name: named[name] for name in BLOCKS_OF_QUERIES}
    size, by_keys = (block_size[0], block_size[1]), named["q_indices"]
    if by_keys is not None and by_keys.shape[-1] != own["kv_num_blocks"].shape[-1]:
        return BlockMask.from_kv_blocks(**own, BLOCK_SIZE=size, mask_mod=mask, seq_lengths=lengths)
    return BlockMask(lengths, **named, BLOCK_SIZE=size, mask_mod=mask)


def of_key_blocks(tensors: Sequence[Tensor | None], first: int, num: int) -> tuple[Tensor | None, ...]:
    """The tensors of a BlockMask for `num` blocks of keys from block `first` on; those by keys are all there."""
    parts: list[Tensor | None] = []
    for counts, indices in zip(tensors[::2][:2], tensors[1::2][:2]):
        if counts is None or indices is None:
            parts += [None, None]
            continue
        is_listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        most = max(first + num, indices.shape[-1])
        listed = counts.new_zeros((*counts.shape, most))
        listed = listed.scatter_reduce(-1, indices.long(), is_listed.to(counts.dtype), "amax")[..., first : first + num]
        order = torch.argsort(listed, dim=-1, descending=True, stable=True)
        parts += [listed.sum(-1).to(counts.dtype), order.to(indices.dtype).contiguous()]
    return (*parts, *tensors[4:])


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


@functools.lru_cache(maxsize=1024)
def _reading_tables(function: GraphModule) -> GraphModule:
    """`function` with tables that are read as torch's compiler knows it of people's code, `table[query, key]`."""
    graph = copy.deepcopy(function.graph)
    for node in graph.nodes:
        if str(node.target) == "aten.index.Tensor":
            node.target, node.args = operator.getitem, (node.args[0], tuple(node.args[1]))
    return GraphModule(function, graph)
