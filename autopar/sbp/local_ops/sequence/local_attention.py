"""Attention of parts of a sequence: of some queries with all keys, and of parts of both around a ring.

Causal attention is computed in balanced order where it can be: each rank exchanges half of its queries, so that all see
as many keys. The values around the op are in the order of the sequence, so that positions stay right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from autopar.errors import AutoparError
from autopar.ir.attention.balanced import is_balanced
from autopar.ir.graph import Op, arguments_of
from autopar.sbp.axis import Axis
from autopar.sbp.local_ops._arguments import local_input_shape, rank_index, role_axes
from autopar.sbp.local_ops.local_op import LocalOp
from autopar.sbp.local_ops.sequence.around_ring import Followers, around, halves_of, rebalance, ring_collectives
from autopar.sbp.local_ops.sequence.attention_blocks import Block, Merged, Scores, Tensor, seen_blocks
from autopar.sbp.placement import local_shape
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import KEY_HEADS, RING, Strategy


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **roles: Sequence[Axis],
) -> Tensor:
    """aten.scaled_dot_product_attention of this rank's "queries", of its query heads with all "key_heads", or of its
    queries and keys around a "ring".
    """
    queries, ring = roles.get("queries", ()), roles.get(RING, ())
    if KEY_HEADS in roles:
        key, value = (heads_read(x, query.shape[-3], roles[KEY_HEADS]) for x in (key, value))
    if not queries and not ring:
        given = query, key, value, attn_mask, dropout_p, is_causal
        return F.scaled_dot_product_attention(*given, scale=scale, enable_gqa=query.shape[-3] != key.shape[-3])
    if dropout_p:
        return _dropping(query, key, value, dropout_p, rank_index(queries), scale=scale, enable_gqa=enable_gqa)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    axis, own = (*ring, *queries)[0], query.shape[-2]
    num_keys = key.shape[-2] * (axis.size if ring else 1)
    order = _PartsOrder(axis, bool(ring), is_causal and is_balanced(own * axis.size, num_keys, own))
    return _Parted.apply(order, scale, is_causal, query, key, value, attn_mask)


def heads_read(x: Tensor, num_heads: int, axes: Sequence[Axis]) -> Tensor:
    """The key heads that this rank's query heads read, with as many of these for each; all ranks have all of them."""
    size, first = x.shape[-3], rank_index(axes) * num_heads
    total = num_heads
    for axis in axes:
        total *= axis.size
    read = [head * size // total for head in range(first, first + num_heads)]
    distinct = range(read[0], read[-1] + 1)
    if all(read.count(head) * len(distinct) == num_heads for head in distinct):
        return x.narrow(-3, read[0], len(distinct))
    return x.index_select(-3, torch.tensor(read, device=x.device))


def _dropping(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, part: int, *, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Causal attention of part `part` of the queries with the keys that they see, some of which are dropped."""
    num_queries = query.shape[-2]
    first = part * num_queries
    num_keys = min(key.shape[-2], first + num_queries)
    is_seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(first)
    key, value = key[..., :num_keys, :], value[..., :num_keys, :]
    return F.scaled_dot_product_attention(query, key, value, is_seen, dropout_p, scale=scale, enable_gqa=enable_gqa)


@dataclass(frozen=True, eq=False)
class _PartsOrder:
    """The parts of a sequence that the ranks of `axis` compute: of its queries, and in a ring of its keys too."""

    axis: Axis
    is_ring: bool
    is_balanced: bool

    def arranged(self, tensors: list[Tensor], *, is_back: bool = False) -> list[Tensor]:
        """Parts in the order of the sequence, in the order in which they are computed; or back."""
        return rebalance(tensors, self.axis, to_balanced=not is_back) if self.is_balanced else tensors

    def queries(self, own: int) -> list[range]:
        """The indices of this rank's `own` queries."""
        return self._part(self.axis.index, own)

    def keys(self, owner: int, own: int) -> list[range]:
        """The indices of the keys of a rank; all, if it is no ring."""
        return self._part(owner, own) if self.is_ring else [range(own)]

    def _part(self, index: int, own: int) -> list[range]:
        if not self.is_balanced:
            return [range(index * own, (index + 1) * own)]
        half = own // 2
        chunks = halves_of(index, self.axis.size, is_balanced=True)
        return [range(chunk * half, (chunk + 1) * half) for chunk in chunks]

    def around(self, tensors: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """(rank, its keys and values) for each rank of a ring; all keys and values, if it is none."""
        yield from around(tensors, self.axis) if self.is_ring else [(0, tensors)]


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, order, scale, is_causal, query, key, value, mask):
        if order.is_ring:
            query, key, value = order.arranged([query, key, value])
        else:
            (query,) = order.arranged([query])
        merged = Merged(query, value)
        for owner, (k, v) in order.around([key, value]):
            scores, blocks = _scores_of(order, owner, scale, mask, is_causal, query, k)
            for block in blocks:
                scores.forward(block, query, k, v, merged)
        out = merged.out.to(query.dtype)
        ctx.order, ctx.scale, ctx.is_causal = order, scale, is_causal
        ctx.save_for_backward(query, key, value, out, merged.sums, mask)
        return order.arranged([out], is_back=True)[0]

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():
            raise AutoparError("attention of a split sequence has no second derivative, create_graph=True: split heads")
        order, (query, key, value, out, sums, mask) = ctx.order, ctx.saved_tensors
        (grad,) = order.arranged([gradients[0]])
        found = [torch.zeros_like(x, dtype=sums.dtype) for x in (query, key, value)]
        followers = Followers([key.dtype] * 2, order.axis)
        for owner, (k, v) in order.around([key, value]):
            scores, blocks = _scores_of(order, owner, ctx.scale, mask, ctx.is_causal, query, k)
            for block in blocks:
                scores.backward(block, (query, k, v), grad, out, sums, (found[0], found[1], found[2]))
            if order.is_ring:
                followers.add(found[1:])
                found[1:] = [torch.zeros_like(x) for x in found[1:]]
        made = [x.to(query.dtype) for x in ([found[0], *followers.arrived()] if order.is_ring else found)]
        own = 3 if order.is_ring else 1
        made[:own] = order.arranged(made[:own], is_back=True)
        return None, None, None, *made, None


def _scores_of(
    order: _PartsOrder, owner: int, scale: float, mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Scores, list[Block]]:
    """How the scores of this rank's queries and a rank's keys are computed, and the blocks that are."""
    keys = order.keys(owner, key.shape[-2])
    blocks = seen_blocks(order.queries(query.shape[-2]), keys, is_causal=is_causal)
    return Scores(scale, mask, keys[0].start), list(blocks)


def _collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """The exchange into and out of balanced order, and parts that are sent around a ring, forward and backward."""
    ring, queries = (role_axes(strategy, role, mesh_shape) for role in (RING, "queries"))
    arguments = arguments_of(op)
    if not ring + queries or arguments["dropout_p"]:
        return ()
    axis = (ring + queries)[0]
    shapes = [local_input_shape(op, strategy, index, mesh_shape) for index in range(3)]
    itemsize = op.inputs[0].dtype.itemsize
    query, key, value = (_num_elements(shape) * itemsize for shape in shapes)
    out = _num_elements(local_shape(op.outputs[0].shape, strategy.output_layout(0), mesh_shape)) * itemsize
    found: list[tuple[str, int, str]] = []
    if arguments["is_causal"] and is_balanced(op.inputs[0].shape[-2], op.inputs[1].shape[-2], shapes[0][-2]):
        moved = query + (key + value) * bool(ring)
        found += [("all_to_all", size, phase) for phase in ("forward", "backward") for size in (moved, out)]
    made = [Collective(kind, (axis,), size, phase) for kind, size, phase in found]
    made += ring_collectives(key + value, axis, mesh_shape[axis]) if ring else ()
    has_gradient = any(value.needs_grad for value in op.inputs[:3]) and op.outputs[0].needs_grad
    return tuple(one for one in made if one.phase == "forward" or has_gradient)


def _num_elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


LOCAL_OPS = {"aten.scaled_dot_product_attention.default": LocalOp(attention, _collectives)}
