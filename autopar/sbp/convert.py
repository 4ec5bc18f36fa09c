"""Differentiable conversions between placements on mesh axes: the runtime of `sbp.redistribute`.

`spmd_types` has the same conversions, but the all-reduce of its backward asserts a contiguous gradient, which autograd
does not promise (the gradient of `sum` is an expanded view).
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from autopar.sbp.axis import Axis
from autopar.sbp.in_flight import Landing, Receiver, expect, given_back, taken, timed
from autopar.sbp.nested import Chain, gather_into, scatter_into
from autopar.sbp.placement import P, Placement, R
from autopar.sbp.uneven.dim_parts import DimParts


def _parts_of(axis: Axis, placement: Placement, extent: int | None) -> DimParts:
    """The parts of a dim of size `extent` in `placement`; None: they are equal."""
    if placement.sections:
        return DimParts(placement.dim, sections=placement.sections, num_parts=axis.size)
    is_even = extent is None or not (placement.shares or extent % (axis.size * placement.unit))
    return DimParts(placement.dim, () if is_even else axis.parts(extent or 0, placement))


def is_float8(dtype: torch.dtype) -> bool:
    """Whether it is a float of 8 bits, of which neither kernels nor backends have sums."""
    return dtype.is_floating_point and dtype.itemsize == 1


Extents = tuple[int | None, ...]  # of several tensors, as of `convert`; () if all parts are equal


class _ConvertAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, src, dst, sum_in, extent):
        ctx.axis, ctx.src, ctx.dst, ctx.sum_in = axis, src, dst, sum_in
        ctx.extent = x.shape[dst.dim] if dst.is_split else None  # of the gradient's parts
        expect(ctx, (x,))
        # detached, it is no view to autograd, so that who gets it may write to it in place
        return _moved(x, axis, src, dst, extent).detach()

    @staticmethod
    def backward(ctx, *gradients):
        gradients, is_sum = taken(ctx, gradients), ctx.sum_in is not None and dual(ctx.dst).kind == "P"
        ends = (dual(ctx.dst),), (dual(ctx.src),)
        if _is_put_off(ctx.axis, *ends, ctx.waiting):
            return *_sum_in_flight(ctx, ctx.axis, *ends, gradients), None, None, None, None, None
        gradient = gradients[0].to(ctx.sum_in if is_sum else ctx.dtype)
        summed = convert(gradient, ctx.axis, dual(ctx.dst), dual(ctx.src), extent=ctx.extent)
        return *given_back(ctx, (summed,)), None, None, None, None, None


def _moved(x: torch.Tensor, axis: Axis, src: Placement, dst: Placement, extent: int | None = None) -> torch.Tensor:
    """`move`, with a slice copied to memory of its own, so that autograd
    keeps the slice alive and not the whole tensor.
    """
    made = move(x, axis, src, dst, extent)
    is_slice = axis.size > 1 and src.kind in ("I", "R") and dst.is_split
    return made.clone(memory_format=torch.contiguous_format) if is_slice else made


def convert(
    x: torch.Tensor,
    axis: Axis,
    src: Placement,
    dst: Placement,
    *,
    sum_in: torch.dtype | None = None,
    extent: int | None = None,
) -> torch.Tensor:
    """The local part `x` converted from placement `src` to `dst` on `axis`; its gradient is converted the dual way.

    `sum_in`: dtype in which the gradient is summed over the ranks; None: its own, which it has before and after.
    `extent`: the size of the dim that `src` splits, on all ranks of the axis together; None if their parts are equal.
    """
    if not torch.is_grad_enabled():
        return _moved(x, axis, src, dst, extent).detach()
    return _ConvertAxis.apply(x, axis, src, dst, sum_in, extent)


class _ConvertBucket(torch.autograd.Function):
    @staticmethod
    def forward(ctx, axis, sources, targets, sum_in, extents, *tensors):
        ctx.axis, ctx.sources, ctx.targets, ctx.sum_in = axis, sources, targets, sum_in
        ctx.extents = tuple(x.shape[dst.dim] if dst.is_split else None for x, dst in zip(tensors, targets))
        expect(ctx, tensors)
        moved = tuple(x.detach() for x in move_together(axis, sources, targets, *tensors, extents=extents))
        # otherwise all would need a gradient because one does, as if nothing were frozen
        ctx.mark_non_differentiable(*(made for x, made in zip(tensors, moved, strict=True) if not x.requires_grad))
        return moved

    @staticmethod
    def backward(ctx, *grads):
        sources, targets = (tuple(map(dual, placements)) for placements in (ctx.targets, ctx.sources))
        grads = taken(ctx, grads)
        if _is_put_off(ctx.axis, sources, targets, ctx.waiting):
            return None, None, None, None, None, *_sum_in_flight(ctx, ctx.axis, sources, targets, grads)
        is_sum = ctx.sum_in is not None and sources[0].kind == "P"
        wide = (grad.to(ctx.sum_in if is_sum else ctx.dtype) for grad in grads)
        summed = _ConvertBucket.apply(ctx.axis, sources, targets, None, ctx.extents, *wide)
        return None, None, None, None, None, *given_back(ctx, summed)


def convert_together(
    axis: Axis,
    sources: Sequence[Placement],
    targets: Sequence[Placement],
    *tensors: torch.Tensor,
    sum_in: torch.dtype | None = None,
    extents: Extents = (),
) -> tuple[torch.Tensor, ...]:
    """`convert` of several `tensors` of one dtype, each from its source to its target, with one collective for all.

    All make the same change but for the dims that are split. The collective of backward is issued when the last
    gradient has been computed. `sum_in`: dtype in which gradients are summed, None for their own.
    """
    if not torch.is_grad_enabled():
        return tuple(x.detach() for x in move_together(axis, sources, targets, *tensors, extents=extents))
    return _ConvertBucket.apply(axis, tuple(sources), tuple(targets), sum_in, extents, *tensors)


def _is_put_off(axis: Axis, src: Sequence[Placement], dst: Sequence[Placement], waiting: Sequence[Receiver]) -> bool:
    """Whether gradients are summed while backward goes on; what is differentiated again is not."""
    if not waiting or axis.size == 1 or axis.group is None or torch.is_grad_enabled():
        return False
    return src[0].kind == "P" and (
        dst[0].kind in ("I", "R") or (dst[0].kind == "S" and all(one.takes_scatters for one in waiting))
    )


def _sum_in_flight(
    ctx: Any, axis: Axis, sources: Sequence[Placement], targets: Sequence[Placement], gradients: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Start the sum of `gradients`, which arrive at what waits for those of node `ctx`, and return placeholders."""
    dtype = ctx.sum_in or ctx.dtype
    landing = cache(begin_together(axis, sources, targets, *(x.to(dtype) for x in gradients), is_async=True))
    for place, receiver in enumerate(ctx.waiting):
        receiver.put(landing, place, ctx.dtype)
    nothing = gradients[0].new_zeros((), dtype=ctx.dtype)
    return tuple(nothing.expand(_part_shape(x.shape, dst, axis)) for x, dst in zip(gradients, targets))


