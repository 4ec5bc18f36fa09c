"""All pairs of layouts on one to three axes: the steps move the right numbers, forward and backward, in as few bytes as
axis by axis.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from autopar.sbp.convert import dual
from autopar.sbp.placement import I, Layout, P, Placement, R, S, is_even, local_shape, parse_layout
from autopar.sbp.proof.cut_and_join import Coordinate, Parts, cut, join
from autopar.sbp.redistribute import CONVERSIONS, Collective, LayoutStep, collectives_of, redistribute

MESHES = [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)]
Moved = tuple[str, int] | None
SHAPE = (24, 24)  # divides by every product of axes above
PLACEMENTS = (S(0), S(1), P, I, R)


def pairs(num_axes: int) -> Iterator[tuple[Layout, Layout]]:
    return itertools.product(itertools.product(PLACEMENTS, repeat=num_axes), repeat=2)


def convert_parts(
    parts: Parts, axes: tuple[int, ...], src: Placement, dst: Placement, mesh_shape: tuple[int, ...]
) -> Parts:
    """One conversion on some axes, straight from what the placements mean: join the ranks of these axes in mesh order,
    cut anew.
    """
    places = list(itertools.product(*(range(mesh_shape[axis]) for axis in axes)))  # row-major
    found = {}
    for at in parts:
        line = {(index,): parts[_moved(at, axes, place)] for index, place in enumerate(places)}
        x = join(line, (src,))
        # which terms make up the sum is free; they must only be the same on ranks that held the same
        pieces = {(0,): x} if dst == P else cut(x, (dst,), (len(places),))
        index = places.index(tuple(at[axis] for axis in axes))
        found[at] = pieces.get((index,), torch.zeros_like(x))
    return found


def _moved(at: Coordinate, axes: tuple[int, ...], place: Coordinate) -> Coordinate:
    target = dict(zip(axes, place))
    return tuple(target.get(axis, index) for axis, index in enumerate(at))


def check_numbers(src: Layout, dst: Layout, mesh_shape: tuple[int, ...], x: torch.Tensor) -> None:
    """The whole tensor is joined from the parts in mesh order after the steps, and its gradient after the dual steps,
    reversed.
    """
    steps = redistribute(src, dst)
    parts, grads = cut(x, src, mesh_shape), cut(x, tuple(map(dual, dst)), mesh_shape)
    for step in steps:
        parts = convert_parts(parts, step.axes, step.src, step.dst, mesh_shape)
    for step in reversed(steps):
        grads = convert_parts(grads, step.axes, dual(step.dst), dual(step.src), mesh_shape)
    torch.testing.assert_close(join(parts, dst), x, msg=lambda m: f"{src} -> {dst}: {m}")
    torch.testing.assert_close(join(grads, tuple(map(dual, src))), x, msg=lambda m: f"gradient of {src} -> {dst}: {m}")


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_every_pair_moves_the_right_numbers(mesh_shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(SHAPE, dtype=torch.float64)
    for src, dst in pairs(len(mesh_shape)) if len(mesh_shape) < 3 else itertools.islice(pairs(3), 0, None, 41):
        check_numbers(src, dst, mesh_shape, x)


layouts = st.tuples(*[st.sampled_from((S(0), S(1), S(2), P, I, R))] * 3)


@hypothesis.settings(max_examples=200, derandomize=True)
@hypothesis.given(layouts, layouts, st.sampled_from([(2, 2, 2), (2, 3, 2), (3, 2, 4), (2, 1, 2)]))
def test_any_pair_on_three_axes_moves_the_right_numbers(src: Layout, dst: Layout, mesh_shape: tuple[int, ...]) -> None:
    check_numbers(src, dst, mesh_shape, torch.arange(24.0**3, dtype=torch.float64).reshape(24, 24, 24))


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_steps_are_conversions_and_end_where_they_should(num_axes: int) -> None:
    for src, dst in pairs(num_axes):
        steps = redistribute(src, dst)
        after = [src, *(step.after for step in steps)]
        assert after[-1] == dst
        assert [step.layout for step in steps] == after[:-1]
        assert all((step.src.kind, step.dst.kind) in CONVERSIONS for step in steps)
        assert all(
            {step.layout[axis] for axis in step.axes} == {step.src} and list(step.axes) == sorted(step.axes)
            for step in steps
        )
        assert len(steps) <= 2 * num_axes, f"{src} -> {dst} takes {len(steps)} steps"


@pytest.mark.parametrize("num_axes", [2, 3])
def test_no_two_neighbours_are_the_same_conversion(num_axes: int) -> None:
    for src, dst in pairs(num_axes):
        kinds = [(step.src, step.dst) for step in redistribute(src, dst)]
        assert all(a != b for a, b in itertools.pairwise(kinds)), f"{src} -> {dst}: {kinds}"


@pytest.mark.parametrize("src", PLACEMENTS, ids=str)
@pytest.mark.parametrize("dst", PLACEMENTS, ids=str)
def test_the_same_on_all_axes_is_one_step(src: Placement, dst: Placement) -> None:
    steps = redistribute((src,) * 3, (dst,) * 3)
    assert [(step.axes, step.src, step.dst) for step in steps] == ([((0, 1, 2), src, dst)] if src != dst else [])


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        # an axis between them that splits another dim is not in the way
        ("PS(1)P", "S(0)S(1)S(0)", [((0, 2), P, S(0))]),
        ("S(0)S(0)S(0)", "S(0)B*B*", [((1, 2), S(0), R)]),  # nor one outside them that splits the same
        ("S(0)S(0)B", "S(1)S(1)B*", [((0, 1), S(0), S(1)), ((2,), I, R)]),
        # one between them is
        ("PS(0)P", "S(0)S(0)S(0)", [((1,), S(0), I), ((0,), P, S(0)), ((1,), I, S(0)), ((2,), P, S(0))]),
        ("S(0)BS(0)", "BS(0)B", [((0, 2), S(0), I), ((1,), I, S(0))]),
        # a detour is one step too
        ("S(0)S(1)S(1)", "S(1)S(0)S(0)", [((1, 2), S(1), I), ((0,), S(0), S(1)), ((1, 2), I, S(0))]),
        ("BPB", "B*BB*", [((1,), P, I), ((0, 2), I, R)]),
        ("S(0)S(1)S(0)", "B*B*B*", [((1,), S(1), R), ((0, 2), S(0), R)]),
    ],
)
def test_what_is_done_together(src: str, dst: str, expected: list) -> None:
    assert [(step.axes, step.src, step.dst) for step in redistribute(parse_layout(src), parse_layout(dst))] == expected


def one_axis_at_a_time(src: Layout, dst: Layout) -> list[LayoutStep]:
    """Steps on one axis each, by the order that people would choose: what shrinks first, what grows last, inner axes
    first.
    """
    steps, layout = [], src
    while layout != dst:
        pending = [axis for axis in range(len(dst)) if layout[axis] != dst[axis]]
        ready = [axis for axis in pending if _may_move(layout, dst, axis)]
        if ready:
            axis = min(ready, key=lambda a: (_growth(layout[a], dst[a]), -a))
            step = LayoutStep((axis,), layout[axis], dst[axis], layout)
        else:
            blocked = {p.dim for a in pending for p in (layout[a], dst[a]) if p.is_split}
            axis = max(a for a, p in enumerate(layout) if p.is_split and p.dim in blocked)
            step = LayoutStep((axis,), layout[axis], I, layout)
        steps.append(step)
        layout = step.after
    return steps


def _may_move(layout: Layout, dst: Layout, axis: int) -> bool:
    moved = {p.dim for p in (layout[axis], dst[axis]) if p.is_split}
    waiting = {p.dim for a in range(axis) if layout[a] != dst[a] for p in (layout[a], dst[a]) if p.is_split}
    is_inside = any(inner.is_split and inner.dim in moved for inner in layout[axis + 1 :])
    return not is_inside and not (dst[axis].is_split and dst[axis].dim in waiting)


def _growth(src: Placement, dst: Placement) -> int:
    if dst.is_split:
        return {"I": 0, "R": 0, "P": 1, "S": 2}[src.kind]
    return 4 if src.is_split else 3


def bytes_moved(steps: Iterable[LayoutStep], mesh_shape: tuple[int, ...]) -> int:
    size = math.prod(mesh_shape)
    return sum(
        c.num_bytes for step in steps for c in collectives_of(step, (size, size, size), 1, mesh_shape, needs_grad=True)
    )


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 8), (8, 2), (2, 2, 2), (2, 8, 2), (8, 2, 2), (2, 2, 8)], ids=str)
def test_never_more_bytes_than_one_axis_at_a_time(mesh_shape: tuple[int, ...]) -> None:
    """Nor more collectives."""
    for src, dst in pairs(len(mesh_shape)):
        found, single = redistribute(src, dst), one_axis_at_a_time(src, dst)
        assert bytes_moved(found, mesh_shape) <= bytes_moved(single, mesh_shape), f"{src} -> {dst}: {found}"
        assert len(found) <= len(single), f"{src} -> {dst}: {found}"


def test_equal_layouts_need_nothing() -> None:
    assert redistribute((S(0), R), (S(0), R)) == ()


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 2, 2)], ids=str)
def test_a_split_is_made_inside_out_of_every_inner_split_of_its_dim(mesh_shape: tuple[int, ...]) -> None:
    """Parts of a dim lie in mesh order, so no step may split or join a dim while an inner axis splits it."""
    for src, dst in pairs(len(mesh_shape)):
        for step in redistribute(src, dst):
            moved = {placement.dim for placement in (step.src, step.dst) if placement.is_split}
            inner = [p for axis, p in enumerate(step.layout) if axis > step.axes[0] and axis not in step.axes]
            assert not any(p.is_split and p.dim in moved for p in inner), f"{src} -> {dst}: {step}"


@pytest.mark.parametrize(
    ("shape", "mesh_shape"), [((4, 2), (2, 2)), ((6, 2), (2, 3)), ((4, 2), (2, 2, 2)), ((2, 2), (2, 2, 2))], ids=str
)
def test_every_intermediate_layout_is_even_where_both_ends_are(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> None:
    """A step must not cut a dim into more parts than it divides by."""
    for src, dst in pairs(len(mesh_shape)):
        if is_even(shape, src, mesh_shape) and is_even(shape, dst, mesh_shape):
            assert all(is_even(shape, step.after, mesh_shape) for step in redistribute(src, dst)), f"{src} -> {dst}"


def numel(layout: Layout, mesh_shape: tuple[int, ...]) -> int:
    return torch.Size(local_shape(SHAPE, layout, mesh_shape)).numel()


@pytest.mark.parametrize(
    ("src", "dst", "forward", "backward"),
    [
        (P, I, ("all_reduce", 576), None),
        (I, R, None, ("all_reduce", 576)),
        (P, S(0), ("reduce_scatter", 576), ("all_gather", 576)),
        (S(1), R, ("all_gather", 576), ("reduce_scatter", 576)),
        (S(0), S(1), ("all_to_all", 288), ("all_to_all", 288)),
        (I, S(0), None, ("all_gather", 576)),
        (S(0), I, ("all_gather", 576), None),
        (R, S(0), None, None),
    ],
    ids=str,
)
def test_collectives_and_their_bytes(src: Placement, dst: Placement, forward: Moved, backward: Moved) -> None:
    """Bytes are those of the larger side on one rank: 24 x 24 float32 on two ranks, once more split by an outer axis of
    2.
    """
    step = LayoutStep((1,), src, dst, (R, src))
    expected = [(*item, phase) for item, phase in ((forward, "forward"), (backward, "backward")) if item]
    found = collectives_of(step, SHAPE, 4, (2, 2), needs_grad=True)
    assert [(c.kind, c.num_bytes // 4, c.phase) for c in found] == expected
    assert all(c.axes == (1,) for c in found)
    assert all(c.phase == "forward" for c in collectives_of(step, SHAPE, 4, (2, 2), needs_grad=False))
    assert collectives_of(step, SHAPE, 4, (2, 1), needs_grad=True) == ()


def test_bytes_are_local_to_the_other_axes() -> None:
    step = LayoutStep((1,), P, I, (S(0), P))
    (found,) = collectives_of(step, SHAPE, 4, (2, 2), needs_grad=True)
    assert found.num_bytes == numel((S(0), P), (2, 2)) * 4 == 4 * 288


def test_axes_of_one_rank_take_no_part() -> None:
    (step,) = redistribute((P, P, P), (I, I, I))
    (found,) = collectives_of(step, SHAPE, 4, (2, 1, 2), needs_grad=True)
    assert found == Collective("all_reduce", (0, 2), 4 * 576, "forward")
    assert collectives_of(step, SHAPE, 4, (1, 1, 1), needs_grad=True) == ()


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 8), (2, 4, 2)], ids=str)
def test_a_collective_has_the_bytes_of_the_larger_side(mesh_shape: tuple[int, ...]) -> None:
    """On one rank, before or after its step."""
    size = math.prod(mesh_shape)
    for src, dst in pairs(len(mesh_shape)):
        for step in redistribute(src, dst):
            parts = [math.prod(local_shape((size,) * 3, layout, mesh_shape)) for layout in (step.layout, step.after)]
            found = collectives_of(step, (size,) * 3, 2, mesh_shape, needs_grad=True)
            assert all(collective.num_bytes == 2 * max(parts) for collective in found)
