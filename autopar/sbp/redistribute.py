"""Change a tensor's layout: the one list of steps that is both priced and emitted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from autopar.ir.graph import Value
from autopar.sbp.placement import I, Layout, Placement, local_shape

# (src kind, dst kind) -> collective in forward, collective in backward (DESIGN's conversion table); "" is local.
CONVERSIONS = {
    ("I", "R"): ("", "all_reduce"),
    ("P", "I"): ("all_reduce", ""),
    ("P", "R"): ("all_reduce", "all_reduce"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("S", "R"): ("all_gather", "reduce_scatter"),
    ("S", "I"): ("all_gather", ""),
    ("I", "S"): ("", "all_gather"),
    ("S", "S"): ("all_to_all", "all_to_all"),
    ("R", "S"): ("", ""),
    ("S", "P"): ("", ""),
    ("R", "P"): ("", ""),
    ("I", "P"): ("", ""),
    ("R", "I"): ("", ""),
}


@dataclass(frozen=True, slots=True)
class Step:
    """On mesh axis `axis`, turn `src` into `dst`; `layout` is the whole layout before the step."""

    axis: int
    src: Placement
    dst: Placement
    layout: Layout

    @property
    def after(self) -> Layout:
        return self.layout[: self.axis] + (self.dst,) + self.layout[self.axis + 1 :]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective on one mesh axis. `num_bytes`: the larger side of its buffers on one rank (all-reduce: the buffer)."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all
    axis: int
    num_bytes: int
    phase: str  # "forward" or "backward"


def _is_ready(layout: Layout, dst: Layout, axis: int) -> bool:
    """Parts of a dim lie in mesh order, so a split is made or undone only while no inner axis splits the same dim,
    and made only after every outer axis that still has to split or unsplit that dim has done so."""
    moved = {p.dim for p in (layout[axis], dst[axis]) if p.is_split}
    if any(inner.is_split and inner.dim in moved for inner in layout[axis + 1 :]):
        return False
    waiting = {p.dim for a in range(axis) if layout[a] != dst[a] for p in (layout[a], dst[a]) if p.is_split}
    return not (dst[axis].is_split and dst[axis].dim in waiting)


def _urgency(src: Placement, dst: Placement) -> int:
    """Steps that shrink the local tensor come first, those that grow it last."""
    order = {("I", "S"): 0, ("R", "S"): 0, ("P", "S"): 1, ("S", "S"): 2, ("S", "R"): 4, ("S", "I"): 4, ("S", "P"): 4}
    return order.get((src.kind, dst.kind), 3)


@cache
def redistribute(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """Steps that turn layout `src` into `dst`, each one conversion of `CONVERSIONS` on one axis."""
    steps: list[Step] = []
    layout = src
    while layout != dst:
        axis, placement = _next_move(layout, dst)
        steps.append(Step(axis, layout[axis], placement, layout))
        layout = steps[-1].after
    return tuple(steps)


def _next_move(layout: Layout, dst: Layout) -> tuple[int, Placement]:
    pending = [axis for axis in range(len(dst)) if layout[axis] != dst[axis]]
    ready = [axis for axis in pending if _is_ready(layout, dst, axis)]
    if ready:
        # among equals the innermost axis first: inner links are the faster ones
        axis = min(ready, key=lambda a: (_urgency(layout[a], dst[a]), -a))
        return axis, dst[axis]
    blocked = {p.dim for a in pending for p in (layout[a], dst[a]) if p.is_split}
    return max(a for a, p in enumerate(layout) if p.is_split and p.dim in blocked), I


def collectives_of(
    step: Step, shape: tuple[int, ...], itemsize: int, mesh_shape: tuple[int, ...], needs_grad: bool
) -> tuple[Collective, ...]:
    """The collectives of one step on a tensor of global `shape`, forward then backward; none on an axis of size 1."""
    if mesh_shape[step.axis] == 1:
        return ()
    forward, backward = CONVERSIONS[step.src.kind, step.dst.kind]
    before, after = (_local_bytes(shape, layout, itemsize, mesh_shape) for layout in (step.layout, step.after))
    num_bytes = max(before, after)
    found = [Collective(forward, step.axis, num_bytes, "forward")] if forward else []
    if backward and needs_grad:
        found.append(Collective(backward, step.axis, num_bytes, "backward"))
    return tuple(found)


def collectives_together(step: Step, values: Sequence[Value], mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """The collectives of one step made on several values at once: each kind once, with the bytes of all."""
    each = (collectives_of(step, value.shape, value.dtype.itemsize, mesh_shape, value.needs_grad) for value in values)
    return tuple(replace(same[0], num_bytes=sum(one.num_bytes for one in same)) for same in zip(*each))


def again_in_backward(steps: Sequence[Step], value: Value, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """The collectives of making a value anew while backward runs: what forward issued, without a gradient."""
    found = (collectives_of(step, value.shape, value.dtype.itemsize, mesh_shape, False) for step in steps)
    return tuple(replace(collective, phase="backward") for of_step in found for collective in of_step)


def _local_bytes(shape: tuple[int, ...], layout: Layout, itemsize: int, mesh_shape: tuple[int, ...]) -> int:
    size = itemsize
    for extent in local_shape(shape, layout, mesh_shape):
        size *= extent
    return size