def _part_shape(shape: Sequence[int], placement: Placement, axis: Axis) -> Sequence[int]:
    """The shape of a rank's part in `placement` of a whole tensor of `shape`."""
    if not placement.is_split:
        return shape
    return [axis.part_in(placement, size) if dim == placement.dim else size for dim, size in enumerate(shape)]


def move_together(
    axis: Axis,
    sources: Sequence[Placement],
    targets: Sequence[Placement],
    *tensors: torch.Tensor,
    extents: Extents = (),
) -> tuple[torch.Tensor, ...]:
    """`convert_together` without gradients."""
    return begin_together(axis, sources, targets, *tensors, extents=extents)()


def begin_together(
    axis: Axis,
    sources: Sequence[Placement],
    targets: Sequence[Placement],
    *tensors: torch.Tensor,
    extents: Extents = (),
    is_async: bool = False,
) -> Landing:
    """Begin `move_together`; the function that it returns waits for the collective and gives the tensors.

    `is_async`: whether the collective goes on meanwhile; otherwise it has ended.
    """
    changes = {(_forward_kind(src), _forward_kind(dst)) for src, dst in zip(sources, targets)}
    assert len(changes) == 1, f"one bucket with several changes: {sources} -> {targets}"
    if changes == {("I", "I")}:
        return lambda: tensors
    extents = extents or (None,) * len(tensors)
    if axis.size > 1 and is_float8(tensors[0].dtype):
        as_bytes = [x.detach().view(torch.uint8) for x in tensors]
        landed = begin_together(axis, sources, targets, *as_bytes, extents=extents, is_async=is_async)
        return lambda: tuple(x.view(of.dtype) for x, of in zip(landed(), tensors))
    if axis.size > 1:
        tensors = tuple(x.detach().resolve_conj().resolve_neg() for x in tensors)
        match changes.pop():
            case "P", "I":
                return _begin_sum(axis, tensors, is_async)
            case "S", "I":
                return _begin_gather(axis, list(map(partial(_parts_of, axis), sources, extents)), tensors, is_async)
            case "P", "S":
                parts = [_parts_of(axis, dst, x.shape[dst.dim]) for x, dst in zip(tensors, targets)]
                return _begin_scatter(axis, parts, tensors, is_async)
    moved = tuple(_moved(x, axis, src, dst, one) for x, src, dst, one in zip(tensors, sources, targets, extents))
    return lambda: moved


