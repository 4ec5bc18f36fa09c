"""Rules discovered by execution: the signatures of an op without a rule that hold on all samples of it.

Samples are no proof. So a signature is taken only if no sample says otherwise: where one holds on some samples and not
on others, the op stays whole.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from autopar.ir.graph import Op
from autopar.sbp.placement import I, P, Placement, R, S
from autopar.sbp.proof.check_signature import call, check_signature
from autopar.sbp.proof.cut_and_join import assert_near, cut
from autopar.sbp.proof.sample_calls import NoSample, Sample, samples_of
from autopar.sbp.signature import Discovery, Signature

_MOST = 4096  # combinations of inputs that are split
_FEW = 300  # up to so many, dims of different extents may be split together


@lru_cache(maxsize=4096)
def discovered(op: Op) -> Discovery:
    """The signatures of `op`, which has no rule, that hold on samples of it."""
    try:
        first, *others = samples_of(op)
    except NoSample as error:
        return Discovery((), str(error))
    found = [signature for signature in dict.fromkeys(_proposed(first)) if holds(signature, first)]
    for signature, other in itertools.product(found, others):
        if not holds(signature, other):
            return Discovery((), f"its samples disagree: {signature} holds for {first}, but not for {other}")
    return Discovery(tuple(found), "" if found else "no split of its inputs gives its results on samples")


def holds(signature: Signature, sample: Sample) -> bool:
    """Whether the op run on parts gives the values and gradients of the whole, on this sample."""
    try:
        return prove(signature, sample)
    except Exception:  # of the op, called on parts of a size that it does not take, or of the comparison
        return False


def prove(signature: Signature, sample: Sample) -> bool:
    """As `check_signature`, on this sample: False if it does not divide, AssertionError if it is wrong."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(sample.num_ranks)  # the CPU's alone: samples lie there
        return check_signature(
            sample.op, signature, sample.num_ranks, sample.inputs, gradient_scale=sample.gradient_scale
        )


def _proposed(sample: Sample) -> Iterator[Signature]:
    """The signatures that forward does not rule out on this sample."""
    op = sample.op
    if all(value.dtype.is_floating_point or value.dtype.is_complex for value in op.outputs):
        yield from _sums(op)
    with torch.no_grad():
        whole = call(op, op.args, op.kwargs, [x.detach() for x in sample.inputs], {})
        for inputs in _splits(sample):
            outputs = _outputs(sample, inputs, whole)
            if outputs is not None:
                yield Signature(inputs, outputs)


def _sums(op: Op) -> Iterator[Signature]:
    """Pending sums that pass: of one input, or of all."""
    summed = [slot for slot, value in enumerate(op.inputs) if value.dtype.is_floating_point]
    for slots in dict.fromkeys(((slot,) for slot in summed), None) | {tuple(summed): None}:
        if slots:
            yield Signature(tuple(P if i in slots else R for i in range(len(op.inputs))), (P,) * len(op.outputs))


def _splits(sample: Sample) -> Iterator[tuple[Placement, ...]]:
    """The ways to split some of the inputs, each along a free dim, the others whole."""
    shapes = [value.shape for value in sample.op.inputs]
    dims = [[dim for dim in range(len(shape)) if (slot, dim) in sample.free] for slot, shape in enumerate(shapes)]
    num_ways = 1
    for of_input in dims:
        num_ways *= 1 + len(of_input)
    if num_ways <= _FEW:
        ways: Iterator[Sequence[int | None]] = itertools.product(*([None, *of_input] for of_input in dims))
    else:
        sizes = sorted({shapes[slot][dim] for slot, of_input in enumerate(dims) for dim in of_input})
        alike = (
            [[dim for dim in of_input if shapes[slot][dim] == size] for slot, of_input in enumerate(dims)]
            for size in sizes
        )
        ways = itertools.chain.from_iterable(itertools.product(*([None, *each] for each in one)) for one in alike)
    for way in itertools.islice(ways, _MOST):
        if any(dim is not None for dim in way):
            yield tuple(R if dim is None else S(dim) for dim in way)


def _outputs(
    sample: Sample, inputs: tuple[Placement, ...], whole: Sequence[torch.Tensor]
) -> tuple[Placement, ...] | None:
    """The placements of the results if the inputs are placed so; None if a result has none, or if none is split."""
    op, size = sample.op, (sample.num_ranks,)
    parts = [cut(x.detach(), (placement,), size) for x, placement in zip(sample.inputs, inputs)]
    try:
        ranks = [call(op, op.args, op.kwargs, [part[at] for part in parts], {}) for at in sorted(parts[0])]
    except Exception:  # the op takes no parts of this size
        return None
    placed = [_joined(results, expected) for results, expected in zip(zip(*ranks), whole)]
    if any(p is None or (p == I and value.needs_grad) for p, value in zip(placed, op.outputs)) or set(placed) <= {I}:
        return None
    return tuple(p for p in placed if p is not None)


def _joined(results: Sequence[torch.Tensor], expected: torch.Tensor) -> Placement | None:
    """How the `results` of all ranks make up the `expected` one."""
    if all(_is_near(result, expected) for result in results):
        return I
    for dim in range(expected.dim()):
        others = [tuple(size for d, size in enumerate(x.shape) if d != dim) for x in (*results, expected)]
        is_even = all(result.dim() == expected.dim() for result in results) and len(set(others)) == 1
        if is_even and _is_near(torch.cat(list(results), dim), expected):
            return S(dim)
    is_sum = expected.dtype.is_floating_point and all(result.shape == expected.shape for result in results)
    return P if is_sum and _is_near(torch.stack(list(results)).sum(0), expected) else None


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    try:
        assert_near(found, expected, "")
    except AssertionError:
        return False
    return True
