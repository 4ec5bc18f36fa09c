"""Redistribution: the steps that change a tensor's layout, and their collectives; both are priced and emitted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.ir.graph import Value
from autopar.sbp.placement import (
    PENDING,
    UNIT,
    WHOLE,
    Codes,
    I,
    Layout,
    Placement,
    codes_of,
    is_convertible,
    is_even,
    kind_of,
    local_shape,
    placement_of,
)

# (src kind, dst kind) -> (collective in forward, collective in backward); "" is a local operation.
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
NEVER_BYTES = 2**62  # of a conversion that there is not: more than any plan moves


Move = tuple[
    tuple[int, ...], int, int, Codes
]  # axes, code before, code after, the whole layout before; see `LayoutStep`


@dataclass(frozen=True, slots=True)
class LayoutStep:
    """A conversion from placement `src` to `dst` on mesh `axes` (ascending), taken as one axis in row-major order.

    `layout` is the tensor's whole layout before the step.
    """

    axes: tuple[int, ...]
    src: Placement
    dst: Placement
    layout: Layout

    @property
    def after(self) -> Layout:
        return tuple([self.dst if axis in self.axes else placement for axis, placement in enumerate(self.layout)])


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over all ranks of some mesh axes; `num_bytes`: of the larger of its two buffers on one rank.

    Of an uneven all-to-all, and of any collective of rows that were exchanged by one, it is the mean over the ranks,
    which is the same whatever their shares are. `level`: the link level, from the inside, of one that is a part of a
    collective over several (`nested.Nesting`), -1 of a whole one.
    """

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, permute (each rank sends to the next)
    axes: tuple[int, ...]
    num_bytes: int
    phase: str  # "forward" or "backward"
    level: int = -1


@dataclass(frozen=True, slots=True)
class CollectiveKind:
    """A collective of a step for values of any size: `num_bytes` of its `Collective` is the value's over `divisor`."""

    kind: str
    axes: tuple[int, ...]
    divisor: int
    phase: str

    def num_bytes(self, num_elements: int, itemsize: int, sum_itemsize: int) -> int:
        """Bytes for a value of this size; `sum_itemsize`: of its gradient while that is summed (`Value.sum_dtype`)."""
        is_sum = self.phase == "backward" and self.kind in ("all_reduce", "reduce_scatter")
        return num_elements * (sum_itemsize if is_sum else itemsize) // self.divisor


@lru_cache(maxsize=2**16)
def redistribute(src: Layout, dst: Layout) -> tuple[LayoutStep, ...]:
    """The steps from layout `src` to `dst`, each one conversion of
    `CONVERSIONS` on one or several mesh axes at once.
    """
    assert is_convertible(src, dst), f"what each rank has of its own tokens is not converted: {src} to {dst}"
    return tuple(map(step_of, moves(codes_of(src), codes_of(dst))))


def step_of(move: Move) -> LayoutStep:
    """The step that a move of codes is."""
    axes, have, want, before = move
    return LayoutStep(axes, placement_of(have), placement_of(want), tuple(map(placement_of, before)))


def moves(src: Codes, dst: Codes) -> list[Move]:
    """`redistribute` on the codes of layouts (`placement.codes_of`),
    fast enough for the very many pairs of planning.
    """
    path: list[Move] = []
    layout = src
    while layout != dst:
        axes, want = _next_move(layout, dst)
        have = layout[axes[0]]
        before = layout
        if path and path[-1][1:3] == (have, want):
            # Axes that may make a change one after the other may make it as one axis: neither splits the dim within
            # the other at its turn.
            others, _, _, before = path.pop()
            axes = tuple(sorted(others + axes))
        path.append((axes, have, want, before))
        layout = tuple([want if axis in axes else code for axis, code in enumerate(before)])
    return path


def _next_move(layout: Codes, dst: Codes) -> tuple[tuple[int, ...], int]:
    """(axes that change next, code of their new placement)."""
    groups: dict[tuple[int, int], list[int]] = {}
    for axis, pair in enumerate(zip(layout, dst)):
        if pair[0] != pair[1]:
            groups.setdefault(pair, []).append(axis)
    best, best_key, target = None, (0, 0), 0
    for (have, want), group in groups.items():
        axes = _most_ready(layout, dst, tuple(group))
        # Ties: the innermost axes first, since inner links are faster and gathers then end with the largest group.
        if axes and (best is None or (_urgency(have, want), -axes[0]) < best_key):
            best, best_key, target = axes, (_urgency(have, want), -axes[0]), want
    if best is not None:
        return best, target
    blocked = {code % UNIT for pair in groups for code in pair}
    return (max(axis for axis, code in enumerate(layout) if code >= 0 and code % UNIT in blocked),), WHOLE


def _urgency(have: int, want: int) -> int:
    """The sort key of a change: steps that shrink the local tensor come first, steps that grow it last."""
    if want >= 0:
        return 2 if have >= 0 else int(have == PENDING)
    return 4 if have >= 0 else 3


def _most_ready(layout: Codes, dst: Codes, group: tuple[int, ...]) -> tuple[int, ...]:
    """The longest run of neighbouring axes in `group` that may change now as one axis, () if there is none."""
    for size in range(len(group), 0, -1):
        for start in range(len(group) - size, -1, -1):
            if _is_ready(layout, dst, group[start : start + size]):
                return group[start : start + size]
    return ()