def _wait(work: dist.Work | Chain | None, sent: torch.Tensor) -> None:
    """Wait for a collective, which holds what is `sent` until then.

    There is nothing to wait for if it was issued in turn, or by a rank without peers.
    """
    if work is not None:
        timed(work.wait)


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
        work = None if axis.group is None else timed(dist.all_reduce, flat, op=op, group=axis.group, async_op=is_async)
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


def _begin_gather(axis: Axis, dims: Sequence[DimParts], tensors: Sequence[torch.Tensor], is_async: bool) -> Landing:
    """`all_gather` of each tensor along its dim; contiguous."""
    padded = [of.padded(x.movedim(of.dim, 0)) for x, of in zip(tensors, dims)]
    flat = torch.cat([x.reshape(-1) for x in padded])
    out = flat.new_empty(axis.size * flat.numel())
    if axis.nest is not None and axis.nest.takes("all_gather", out):
        gathered, work = axis.nest.in_turn(out), axis.nest.begin_gather(out, flat)
    else:
        gathered, work = out.view(axis.size, -1), None
        if axis.group is not None:
            work = timed(gather_into, out, flat, group=axis.group, async_op=is_async)
    sizes, fronts = [x.numel() for x in padded], [(axis.size * x.shape[0], *x.shape[1:]) for x in padded]
    del padded

    def landed() -> tuple[torch.Tensor, ...]:
        _wait(work, flat)
        parts = gathered.split(sizes, dim=-1)
        # a copy even of a single part: the views of one gathered tensor would keep each other alive
        whole = (of.joined(part.contiguous().view(front)) for part, front, of in zip(parts, fronts, dims))
        return tuple(x.movedim(0, of.dim).contiguous() for x, of in zip(whole, dims))

    return _ended(landed, work, is_async)


