"""The runtime conversions on threads as ranks: values, gradients, and that each issues what `redistribute` says."""

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from autopar.sbp.axis import Axis
from autopar.sbp.convert import convert, convert_together, dual
from autopar.sbp.placement import I, P, Placement, R, S
from autopar.sbp.proof.cut_and_join import Coordinate, cut, join
from autopar.sbp.redistribute import CONVERSIONS, collectives_of, redistribute
from tests.sbp.exercise import record
from tests.sbp.simulate import on_threads

SECTIONS = S(1, sections=(2, 1))
PLACEMENTS = (S(0), S(1), SECTIONS, P, I, R)
JOINT = [((2, 2), (0, 1)), ((2, 2, 2), (0, 2)), ((2, 3), (0, 1)), ((3, 2), (0, 1)), ((2, 2, 2), (0, 1, 2))]
PAIRS = [
    (src, dst)
    for src, dst in itertools.product(PLACEMENTS, repeat=2)
    if src == dst or ((src.kind, dst.kind) in CONVERSIONS and {src, dst} != {S(1), SECTIONS})  # by way of the whole
]


def converted(
    src: Placement, dst: Placement, mesh_shape: tuple[int, ...], axes: tuple[int, ...], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` and its gradient, fed back, after going through `convert` on `axes` together; on the other axes it is
    whole.
    """
    before, after = (tuple(p if axis in axes else I for axis in range(len(mesh_shape))) for p in (src, dst))
    back = tuple(map(dual, before))
    parts, grads = cut(x, before, mesh_shape), cut(x, tuple(map(dual, after)), mesh_shape)
    joint = (axes,) if len(axes) > 1 else ()

    def rank(at: Coordinate, found: tuple[Axis, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = parts[at].clone().requires_grad_()
        out = convert(leaf, found[-1], src, dst)
        return out.detach(), torch.autograd.grad(out, leaf, grads[at])[0]

    found = on_threads(rank, mesh_shape, joint)
    outs, backs = ({at: result[i] for at, result in found.items()} for i in (0, 1))
    return join(outs, after), join(backs, back)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=str)
def test_convert_moves_values_and_gradients(src: Placement, dst: Placement, size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 18, dtype=torch.float64)
    out, grad = converted(src, dst, (size,), (0,), x)
    torch.testing.assert_close(out, x)
    torch.testing.assert_close(grad, x)


@pytest.mark.parametrize(("src", "dst"), [pair for pair in PAIRS if pair[0] != pair[1]], ids=str)
def test_convert_issues_what_redistribute_says(src: Placement, dst: Placement) -> None:
    """On every rank the collectives of the step, to the byte."""
    (step,) = redistribute((src,), (dst,))
    with record((2,)) as issued:
        converted(src, dst, (2,), (0,), torch.randn(4, 6, dtype=torch.float64))
    expected = Counter(collectives_of(step, (4, 6), 8, (2,), needs_grad=True))
    assert [issued[rank] for rank in issued] == [expected] * (2 if expected else 0)


@pytest.mark.parametrize(("mesh_shape", "axes"), JOINT, ids=str)
@pytest.mark.parametrize(("src", "dst"), [pair for pair in PAIRS if pair[0] != pair[1]], ids=str)
def test_several_axes_at_once(
    src: Placement, dst: Placement, mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    """Values and gradients lie in mesh order, and each rank issues what `redistribute` says, to the byte."""
    torch.manual_seed(0)
    x = torch.randn(24, 72, dtype=torch.float64)
    before, after = (tuple(p if axis in axes else I for axis in range(len(mesh_shape))) for p in (src, dst))
    (step,) = redistribute(before, after)
    with record(mesh_shape) as issued:
        out, grad = converted(src, dst, mesh_shape, axes, x)
    torch.testing.assert_close(out, x)
    torch.testing.assert_close(grad, x)
    expected = Counter(collectives_of(step, (24, 72), 8, mesh_shape, needs_grad=True))
    assert step.axes == axes and all(collective.axes == axes for collective in expected)
    assert [issued[rank] for rank in issued] == [expected] * (math.prod(mesh_shape) if expected else 0)


# The changes of buckets, and those of their gradients.
BUCKETS = [
    (sources, targets)
    for kinds, changes in {
        "use": [(I, R), (I, R), (I, R)],
        "sum": [(P, I), (P, I), (P, I)],
        "gather": [(S(0), R), (S(1), R), (S(0), R)],
        "gather whole": [(S(1), I), (S(0), I), (S(2), I)],
        "scatter": [(P, S(0)), (P, S(2)), (P, S(1))],
        "slice": [(I, S(1)), (I, S(0)), (I, S(0))],
        "gather sections": [(S(0, sections=(1, 1)), R), (S(1), R), (S(1, sections=(2, 1)), R)],
        "scatter sections": [(P, S(0, sections=(1, 1))), (P, S(2)), (P, S(1, sections=(2, 1)))],
    }.items()
    for sources, targets in [tuple(zip(*changes))]
]


@pytest.mark.parametrize(("mesh_shape", "axes"), [((3,), (0,)), ((2, 3), (1,)), ((2, 2, 2), (0, 2))], ids=str)
@pytest.mark.parametrize(("sources", "targets"), BUCKETS, ids=str)
def test_a_bucket_is_each_conversion_with_one_collective(
    sources: tuple[Placement, ...], targets: tuple[Placement, ...], mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    """Values, gradients and gradients of gradients are those of the conversions one by one; one collective each way."""
    torch.manual_seed(0)
    size = math.prod(mesh_shape[axis] for axis in axes)
    shapes = [(size * 2, size, size), (size, size * 3, size), (size, size * 3, size)]
    joint = (axes,) if len(axes) > 1 else ()
    count = math.prod(mesh_shape)
    wholes = [torch.randn(count, *shape, dtype=torch.float64) for shape in shapes]

    def rank(together: bool) -> Callable[[Coordinate, tuple[Axis, ...]], list[torch.Tensor]]:
        def run(at: Coordinate, found: tuple[Axis, ...]) -> list[torch.Tensor]:
            axis, number = found[-1] if joint else found[axes[0]], sum(x * 7**i for i, x in enumerate(at)) % count
            parts = [
                whole[number].chunk(size, src.dim)[0] if src.is_split else whole[number]
                for whole, src in zip(wholes, sources)
            ]
            leaves = [part.clone().requires_grad_() for part in parts]
            if together:
                outs = convert_together(axis, sources, targets, *leaves)
            else:
                outs = tuple(convert(*one[:1], axis, *one[1:]) for one in zip(leaves, sources, targets))
            gradients = [(out * (number + 1)).sin().requires_grad_() for out in outs]
            backs = torch.autograd.grad(outs, leaves, gradients, create_graph=True)
            again = torch.autograd.grad(backs, gradients, [back.detach().cos() for back in backs])
            return [x.detach() for x in (*outs, *backs, *again)]

        return run

    expected, made = (on_threads(rank(together), mesh_shape, joint) for together in (False, True))
    for at, tensors in made.items():
        for one, other in zip(tensors, expected[at], strict=True):
            torch.testing.assert_close(one, other)
            assert one.is_contiguous()
    counts, num_bytes = ([], []), ([], [])
    for number, together in enumerate((False, True)):
        with record(mesh_shape) as issued:
            on_threads(rank(together), mesh_shape, joint)
        counts[number].extend(sum(of_rank.values()) for of_rank in issued.values())
        num_bytes[number].extend(sum(c.num_bytes * times for c, times in x.items()) for x in issued.values())
    assert counts[0] == [3 * count for count in counts[1]]
    assert num_bytes[0] == num_bytes[1]


def test_what_is_frozen_needs_no_gradient_because_others_in_its_bucket_do() -> None:
    """Ops may have no derivative by it: class weights of a loss."""

    def rank(at: Coordinate, axes: tuple[Axis, ...]) -> tuple[list[bool], torch.Tensor]:
        trained, frozen = torch.ones(2).requires_grad_(), torch.ones(2)
        outs = convert_together(axes[0], (S(0), S(0)), (R, R), trained, frozen)
        return [x.requires_grad for x in outs], torch.autograd.grad((outs[0] * outs[1] * 3).sum(), trained)[0]

    for needs, gradient in on_threads(rank, (2,)).values():
        assert needs == [True, False]
        assert torch.equal(gradient, torch.full((2,), 6.0))  # of both ranks


def test_a_gradient_that_is_not_contiguous() -> None:
    """The gradient of a sum is an expanded view."""

    def rank(at: Coordinate, axes: tuple[Axis, ...]) -> torch.Tensor:
        leaf = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(convert(leaf, axes[0], I, R).sum(), leaf)[0]

    for grad in on_threads(rank, (2,)).values():
        torch.testing.assert_close(grad, torch.full((4, 3), 2.0, dtype=torch.float64))


def test_a_failing_rank_fails_the_test() -> None:
    def rank(at: Coordinate, axes: tuple[Axis, ...]) -> None:
        raise RuntimeError(f"rank {at}")

    with pytest.raises(RuntimeError, match="rank"):
        on_threads(rank, (2,))


def test_a_slice_and_its_gradient_hold_no_more_memory_than_they_need():
    axis = Axis("a", 4, 1, None)
    whole, part = torch.arange(8.0, requires_grad=True), torch.arange(2.0, requires_grad=True)
    sliced = convert(whole, axis, I, S(0))
    assert sliced.tolist() == [2.0, 3.0] and sliced.untyped_storage().nbytes() == sliced.nbytes
    convert(part, axis, S(0), I).sum().backward()  # its gradient is a slice of the gradient of the whole
    assert part.grad.untyped_storage().nbytes() == part.nbytes
