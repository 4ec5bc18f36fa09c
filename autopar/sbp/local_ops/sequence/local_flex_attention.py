"""Attention by functions of indices, of parts of the samples, heads or queries, or of queries and keys in a ring."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.ir.attention.flex_op import FLEX, attend, of_key_blocks
from autopar.ir.graph import Op
from autopar.sbp.axis import Axis
from autopar.sbp.local_ops._arguments import has_backward, local_input_shape, rank_index, role_axes
from autopar.sbp.local_ops.local_op import LocalOp
from autopar.sbp.local_ops.sequence.around_ring import Followers, around, ring_collectives
from autopar.sbp.local_ops.sequence.attention_blocks import Merged, Tensor
from autopar.sbp.local_ops.sequence.local_attention import heads_read
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import KEY_HEADS, RING, Strategy


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Sequence[Tensor | None],
    captured: Sequence[Tensor],
    *call_of: Any,
    **roles: Sequence[Axis],
) -> tuple[Tensor, Tensor]:
    """autopar.flex_attention of a part of the samples, heads or queries, whose functions count over all of them."""
    if KEY_HEADS in roles:
        key, value = (heads_read(x, query.shape[1], roles[KEY_HEADS]) for x in (key, value))
    taken = (("batch",), ("heads", KEY_HEADS), ("queries", RING))
    axes = [[axis for role in of_dim for axis in roles.get(role, ())] for of_dim in taken]
    batch, head, first = (rank_index(own) * size for own, size in zip(axes, query.shape))
    call = _FlexCall(tuple(block_mask), call_of, (batch, head, first))
    if RING not in roles:
        return call.attend(0, query, key, value, captured)
    return _FlexRing.apply(call, roles[RING][0], query, key, value, *captured)


@dataclass(frozen=True, eq=False)
class _FlexCall:
    """The facts of a call; `first`: the indices of its first sample, head and query."""

    block_mask: tuple[Tensor | None, ...]
    call_of: tuple[Any, ...]
    first: tuple[int, int, int]

    def attend(
        self, first_key: int, query: Tensor, key: Tensor, value: Tensor, captured: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(result, log-sum-exp) over these keys."""
        return attend(query, key, value, self.block_mask, captured, *self.call_of, first=(*self.first, first_key))

    def attend_part(
        self, owner: int, query: Tensor, key: Tensor, value: Tensor, captured: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`attend` with the keys of a rank."""
        num_keys, size = key.shape[2], self.call_of[2][1]
        own = of_key_blocks(self.block_mask, owner * num_keys // size, num_keys // size) if query.is_cuda else ()
        part = _FlexCall(own if self.block_mask else (), self.call_of, self.first)
        return part.attend(owner * num_keys, query, key, value, captured)


class _FlexRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, axis, query, key, value, *captured):
        ctx.set_materialize_grads(False)
        merged = Merged(query, value)
        for owner, (k, v) in around([key, value], axis):
            merged.add(slice(None), *call.attend_part(owner, query, k, v, captured))
        out = merged.out.to(query.dtype)
        ctx.call, ctx.axis = call, axis
        ctx.save_for_backward(query, key, value, out, merged.sums, *captured)
        return out, merged.sums

    @staticmethod
    def backward(ctx, *gradients):
        """Each part is computed again: its result has the weight exp(own log-sum-exp - that of all) in the whole."""
        if torch.is_grad_enabled():
            raise AutoparError("flex_attention has no second derivative, create_graph=True: write its scores out")
        query, key, value, out, sums, *captured = ctx.saved_tensors
        of_out, of_sums = (torch.zeros_like(x) if g is None else g for x, g in zip((out, sums), gradients))
        base, wants = sums.masked_fill(sums == -torch.inf, 0.0), ctx.needs_input_grad[2:]
        totals = [torch.zeros_like(x) for x in (query, *captured)]
        followers = Followers([key.dtype] * 2, ctx.axis)
        for owner, (k, v) in around([key, value], ctx.axis):
            with torch.enable_grad():
                given = zip((query, k, v, *captured), wants)
                leaves = [x.detach().requires_grad_(is_wanted) for x, is_wanted in given]
                made, own = ctx.call.attend_part(owner, *leaves[:3], leaves[3:])
            weight = (own.detach() - base).exp()
            of_own = weight * ((of_out * (made.detach() - out)).sum(-1) + of_sums)
            directions = (of_out * weight[..., None]).to(made.dtype), of_own.to(own.dtype)
            inputs = [x for x in leaves if x.requires_grad]
            found = iter(torch.autograd.grad((made, own), inputs, directions, allow_unused=True))
            terms = [next(found) if is_wanted else None for is_wanted in wants]
            of_query, of_key, of_value, *of_captured = (
                torch.zeros_like(x) if term is None else term for x, term in zip(leaves, terms)
            )
            followers.add([of_key, of_value])
            totals = [total + term for total, term in zip(totals, (of_query, *of_captured))]
        all_of = totals[0], *followers.arrived(), *totals[1:]
        return None, None, *(x if is_wanted else None for x, is_wanted in zip(all_of, wants))


def _collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """Keys and values that go around a ring, and their gradients."""
    axes = role_axes(strategy, RING, mesh_shape)
    if not axes:
        return ()
    shapes = [local_input_shape(op, strategy, index, mesh_shape) for index in (1, 2)]
    num_bytes = sum(torch.Size(shape).numel() for shape in shapes) * op.inputs[1].dtype.itemsize
    made = ring_collectives(num_bytes, axes[0], mesh_shape[axes[0]])
    return tuple(one for one in made if one.phase == "forward" or has_backward(op))


LOCAL_OPS = {FLEX: LocalOp(flex_attention, _collectives)}
