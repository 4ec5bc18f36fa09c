"""Differentiable conversions between placements on mesh axes: the runtime of `sbp.redistribute`.

`spmd_types` has the same conversions, but the all-reduce of its backward asserts a contiguous gradient, which autograd
does not promise (the gradient of `sum` is an expanded view).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from autopar.sbp.in_flight import InFlight, Landing, placeholder, takes_scatters, waiting_nodes
from autopar.sbp.nested import Chain, Nest, gather_into, scatter_into
from autopar.sbp.placement import P, Placement, R


@dataclass(frozen=True, eq=False)
class Axis:
    """A mesh axis, or several as one, as seen by a rank, whose coordinate on it is `index`.

    Without a `group` the rank has no peers (a dry run): collectives return tensors of the right shape with arbitrary
    contents. `nest`: its groups of each link level, where some collectives are run level by level.
    """

    name: str
    size: int
    index: int
    group: dist.ProcessGroup | None
    nest: Nest | None = None


def joint_axis(axes: Sequence[Axis], group: dist.ProcessGroup | None, nest: Nest | None = None) -> Axis:
    """All ranks of `axes` as one axis, in row-major order, which must be the order of `group`."""
    index = 0
    for axis in axes:
        index = index * axis.size + axis.index
    return Axis("+".join(axis.name for axis in axes), math.prod(axis.size for axis in axes), index, group, nest)


class _ConvertAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, src, dst, sum_in):
        ctx.axis, ctx.src, ctx.dst, ctx.sum_in = axis, src, dst, sum_in
        ctx.waiting = waiting_nodes((x,))
        # detached, it is no view to autograd, so that who gets it may write to it in place
        return _moved(x, axis, src, dst).detach()

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,), is_sum = gradients, ctx.sum_in is not None and dual(ctx.dst).kind == "P"
        ends = (dual(ctx.dst),), (dual(ctx.src),)
        if _is_put_off(ctx.axis, *ends, ctx.waiting):
            return *_sum_in_flight(ctx.axis, *ends, ctx.waiting, gradients, ctx.sum_in), None, None, None, None
        summed = convert(gradient.to(ctx.sum_in) if is_sum else gradient, ctx.axis, dual(ctx.dst), dual(ctx.src))
        return summed.to(gradient.dtype), None, None, None, None


def _moved(x: torch.Tensor, axis: Axis, src: Placement, dst: Placement) -> torch.Tensor:
    """`move`, with a slice copied to memory of its own, so that autograd
    keeps the slice alive and not the whole tensor.
    """
    made = move(x, axis, src, dst)
    is_slice = axis.size > 1 and src.kind in ("I", "R") and dst.is_split
    return made.clone(memory_format=torch.contiguous_format) if is_slice else made


def convert(
    x: torch.Tensor, axis: Axis, src: Placement, dst: Placement, *, sum_in: torch.dtype | None = None
) -> torch.Tensor:
    """The local part `x` converted from placement `src` to `dst` on `axis`; its gradient is converted the dual way.

    `sum_in`: dtype in which the gradient is summed over the ranks; None: its own, which it has before and after.
    """
    if not torch.is_grad_enabled():
        return _moved(x, axis, src, dst).detach()
    return _ConvertAxis.apply(x, axis, src, dst, sum_in)


class _ConvertBucket(torch.autograd.Function):
    @staticmethod
    def forward(ctx, axis, sources, targets, sum_in, *tensors):
        ctx.axis, ctx.sources, ctx.targets, ctx.sum_in = axis, sources, targets, sum_in
        ctx.waiting = waiting_nodes(tensors)
        return tuple(x.detach() for x in move_together(axis, sources, targets, *tensors))

    @staticmethod
    def backward(ctx, *grads):
        sources, targets = (tuple(map(dual, placements)) for placements in (ctx.targets, ctx.sources))
        if _is_put_off(ctx.axis, sources, targets, ctx.waiting):
            summed = _sum_in_flight(ctx.axis, sources, targets, ctx.waiting, grads, ctx.sum_in)
            return None, None, None, None, *summed
        own, is_sum = grads[0].dtype, ctx.sum_in is not None and sources[0].kind == "P"
        wide = (grad.to(ctx.sum_in) for grad in grads) if is_sum else grads
        summed = _ConvertBucket.apply(ctx.axis, sources, targets, None, *wide)
        return None, None, None, None, *(grad.to(own) for grad in summed)


def convert_together(
    axis: Axis,
    sources: Sequence[Placement],
    targets: Sequence[Placement],
    *tensors: torch.Tensor,
    sum_in: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """`convert` of several `tensors` of one dtype, each from its source to its target, with one collective for all.

    All make the same change but for the dims that are split. The collective of backward is issued when the last
    gradient has been computed. `sum_in`: dtype in which gradients are summed, None for their own.
    """
    if not torch.is_grad_enabled():
        return tuple(x.detach() for x in move_together(axis, sources, targets, *tensors))
    return _ConvertBucket.apply(axis, tuple(sources), tuple(targets), sum_in, *tensors)


def _is_put_off(axis: Axis, src: Sequence[Placement], dst: Sequence[Placement], waiting: Sequence[Any]) -> bool:
    """Whether gradients are summed while backward goes on; what is differentiated again is not."""
    if not waiting or axis.size == 1 or axis.group is None or torch.is_grad_enabled():
        return False
    return src[0].kind == "P" and (dst[0].kind in ("I", "R") or (dst[0].kind == "S" and takes_scatters(waiting)))


def _sum_in_flight(
    axis: Axis,
    sources: Sequence[Placement],
    targets: Sequence[Placement],
    waiting: Sequence[Any],
    gradients: Sequence[torch.Tensor],
    sum_in: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:
    """Start the sum of `gradients`, which arrive at the nodes `waiting`, and return placeholders of them."""
    dtype = sum_in or gradients[0].dtype
    landing = cache(begin_together(axis, sources, targets, *(x.to(dtype) for x in gradients), is_async=True))
    for place, (node, gradient) in enumerate(zip(waiting, gradients, strict=True)):
        node.in_flight.append(InFlight(landing, place, gradient.dtype))
    return tuple(placeholder(x, _part_shape(x.shape, dst, axis)) for x, dst in zip(gradients, targets))


def _part_shape(shape: Sequence[int], placement: Placement, axis: Axis) -> list[int]:
    """The shape of a rank's part in `placement` of a whole tensor of `shape`."""
    return [
        size // axis.size if placement.is_split and dim == placement.dim else size for dim, size in enumerate(shape)
    ]