def _begin_scatter(axis: Axis, dims: Sequence[DimParts], tensors: Sequence[torch.Tensor], is_async: bool) -> Landing:
    """`reduce_scatter` of each tensor along its dim; contiguous."""
    spread = [of.spread(x.movedim(of.dim, 0)) for x, of in zip(tensors, dims)]
    fronts = [(x.shape[0] // axis.size, *x.shape[1:]) for x in spread]
    parts = [x.reshape(axis.size, -1) for x in spread]
    sizes = [part.shape[1] for part in parts]
    out, work = tensors[0].new_empty(sum(sizes)), None
    if axis.nest is not None and axis.nest.nesting.takes("reduce_scatter", axis.size * sum(sizes) * out.itemsize):
        flat = torch.cat([axis.nest.scattered(part) for part in parts], dim=-1).contiguous()
        work = axis.nest.begin_scatter(out, flat.view(-1))
    else:
        flat = torch.cat(parts, dim=1)
        if axis.group is not None:
            work = timed(scatter_into, out, flat.view(-1), group=axis.group, async_op=is_async)
    del spread, parts

    def landed() -> tuple[torch.Tensor, ...]:
        _wait(work, flat)
        own = (of.own(part.view(front), axis.index) for part, front, of in zip(out.split(sizes), fronts, dims))
        return tuple(x.movedim(0, of.dim).contiguous() for x, of in zip(own, dims))

    return _ended(landed, work, is_async)


def dual(placement: Placement) -> Placement:
    """The placement of the gradient of a value with `placement` (docs/architecture.md, "SBP").

    The gradient of P is whole: R rather than I, for the backward that reads it differs between the ranks. The two are
    one until it is differentiated again.
    """
    return {"P": R, "R": P}.get(placement.kind, placement)


def _forward_kind(placement: Placement) -> str:
    """The kind of a placement; of the two of whole values, which differ by their gradients alone, I."""
    return "I" if placement.kind == "R" else placement.kind


def move(x: torch.Tensor, axis: Axis, src: Placement, dst: Placement, extent: int | None = None) -> torch.Tensor:
    """This rank's part of a tensor in placement `dst` from that in `src`, as `convert`, without a gradient.

    I and R are the same here: a whole value is equal on every rank.
    """
    src_kind, dst_kind = _forward_kind(src), _forward_kind(dst)
    if axis.size == 1 or (src_kind == dst_kind and src.dim == dst.dim):
        return x
    x = x.detach().resolve_conj().resolve_neg()  # collectives send memory as it is
    if is_float8(x.dtype):  # which backends do not know; no rule adds it up
        return move(x.view(torch.uint8), axis, src, dst, extent).view(x.dtype)
    match src_kind, dst_kind:
        case "P", "I":
            return all_reduce(x, axis)
        case "P", "S":
            return reduce_scatter(x, axis, _parts_of(axis, dst, x.shape[dst.dim]))
        case "S", "I":
            return all_gather(x, axis, _parts_of(axis, src, extent))
        case "S", "S":
            return all_to_all(x, axis, _parts_of(axis, src, extent), _parts_of(axis, dst, x.shape[dst.dim]))
        case "I", "S":
            return _parts_of(axis, dst, x.shape[dst.dim]).of_whole(x, axis.index, axis.size)
        case "I", "P":
            return x if axis.index == 0 else torch.zeros_like(x)
        case "S", "P":
            return _with_zeros(x, axis, _parts_of(axis, src, extent))
    raise AssertionError(f"no conversion {src} -> {dst}")


def all_reduce(x: torch.Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """The sum (or `op`) of the ranks' `x` as a new tensor; not differentiable."""
    if axis.nest is not None and axis.nest.takes("all_reduce", x):
        return _begin_sum(axis, (x,), False, op)()[0]
    out = x.clone(memory_format=torch.contiguous_format)
    if axis.group is not None:
        timed(dist.all_reduce, out, op=op, group=axis.group)
    return out


def reduce_scatter(x: torch.Tensor, axis: Axis, of: DimParts) -> torch.Tensor:
    """This rank's part of the sum of the ranks' `x`; contiguous."""
    whole, x = x, of.spread(x.movedim(of.dim, 0)).contiguous()
    if axis.nest is not None and axis.nest.takes("reduce_scatter", x):
        return _begin_scatter(axis, (of,), (whole,), False)()[0]
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    if axis.group is not None:
        timed(scatter_into, out, x, group=axis.group)
    return of.own(out, axis.index).movedim(0, of.dim).contiguous()


def all_gather(x: torch.Tensor, axis: Axis, of: DimParts) -> torch.Tensor:
    """The ranks' `x` concatenated in rank order; contiguous, which some ops require."""
    part = of.padded(x.movedim(of.dim, 0))
    if axis.nest is not None and axis.nest.nesting.takes("all_gather", axis.size * part.numel() * part.itemsize):
        return _begin_gather(axis, (of,), (x,), False)()[0]
    part = part.contiguous()
    out = part.new_empty((part.shape[0] * axis.size, *part.shape[1:]))
    if axis.group is not None:
        timed(gather_into, out, part, group=axis.group)
    return of.joined(out).movedim(0, of.dim).contiguous()


def all_to_all(x: torch.Tensor, axis: Axis, src: DimParts, dst: DimParts) -> torch.Tensor:
    """The local part `x` of a tensor in the parts `src`, converted to the part of one in the parts `dst`."""
    x = src.padded(x.movedim(src.dim, 0)).movedim(0, src.dim) if src.sizes else x
    x = dst.spread(x.movedim(dst.dim, 0)).movedim(0, dst.dim) if dst.sizes or dst.sections else x
    parts = torch.stack(x.chunk(axis.size, dst.dim)).contiguous()
    out = torch.empty_like(parts)
    if axis.group is not None:
        timed(dist.all_to_all_single, out, parts, group=axis.group)
    whole = torch.cat(out.unbind(0), dim=src.dim)
    whole = src.joined(whole.movedim(src.dim, 0)).movedim(0, src.dim) if src.sizes or src.sections else whole
    return dst.own(whole.movedim(dst.dim, 0), axis.index).movedim(0, dst.dim).contiguous() if dst.sizes else whole


def _with_zeros(x: torch.Tensor, axis: Axis, of: DimParts) -> torch.Tensor:
    """A tensor of the size of all parts together, with `x` in the place of this rank's."""
    sizes = of.sizes or (x.shape[of.dim],) * axis.size
    shape = list(x.shape)
    shape[of.dim] = sum(sizes)
    out = x.new_zeros(shape)
    out.narrow(of.dim, sum(sizes[: axis.index]), sizes[axis.index]).copy_(x)
    return of.joined(out.movedim(of.dim, 0)).movedim(0, of.dim).contiguous() if of.sections else out
