"""Small random calls of an op that stand for a call of any size: the samples on which signatures are proven."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import Op, Slot, Value, resolve
from autopar.ir.op_facts import is_random
from autopar.sbp.proof.check_signature import Tensors, call, value_of

# Extents for the dims of a sample, by the number of ranks that it is cut for: the parts have odd sizes, so that nothing
# holds by chance for what is computed in pairs or blocks.
_SIZES = (
    (2, (6, 10, 14, 22, 26, 34, 38, 46)),
    (2, (10, 6, 22, 14, 34, 26, 46, 38)),
    (3, (9, 15, 21, 33, 39, 51, 57, 69)),
)
_SCALES = (1.0, 1e-2, 30.0)  # of the numbers and gradients, since what clips or saturates shows beyond some size only
_MOST_ELEMENTS, _MOST_SUBSETS = 2**18, 24


class NoSample(Exception):
    """There is no sample of the op; the message is the reason, a clause."""


@dataclass(frozen=True)
class Sample:
    """A call of `op` with `inputs`, to be cut for `num_ranks` ranks.

    `free`: the (input, dim) that had any extent; the others kept that of the call which the sample stands for, since
    the op takes no other there.
    """

    op: Op
    inputs: Tensors
    num_ranks: int
    free: frozenset[tuple[int, int]]
    gradient_scale: float

    def __str__(self) -> str:
        tensors = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in self.inputs)
        constants = [repr(arg) for arg in self.op.args if not _has_slot(arg)]
        constants += [f"{name}={arg!r}" for name, arg in self.op.kwargs if not _has_slot(arg)]
        return f"{self.op.target}({', '.join([tensors, *constants])})"


@dataclass(frozen=True)
class _Drawing:
    """A way to make samples: the extents that are kept, and how numbers are drawn."""

    kept: frozenset[int]
    maps_numbers: bool  # numbers among the arguments that equal an extent follow it
    is_double: bool  # floating-point inputs are float64
    is_positive: bool


def samples_of(op: Op) -> tuple[Sample, ...]:
    """Samples of `op` with several shapes, seeds and scales; equal calls of this give equal samples.

    NoSample if the op cannot be run so, or gives other results the second time.
    """
    extents = tuple(dict.fromkeys(size for value in op.inputs for size in value.shape if size > 1))
    try:
        resolve(op.target)
    except AttributeError:
        raise NoSample("it is not loaded here") from None
    if not op.inputs or is_random(op):
        raise NoSample("it draws random numbers" if op.inputs else "it has no tensor inputs")
    error = "it has more elements than a sample may have"
    for way in _ways(extents):
        try:
            return tuple(_sample(op, extents, way, number) for number in range(len(_SIZES)))
        except NoSample:
            raise
        except Exception as found:  # whatever an op raises when it is called as nobody calls it
            error = f"on samples it raises {type(found).__name__}: {found}"
    raise NoSample(" ".join(error.split())[:300])


def _ways(extents: tuple[int, ...]) -> Iterator[_Drawing]:
    subsets = (set(kept) for count in range(len(extents) + 1) for kept in itertools.combinations(extents, count))
    kept = [frozenset(subset) for subset in itertools.islice(subsets, _MOST_SUBSETS)]
    if extents and frozenset(extents) not in kept:
        kept.append(frozenset(extents))
    for is_double, is_positive in itertools.product((True, False), (False, True)):
        for subset, maps_numbers in itertools.product(kept, (False, True)):
            yield _Drawing(subset, maps_numbers, is_double, is_positive)


def _sample(op: Op, extents: tuple[int, ...], way: _Drawing, number: int) -> Sample:
    num_ranks, sizes = _SIZES[number]
    drawn = iter(sizes)
    size_of = {size: size if size in way.kept else next(drawn, size) for size in extents}
    shapes = [tuple(size_of.get(size, size) for size in value.shape) for value in op.inputs]
    if any(torch.Size(shape).numel() > _MOST_ELEMENTS for shape in shapes):
        raise ValueError("it takes no sizes but large ones")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(number)  # the CPU's alone: samples lie there
        least = min((size for shape in shapes for size in shape if size > 1), default=2)
        inputs = tuple(_draw(value, shape, way, least, number) for value, shape in zip(op.inputs, shapes))
    numbers = size_of if way.maps_numbers else {}
    args, kwargs = _mapped(op.args, numbers), tuple((name, _mapped(arg, numbers)) for name, arg in op.kwargs)
    results = call(op, args, kwargs, list(inputs), {})
    _check_results(op, results, call(op, args, kwargs, list(inputs), {}), size_of)
    values = tuple(value_of(f"in{i}", x) for i, x in enumerate(inputs))
    outputs = tuple(value_of(f"out{i}", x) for i, x in enumerate(results))
    free = frozenset(
        (slot, dim)
        for slot, value in enumerate(op.inputs)
        for dim, size in enumerate(value.shape)
        if size > 1 and size not in way.kept
    )
    small = replace(op, args=args, kwargs=kwargs, inputs=values, outputs=outputs)
    return Sample(small, inputs, num_ranks, free, _SCALES[number])


def _draw(value: Value, shape: tuple[int, ...], way: _Drawing, least: int, number: int) -> torch.Tensor:
    """Random numbers for an input; integers are valid indices of every dim, the smallest of which has `least`."""
    if value.dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if not value.dtype.is_floating_point and not value.dtype.is_complex:
        return torch.randint(least, shape, dtype=value.dtype)
    double = torch.complex128 if value.dtype.is_complex else torch.float64
    if way.is_positive:
        drawn = torch.rand(shape, dtype=double) * 0.8 + 0.1
    else:
        drawn = torch.randn(shape, dtype=double) * _SCALES[number]
    return drawn.to(double if way.is_double else value.dtype).requires_grad_(value.needs_grad)


def _mapped(arg: Any, numbers: Mapping[int, int]) -> Any:
    if isinstance(arg, tuple):
        return tuple(_mapped(item, numbers) for item in arg)
    return numbers.get(arg, arg) if isinstance(arg, int) and not isinstance(arg, bool) else arg


def _check_results(op: Op, results: Tensors, again: Tensors, size_of: Mapping[int, int]) -> None:
    """ValueError if the results are not as those of `op`, in the sizes of the sample; NoSample if two runs differ."""
    if [value.requires_grad for value in results] != [value.needs_grad for value in op.outputs]:
        raise ValueError("its results have no gradients")
    for result, value in zip(results, op.outputs, strict=True):
        expected = tuple(size_of.get(size, size) if size > 1 else size for size in value.shape)
        if result.dim() != len(value.shape) or any(
            found != size for found, size, own in zip(result.shape, expected, value.shape) if own in size_of
        ):
            raise ValueError(f"its result has shape {tuple(result.shape)} where {expected} was expected")
        if result.dtype.is_floating_point and not result.isfinite().all():
            raise ValueError("its results are not finite")
    if not all(torch.equal(one, other) for one, other in zip(results, again)):
        raise NoSample("two runs on the same sample give different results")


def _has_slot(arg: Any) -> bool:
    return any(map(_has_slot, arg)) if isinstance(arg, tuple) else isinstance(arg, Slot)