def move_together(
    axis: Axis, sources: Sequence[Placement], targets: Sequence[Placement], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`convert_together` without gradients."""
    return begin_together(axis, sources, targets, *tensors)()


def begin_together(
    axis: Axis,
    sources: Sequence[Placement],
    targets: Sequence[Placement],
    *tensors: torch.Tensor,
    is_async: bool = False,
) -> Landing:
    """Begin `move_together`; the function that it returns waits for the collective and gives the tensors.

    `is_async`: whether the collective goes on meanwhile; otherwise it has ended.
    """
    changes = {(src.kind.replace("R", "I"), dst.kind.replace("R", "I")) for src, dst in zip(sources, targets)}
    assert len(changes) == 1, f"one bucket with several changes: {sources} -> {targets}"
    if axis.size > 1:
        tensors = tuple(x.detach().resolve_conj().resolve_neg() for x in tensors)
        match changes.pop():
            case "P", "I":
                return _begin_sum(axis, tensors, is_async)
            case "S", "I":
                return _begin_gather(axis, [src.dim for src in sources], tensors, is_async)
            case "P", "S":
                return _begin_scatter(axis, [dst.dim for dst in targets], tensors, is_async)
    moved = tuple(_moved(x, axis, src, dst) for x, src, dst in zip(tensors, sources, targets))
    return lambda: moved


def _wait(work: dist.Work | Chain | None, sent: torch.Tensor) -> None:
    """Wait for a collective, which holds what is `sent` until then.

    There is nothing to wait for if it was issued in turn, or by a rank without peers.
    """
    if work is not None:
        work.wait()


def _begin_sum(
    axis: Axis, tensors: Sequence[torch.Tensor], is_async: bool, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Landing:
    parts = [x.reshape(-1) for x in tensors]
    flat = torch.cat(parts)
    if axis.nest is not None and axis.nest.takes("all_reduce", flat):
        if added := axis.nest.padding(flat):
            flat = torch.cat([*parts, flat.new_zeros(added)])
        work = axis.nest.begin_sum(flat, op)
    else:
        work = None if axis.group is None else dist.all_reduce(flat, op=op, group=axis.group, async_op=is_async)
    shapes, sizes = [x.shape for x in tensors], [x.numel() for x in tensors]
    landed = partial(_sums, work, flat, shapes, sizes)
    return _ended(landed, work, is_async)


def _sums(
    work: dist.Work | Chain | None, flat: torch.Tensor, shapes: Sequence[torch.Size], sizes: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    _wait(work, flat)
    return tuple(part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes))


def _ended(landed: Landing, work: dist.Work | Chain | None, is_async: bool) -> Landing:
    """`landed`, before which the levels of a collective in turn have ended."""
    if isinstance(work, Chain) and not is_async:
        work.wait()
    return landed


def _begin_gather(axis: Axis, dims: Sequence[int], tensors: Sequence[torch.Tensor], is_async: bool) -> Landing:
    """`all_gather` of each tensor along its dim; contiguous."""
    flat = torch.cat([x.movedim(dim, 0).reshape(-1) for x, dim in zip(tensors, dims)])
    out = flat.new_empty(axis.size * flat.numel())
    if axis.nest is not None and axis.nest.takes("all_gather", out):
        gathered, work = axis.nest.in_turn(out), axis.nest.begin_gather(out, flat)
    else:
        gathered, work = out.view(axis.size, -1), None
        if axis.group is not None:
            work = gather_into(out, flat, group=axis.group, async_op=is_async)
    sizes, fronts = [x.numel() for x in tensors], [(-1, *x.movedim(dim, 0).shape[1:]) for x, dim in zip(tensors, dims)]

    def landed() -> tuple[torch.Tensor, ...]:
        _wait(work, flat)
        parts = gathered.split(sizes, dim=-1)
        # a copy even of a single part: the views of one gathered tensor would keep each other alive
        whole = (part.contiguous().view(front).movedim(0, dim) for part, front, dim in zip(parts, fronts, dims))
        return tuple(x.contiguous() for x in whole)

    return _ended(landed, work, is_async)


def _begin_scatter(axis: Axis, dims: Sequence[int], tensors: Sequence[torch.Tensor], is_async: bool) -> Landing:
    """`reduce_scatter` of each tensor along its dim; contiguous."""
    parts = [x.movedim(dim, 0).reshape(axis.size, -1) for x, dim in zip(tensors, dims)]
    num_parts = sum(part.shape[1] for part in parts)
    out, work = tensors[0].new_empty(num_parts), None
    if axis.nest is not None and axis.nest.nesting.takes("reduce_scatter", axis.size * num_parts * out.itemsize):
        flat = torch.cat([axis.nest.scattered(part) for part in parts], dim=-1).contiguous()
        work = axis.nest.begin_scatter(out, flat.view(-1))
    else:
        flat = torch.cat(parts, dim=1)
        if axis.group is not None:
            work = scatter_into(out, flat.view(-1), group=axis.group, async_op=is_async)
    sizes = [x.numel() // axis.size for x in tensors]
    fronts = [(x.shape[dim] // axis.size, *x.movedim(dim, 0).shape[1:]) for x, dim in zip(tensors, dims)]

    def landed() -> tuple[torch.Tensor, ...]:
        _wait(work, flat)
        parts = zip(out.split(sizes), fronts, dims)
        return tuple(part.view(front).movedim(0, dim).contiguous() for part, front, dim in parts)

    return _ended(landed, work, is_async)


def dual(placement: Placement) -> Placement:
    """The placement of the gradient of a value with `placement` (docs/architecture.md, "SBP").

    The gradient of P is whole: R rather than I, for the backward that reads it differs between the ranks. The two are
    one until it is differentiated again.
    """
    return {"P": R, "R": P}.get(placement.kind, placement)


def move(x: torch.Tensor, axis: Axis, src: Placement, dst: Placement) -> torch.Tensor:
    """This rank's part of a tensor in placement `dst` from that in `src`, as `convert`, without a gradient.

    I and R are the same here: a whole value is equal on every rank.
    """
    src_kind, dst_kind = src.kind.replace("R", "I"), dst.kind.replace("R", "I")
    if axis.size == 1 or (src_kind == dst_kind and src.dim == dst.dim):
        return x
    x = x.detach().resolve_conj().resolve_neg()  # collectives send memory as it is
    match src_kind, dst_kind:
        case "P", "I":
            return all_reduce(x, axis)
        case "P", "S":
            return reduce_scatter(x, axis, dst.dim)
        case "S", "I":
            return all_gather(x, axis, src.dim)
        case "S", "S":
            return all_to_all(x, axis, src.dim, dst.dim)
        case "I", "S":
            return x.chunk(axis.size, dst.dim)[axis.index]
        case "I", "P":
            return x if axis.index == 0 else torch.zeros_like(x)
        case "S", "P":
            return _pad(x, axis, src.dim)
    raise AssertionError(f"no conversion {src} -> {dst}")


def all_reduce(x: torch.Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """The sum (or `op`) of the ranks' `x` as a new tensor; not differentiable."""
    if axis.nest is not None and axis.nest.takes("all_reduce", x):
        return _begin_sum(axis, (x,), False, op)()[0]
    out = x.clone(memory_format=torch.contiguous_format)
    if axis.group is not None:
        dist.all_reduce(out, op=op, group=axis.group)
    return out


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part along `dim` of the sum of the ranks' `x`; contiguous."""
    if axis.nest is not None and axis.nest.takes("reduce_scatter", x):
        return _begin_scatter(axis, (dim,), (x,), False)()[0]
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    if axis.group is not None:
        scatter_into(out, x, group=axis.group)
    return out.movedim(0, dim).contiguous()


def all_gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """The ranks' `x` concatenated along `dim` in rank order; contiguous, which some ops require."""
    if axis.nest is not None and axis.nest.nesting.takes("all_gather", axis.size * x.numel() * x.itemsize):
        return _begin_gather(axis, (dim,), (x,), False)()[0]
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    if axis.group is not None:
        gather_into(out, x, group=axis.group)
    return out.movedim(0, dim).contiguous()


def all_to_all(x: torch.Tensor, axis: Axis, src_dim: int, dst_dim: int) -> torch.Tensor:
    """The local part `x` of a tensor split along `src_dim`, converted to a split along `dst_dim`."""
    parts = torch.stack(x.chunk(axis.size, dst_dim)).contiguous()
    out = torch.empty_like(parts)
    if axis.group is not None:
        dist.all_to_all_single(out, parts, group=axis.group)
    return torch.cat(out.unbind(0), dim=src_dim)


def _pad(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] *= axis.size
    out = x.new_zeros(shape)
    out.chunk(axis.size, dim)[axis.index].copy_(x)
    return out
