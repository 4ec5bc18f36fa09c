"""All pairs of layouts on one to three axes: the steps move the right numbers, forward and backward."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from autopar.sbp.collectives import dual
from autopar.sbp.placement import I, Layout, P, Placement, R, S, is_even, local_shape
from autopar.sbp.redistribute import CONVERSIONS, Step, collectives_of, redistribute
from tests.sbp.simulate import Parts, cut, join

MESHES = [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)]
Moved = tuple[str, int] | None
SHAPE = (24, 24)  # divides by every product of axes above
PLACEMENTS = (S(0), S(1), P, I, R)


def pairs(num_axes: int) -> Iterator[tuple[Layout, Layout]]:
    return itertools.product(itertools.product(PLACEMENTS, repeat=num_axes), repeat=2)


def convert_parts(parts: Parts, axis: int, src: Placement, dst: Placement, size: int) -> Parts:
    """One conversion on one axis, straight from what the placements mean: join the ranks of the axis, cut anew."""
    found = {}
    for at in parts:
        line = {(index,): parts[*at[:axis], index, *at[axis + 1 :]] for index in range(size)}
        x = join(line, (src,))
        # which terms make up the sum is free; they must only be the same on ranks that held the same
        pieces = {(0,): x} if dst == P else cut(x, (dst,), (size,))
        found[at] = pieces.get((at[axis],), torch.zeros_like(x))
    return found


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_every_pair_moves_the_right_numbers(mesh_shape: tuple[int, ...]) -> None:
    """The whole tensor is joined from the parts in mesh order after the steps, and its gradient after the dual steps, reversed."""
    torch.manual_seed(0)
    x = torch.randn(SHAPE, dtype=torch.float64)
    for src, dst in pairs(len(mesh_shape)) if len(mesh_shape) < 3 else itertools.islice(pairs(3), 0, None, 41):
        steps = redistribute(src, dst)
        parts = cut(x, src, mesh_shape)
        for step in steps:
            parts = convert_parts(parts, step.axis, step.src, step.dst, mesh_shape[step.axis])
        torch.testing.assert_close(join(parts, dst), x)
        grads = cut(x, tuple(map(dual, dst)), mesh_shape)
        for step in reversed(steps):
            grads = convert_parts(grads, step.axis, dual(step.dst), dual(step.src), mesh_shape[step.axis])
        torch.testing.assert_close(join(grads, tuple(map(dual, src))), x)


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_steps_are_conversions_and_end_where_they_should(num_axes: int) -> None:
    for src, dst in pairs(num_axes):
        steps = redistribute(src, dst)
        layouts = [src, *(step.after for step in steps)]
        assert layouts[-1] == dst
        assert [step.layout for step in steps] == layouts[:-1]
        assert all((step.src.kind, step.dst.kind) in CONVERSIONS and step.layout[step.axis] == step.src for step in steps)
        assert len(steps) <= 2 * num_axes, f"{src} -> {dst} takes {len(steps)} steps"


def test_equal_layouts_need_nothing() -> None:
    assert redistribute((S(0), R), (S(0), R)) == ()


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 2, 2)], ids=str)
def test_a_split_is_made_inside_out_of_every_inner_split_of_its_dim(mesh_shape: tuple[int, ...]) -> None:
    """Parts of a dim lie in mesh order, so no step may split or join a dim while an inner axis splits it."""
    for src, dst in pairs(len(mesh_shape)):
        for step in redistribute(src, dst):
            moved = {placement.dim for placement in (step.src, step.dst) if placement.is_split}
            assert not any(inner.is_split and inner.dim in moved for inner in step.layout[step.axis + 1 :]), f"{src} -> {dst}: {step}"


@pytest.mark.parametrize(("shape", "mesh_shape"), [((4, 2), (2, 2)), ((6, 2), (2, 3)), ((4, 2), (2, 2, 2)), ((2, 2), (2, 2, 2))], ids=str)
def test_every_intermediate_layout_is_even_where_both_ends_are(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
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
    """Bytes are those of the larger side on one rank: 24 x 24 float32 on two ranks, once more split by an outer axis of 2."""
    step = Step(1, src, dst, (R, src))
    expected = [(*item, phase) for item, phase in ((forward, "forward"), (backward, "backward")) if item]
    found = collectives_of(step, SHAPE, 4, (2, 2), needs_grad=True)
    assert [(c.kind, c.num_bytes // 4, c.phase) for c in found] == expected
    assert all(c.phase == "forward" for c in collectives_of(step, SHAPE, 4, (2, 2), needs_grad=False))
    assert collectives_of(step, SHAPE, 4, (2, 1), needs_grad=True) == ()


def test_bytes_are_local_to_the_other_axes() -> None:
    step = Step(1, P, I, (S(0), P))
    (found,) = collectives_of(step, SHAPE, 4, (2, 2), needs_grad=True)
    assert found.num_bytes == numel((S(0), P), (2, 2)) * 4 == 4 * 288