def _is_ready(layout: Codes, dst: Codes, axes: tuple[int, ...]) -> bool:
    """Whether `axes`, which all make the same change, may make it now as one axis.

    Parts of a dim lie in mesh order, and the ranks of `axes` in row-major order, in the position of their outermost
    axis. So a split is made or undone only while no other axis further inside splits the same dim. It is made only
    after every other axis outside the innermost of `axes` has made its changes of that dim.
    """
    have, want = layout[axes[0]], dst[axes[0]]
    if have < 0 and want < 0:
        return True
    is_made = want >= 0
    if have % UNIT == want % UNIT:  # other parts of one dim: by way of the whole
        return False
    have, want = have % UNIT, want % UNIT  # only the dims matter; UNIT - 1 and less is none
    for axis in range(axes[0] + 1, len(layout)):
        if layout[axis] >= 0 and layout[axis] % UNIT in (have, want) and axis not in axes:
            return False
    if is_made:
        for axis in range(axes[-1]):
            if layout[axis] != dst[axis] and want in (layout[axis] % UNIT, dst[axis] % UNIT) and axis not in axes:
                return False
    return True


def live_axes(axes: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The `axes` of more than one rank; on all others a collective has nothing to do."""
    return tuple([axis for axis in axes if mesh_shape[axis] > 1])


def collective_kinds(move: Move, mesh_shape: tuple[int, ...]) -> tuple[CollectiveKind, ...]:
    """The collectives of one step, forward then backward; axes of size 1 take no part.

    The larger side of the buffers is split by all other axes that split the value, and by those of the step only where
    both sides are split (all-to-all).
    """
    axes, have, want, before = move
    members = live_axes(axes, mesh_shape)
    if not members:
        return ()
    splits = [size for axis, size in enumerate(mesh_shape) if before[axis] >= 0 and (want >= 0 or axis not in axes)]
    forward, backward = CONVERSIONS[kind_of(have), kind_of(want)]
    kinds = [CollectiveKind(forward, members, math.prod(splits), "forward")] if forward else []
    if backward:
        kinds.append(CollectiveKind(backward, members, math.prod(splits), "backward"))
    return tuple(kinds)


def collectives_of(
    step: LayoutStep,
    shape: tuple[int, ...],
    itemsize: int,
    mesh_shape: tuple[int, ...],
    needs_grad: bool,
    *,
    sum_itemsize: int = 0,
) -> tuple[Collective, ...]:
    """The collectives of one step on a tensor of global `shape`, forward then backward; axes of size 1 take no part.

    `sum_itemsize`: of its gradient while that is summed, `itemsize` if 0.
    """
    have, want = codes_of((step.src, step.dst))
    num_elements = math.prod(shape)
    kinds = collective_kinds((step.axes, have, want, codes_of(step.layout)), mesh_shape)
    if kinds and not (is_even(shape, step.layout, mesh_shape) and is_even(shape, step.after, mesh_shape)):
        kinds, num_elements = [replace(kind, divisor=1) for kind in kinds], _sent_elements(step, shape, mesh_shape)
    size = num_elements, itemsize, sum_itemsize or itemsize
    return tuple(
        [
            Collective(found.kind, found.axes, found.num_bytes(*size), found.phase)
            for found in kinds
            if needs_grad or found.phase == "forward"
        ]
    )


def _sent_elements(step: LayoutStep, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> int:
    """Elements of the larger buffer on the first rank, where parts differ: each is sent as if as large as the first,
    and of shares as the largest, whichever rank sees them.
    """
    before = tuple(_unseen(one) if axis in step.axes else one for axis, one in enumerate(step.layout))
    local = local_shape(shape, before, mesh_shape)
    if step.dst.is_split:
        placed = tuple(_unseen(step.dst) if axis in step.axes else I for axis in range(len(mesh_shape)))
        local = local_shape(local, placed, mesh_shape)
    is_cut = step.src.is_split or step.dst.is_split
    return math.prod(local) * math.prod(mesh_shape[axis] for axis in step.axes if is_cut)


def _unseen(placement: Placement) -> Placement:
    return replace(placement, shares=tuple(placement.shares)) if placement.shares else placement


def collectives_of_value(step: LayoutStep, value: Value, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """`collectives_of` one step on a value of the graph."""
    facts = value.shape, value.dtype.itemsize, mesh_shape, value.needs_grad
    return collectives_of(step, *facts, sum_itemsize=value.sum_itemsize)


def collectives_together(
    steps: Sequence[LayoutStep], values: Sequence[Value], mesh_shape: tuple[int, ...]
) -> tuple[Collective, ...]:
    """The collectives of a step for each of several values, made at once: each kind once, with the bytes of all."""
    each = (collectives_of_value(step, value, mesh_shape) for step, value in zip(steps, values, strict=True))
    return tuple(replace(same[0], num_bytes=sum(one.num_bytes for one in same)) for same in zip(*each))


def again_in_backward(steps: Sequence[LayoutStep], value: Value, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """The collectives of converting a value again in backward: those of forward, without its gradient's."""
    found = (collectives_of(step, value.shape, value.dtype.itemsize, mesh_shape, False) for step in steps)
    return tuple(replace(collective, phase="backward") for of_step in found for collective in of_step)
