"""`Program`: the local ops and explicit collectives of one rank; its text is the same on every rank."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Input, Value
from autopar.mesh import Mesh
from autopar.sbp.placement import Layout, Placement


@dataclass(frozen=True, slots=True)
class Call:
    """The call of an op on local tensors.

    `args`, `kwargs`: arguments with `Variable`s for tensors. `reads`: its tensor operands with the layouts it reads
    them in; `layouts`: those of its outputs. `roles`: (role, the mesh axes that take it). `random`: the number of a
    random op, -1 for others; `split_axes`: the axes on which its output is split, so that ranks draw different numbers.
    `again`: operands that are regathered for backward. `is_alike`: whether it draws the same numbers in all
    microbatches of a step.
    """

    outputs: tuple[Value, ...]
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    reads: tuple[tuple[str, Layout], ...]
    layouts: tuple[Layout, ...]
    roles: tuple[tuple[str, tuple[int, ...]], ...]
    random: int
    split_axes: tuple[int, ...]
    is_no_grad: bool
    is_tuple: bool
    origin: str
    again: tuple["RegatheredOperand", ...] = ()
    is_alike: bool = False


@dataclass(frozen=True, slots=True)
class RegatheredOperand:
    """A regathered operand: variable `whole` is converted from the stored `source` by `steps`, and again in backward.

    If bucket number `bucket` converts it (not -1), it is parameter number `place` there.
    """

    whole: str
    source: str
    steps: tuple["Convert", ...]
    bucket: int = -1
    place: int = -1


@dataclass(frozen=True, slots=True)
class Convert:
    """A conversion of variable `source` from placement `src` to `dst` on mesh `axes`, none of size 1, as one axis.

    `extent`: the size of the dim that `src` splits, on all of `axes` together; None if its parts are equal.
    """

    output: str
    source: str
    value: Value
    axes: tuple[int, ...]
    src: Placement
    dst: Placement
    after: Layout
    extent: int | None = None


@dataclass(frozen=True, slots=True)
class ConvertTogether:
    """Conversions of several parameters on mesh `axes` with one collective in forward and one in backward, or none.

    Of parameter number i: variable `sources[i]` from placement `src[i]` to `dst[i]`, after which its layout is
    `after[i]`; `extents`: as of `Convert`, () if all parts are equal. `number`: of the bucket if its parameters are
    regathered or prefetched, otherwise -1. `is_prefetched`: whether a `StartGather` started it.
    """

    outputs: tuple[str, ...]
    sources: tuple[str, ...]
    values: tuple[Value, ...]
    axes: tuple[int, ...]
    src: tuple[Placement, ...]
    dst: tuple[Placement, ...]
    after: tuple[Layout, ...]
    extents: tuple[int | None, ...] = ()
    number: int = -1
    is_prefetched: bool = False


@dataclass(frozen=True, slots=True)
class StartGather:
    """The start of the prefetched `bucket`. `earlier`: the number of the bucket that backward gathers again once it has
    this one; -1: none.
    """

    bucket: ConvertTogether
    earlier: int = -1


@dataclass(frozen=True, slots=True)
class Release:
    """The end of the live ranges of variables."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A local tensor of the generated function, or a view of it for one use (`is_view`): a node of autograd's own, so
    that its gradient can be told from those of other uses.
    """

    name: str
    is_view: bool = False


@dataclass(frozen=True, slots=True)
class RecomputedRegion:
    """A recomputed region: only the variables `inputs` are kept for backward, which runs `steps` again.

    `outputs`: the variables that later steps read.
    """

    number: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple["AnyStep", ...]


@dataclass(frozen=True, slots=True)
class OffloadedRegion:
    """An offloaded region: autograd's saved tensors of `steps` wait in the host's memory, except the variables `stay`.

    These are on the device in any case.
    """

    number: int
    stay: tuple[str, ...]
    steps: tuple["AnyStep", ...]


AnyStep = Call | Convert | ConvertTogether | StartGather | Release | RecomputedRegion | OffloadedRegion


@dataclass(frozen=True, slots=True)
class Gathered:
    """A result of `gather`: variable `name` holds parameter `value` in the `layout` in which the program reads it."""

    name: str
    value: Value
    layout: Layout


@dataclass(frozen=True)
class Gather:
    """The part of a split program that runs once a step: it converts the parameters.

    `results`: its variables in groups that are produced by the same conversions, through which the gradients of a group
    are propagated back together.
    """

    steps: tuple[AnyStep, ...]
    results: tuple[tuple[Gathered, ...], ...]


@dataclass(frozen=True)
class Program:
    """The program of one rank.

    `inputs`: every graph input with its layout. `outputs`: for each flat output its variable and layout, or a constant
    and (). `mutations`: (buffer FQN, variable) to write back after the outputs are computed. `gather`: the part of a
    split program that runs once a step; `steps` are then those of one microbatch.
    """

    mesh: Mesh
    inputs: tuple[tuple[Input, Layout], ...]
    steps: tuple[AnyStep, ...]
    outputs: tuple[tuple[Any, Layout], ...]
    mutations: tuple[tuple[str, str], ...]
    gather: Gather | None = None

    @property
    def joint_axes(self) -> tuple[tuple[int, ...], ...]:
        """The sets of several mesh axes that conversions treat as one axis, sorted."""
        steps = flat((*self.steps, *(self.gather.steps if self.gather else ())))
        return tuple(
            sorted({step.axes for step in steps if isinstance(step, Convert | ConvertTogether) and len(step.axes) > 1})
        )

    @property
    def has_random_ops(self) -> bool:
        return any(isinstance(step, Call) and step.random >= 0 for step in flat(self.steps))


def flat(steps: Iterable[AnyStep]) -> Iterator[AnyStep]:
    """The steps, with each region replaced by its steps."""
    for step in steps:
        yield from flat(step.steps) if isinstance(step, RecomputedRegion | OffloadedRegion) else (step,)


def reads(step: AnyStep) -> set[str]:
    """The variables that the step reads."""
    match step:
        case Convert(source=source):
            return {source}
        case StartGather(bucket=bucket):
            return set(bucket.sources)
        case ConvertTogether(sources=sources, is_prefetched=is_prefetched):
            return set() if is_prefetched else set(sources)
        case Call(reads=operands, again=again):
            return {name for name, _ in operands} | {one.source for one in again}
        case RecomputedRegion(inputs=inputs):
            return set(inputs)
        case OffloadedRegion(steps=steps):
            return set().union(*map(reads, steps)) - writes(step)
    return set()


def writes(step: AnyStep) -> set[str]:
    """The variables that the step defines."""
    match step:
        case Convert(output=output):
            return {output}
        case ConvertTogether(outputs=outputs):
            return set(outputs)
        case Call(outputs=outputs):
            return {value.name for value in outputs}
        case RecomputedRegion(outputs=outputs):
            return set(outputs)
        case OffloadedRegion(steps=steps):
            return set().union(*map(writes, steps))
    return set()
