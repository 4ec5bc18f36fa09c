"""One rank's program: local ops and explicit collectives, the same text on every rank."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Input, Value
from autopar.mesh import Mesh
from autopar.sbp.placement import Layout, Placement


@dataclass(frozen=True, slots=True)
class Call:
    """Run an op on local tensors. `args` and `kwargs` hold `Variable`s; `roles` maps a role to the mesh axes that take
    it.

    `random` numbers the random ops (-1: none); `split_axes` are the axes along which its output, hence its random
    numbers, differ. `reads` are its tensor operands with the layouts it needs them in, `layouts` those of the outputs.
    `again`: what of its operands is not kept for backward, but made once more. is_alike: a random op that draws the
    same numbers in all microbatches of a step.
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
    again: tuple["Again", ...] = ()
    is_alike: bool = False


@dataclass(frozen=True, slots=True)
class Again:
    """Variable `whole` is made of the stored parameter `source` by `steps`, in forward and again in backward."""

    whole: str
    source: str
    steps: tuple["Convert", ...]


@dataclass(frozen=True, slots=True)
class Convert:
    """Turn variable `source` from placement `src` to `dst` on mesh axes `axes`, as one axis;
    none of them has size 1.
    """

    output: str
    source: str
    value: Value
    axes: tuple[int, ...]
    src: Placement
    dst: Placement
    after: Layout


@dataclass(frozen=True, slots=True)
class UseTogether:
    """Turn several parameters from I to R on mesh axes `axes`: their gradients are all-reduced as one."""

    outputs: tuple[str, ...]
    sources: tuple[str, ...]
    values: tuple[Value, ...]
    axes: tuple[int, ...]
    after: Layout


@dataclass(frozen=True, slots=True)
class Release:
    """The variables are not read again."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A local tensor of the generated function."""

    name: str


@dataclass(frozen=True, slots=True)
class Region:
    """Run `steps` and keep for backward only the variables `inputs`; backward runs them again. `outputs` are read
    afterwards.
    """

    number: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple["AnyStep", ...]


@dataclass(frozen=True, slots=True)
class Offload:
    """What autograd keeps of `steps` waits in the host's memory, but for the variables `stay`: these are on the device
    anyhow.
    """

    number: int
    stay: tuple[str, ...]
    steps: tuple["AnyStep", ...]


AnyStep = Call | Convert | UseTogether | Release | Region | Offload


@dataclass(frozen=True, slots=True)
class Gathered:
    """Variable `name` holds parameter `value` in `layout`, as the rest of the program reads it."""

    name: str
    value: Value
    layout: Layout


@dataclass(frozen=True)
class Gather:
    """What is done once a step, however many microbatches it has: the parameters are made ready. `results`: the
    variables that are left, grouped by what makes them: the gradients of a group go back through its conversions
    together.
    """

    steps: tuple[AnyStep, ...]
    results: tuple[tuple[Gathered, ...], ...]


@dataclass(frozen=True)
class Program:
    """`inputs`: every graph input with its variable and layout. `outputs`: per flat output its variable and layout, or
    a constant and (). `mutations`: (buffer FQN, variable) to write back after the outputs are computed. `gather`: of a
    split program, the part that is run once a step; `steps` are then those of one microbatch.
    """

    mesh: Mesh
    inputs: tuple[tuple[Input, Layout], ...]
    steps: tuple[AnyStep, ...]
    outputs: tuple[tuple[Any, Layout], ...]
    mutations: tuple[tuple[str, str], ...]
    gather: Gather | None = None

    @property
    def joint_axes(self) -> tuple[tuple[int, ...], ...]:
        """The sets of several mesh axes that conversions take as one, sorted."""
        steps = flat((*self.steps, *(self.gather.steps if self.gather else ())))
        return tuple(
            sorted({step.axes for step in steps if isinstance(step, Convert | UseTogether) and len(step.axes) > 1})
        )

    @property
    def has_random_ops(self) -> bool:
        return any(isinstance(step, Call) and step.random >= 0 for step in flat(self.steps))


def flat(steps: Iterable[AnyStep]) -> Iterator[AnyStep]:
    """The steps, and those of regions in place of them."""
    for step in steps:
        yield from flat(step.steps) if isinstance(step, Region | Offload) else (step,)


def reads(step: AnyStep) -> set[str]:
    """Variables the step reads."""
    match step:
        case Convert(source=source):
            return {source}
        case UseTogether(sources=sources):
            return set(sources)
        case Call(reads=operands, again=again):
            return {name for name, _ in operands} | {one.source for one in again}
        case Region(inputs=inputs):
            return set(inputs)
        case Offload(steps=steps):
            return set().union(*map(reads, steps)) - writes(step)
    return set()


def writes(step: AnyStep) -> set[str]:
    """Variables the step defines."""
    match step:
        case Convert(output=output):
            return {output}
        case UseTogether(outputs=outputs):
            return set(outputs)
        case Call(outputs=outputs):
            return {value.name for value in outputs}
        case Region(outputs=outputs):
            return set(outputs)
        case Offload(steps=steps):
            return set().union(*map(writes, steps))
    return set()
