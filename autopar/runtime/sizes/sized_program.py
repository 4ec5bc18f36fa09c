"""`SizedProgram`: one program for all values of a size, such as the length of a cache that grows with each token.

It is found by comparing the programs of three calls. That the comparison holds for all sizes follows from the trace,
which has all sizes as expressions: if they are polynomials of degree two at most, every number that is affine in three
sizes is affine. A forward that is recorded at a size that the trace holds for has the graph that the trace gives. Where
a dim is split, the program is that of sizes that divide evenly, in which its numbers are affine too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from autopar.codegen.emit import emit
from autopar.codegen.program import Call, Convert, ConvertTogether, Program, flat
from autopar.ir.graph import Graph, Op, Value
from autopar.ir.interpret import run_constants
from autopar.ir.sizes.size import NAME, Different, Size, at, fit, sizes_in
from autopar.ir.sizes.sized_trace import SizedTrace
from autopar.runtime.load_program import Loaded, code_of, function_of
from autopar.runtime.sizes.kept_plan import Shapes, Trial
from autopar.sbp.placement import Layout, num_parts

NUM_COMPARED = 3


@dataclass(frozen=True)
class MadeProgram:
    """A program for a call of these shapes, made from a plan that was kept and a trace for a range of sizes; None for
    a recorded forward.
    """

    sized: SizedTrace | None
    trial: Trial
    loaded: Loaded

    @property
    def shapes(self) -> Shapes:
        """Of the tensors of the call."""
        return self.trial.shapes


@dataclass(frozen=True)
class FittedProgram:
    """A program, and what is read of its graph, with a `Size` for each number that follows from the size.

    `parts`: sizes with the number of equal parts that each must have.
    """

    program: Program
    constant_ops: tuple[Op, ...]
    outputs: tuple[Any, ...]
    parts: tuple[tuple[Size, int], ...]

    def divides(self, size: int) -> bool:
        """Whether all that is split has equal parts at this size, none of them empty."""
        return all(each.divides(size, parts) for each, parts in self.parts)


@dataclass(frozen=True)
class SizedProgram:
    """The program of calls whose `dims` all have the size of the first of them plus a difference; all others are fixed.

    `dims`: (tensor, dim) -> difference. `largest`: the largest size for which the plan is known to fit.
    """

    like: MadeProgram
    sized: SizedTrace
    dims: Mapping[tuple[int, int], int]
    fitted: FittedProgram
    code: CodeType
    largest: float

    def made_for(self, shapes: Shapes) -> MadeProgram | None:
        """The program for a call of these shapes; None if it does for others only."""
        (tensor, dim), *_ = self.dims
        size = shapes[tensor][dim]
        if size > self.largest or shapes != _with_size(self.like.shapes, self.dims, size):
            return None
        if self.sized.range.values(shapes) is None or not self.fitted.divides(size):
            return None
        old, fitted = self.like.loaded, self.fitted
        graph = replace(old.graph, constant_ops=at(fitted.constant_ops, size), outputs=at(fitted.outputs, size))
        constants = run_constants(graph, old.mesh.device_type) if fitted.constant_ops else old.constants
        loaded = replace(old, function=function_of(self.code, {NAME: size}), constants=constants, used={})
        return replace(self.like, trial=replace(self.like.trial, shapes=shapes), loaded=loaded)


def sized_program(made: Sequence[MadeProgram]) -> SizedProgram | None:
    """The program for all sizes between and beyond those of the programs `made`; None if they differ in more."""
    last, sized = made[-1], made[-1].sized
    if sized is None or any(each.sized is not None and each.sized is not sized for each in made):
        return None
    is_alike = all(each.trial.kept is last.trial.kept and sized.range.values(each.shapes) is not None for each in made)
    is_alike = is_alike and all(each.loaded.rows == last.loaded.rows for each in made)
    is_alike = is_alike and all(each.loaded.graph.output_spec == last.loaded.graph.output_spec for each in made)
    known, known_shapes = last.trial.kept.plan, last.trial.kept.shapes
    if not is_alike or any(each.trial.choices.assignment != known.assignment for each in made):
        return None
    dims = _dims([each.shapes for each in made])
    if not dims or not sized.is_quadratic:
        return None
    (tensor, dim), *_ = dims
    sizes = [each.shapes[tensor][dim] for each in made]
    fitted = fit_programs(sizes, [(each.loaded.program, each.loaded.graph) for each in made])
    known_size = known_shapes[tensor][dim]
    if fitted is None or known_shapes != _with_size(last.shapes, dims, known_size):
        return None
    limit = known.memory_limit_bytes / max(last.trial.kept.peak_bytes, default=known.memory_limit_bytes)
    most = _largest(fitted.program, known_size, limit)
    return SizedProgram(last, sized, dims, fitted, code_of(emit(fitted.program)), most)


def fit_programs(sizes: Sequence[int], made: Sequence[tuple[Program, Graph]]) -> FittedProgram | None:
    """The program for all sizes, from those of at least three; None if they differ in more than affine numbers, or if
    what is split has unequal parts.
    """
    try:
        program = fit(sizes, [program for program, _ in made])
        constant_ops = fit(sizes, [graph.constant_ops for _, graph in made])
        outputs = fit(sizes, [graph.outputs for _, graph in made])
    except Different:
        return None
    parts = _parts(program, constant_ops, outputs)
    return None if parts is None else FittedProgram(program, constant_ops, outputs, parts)


def _layouts(program: Program) -> Iterator[tuple[Value, Layout]]:
    """Every value of the program with each layout in which it is made, read or converted."""
    values = {item.value.name: item.value for item, _ in program.inputs}
    yield from ((item.value, layout) for item, layout in program.inputs)
    for step in flat(program.steps):
        if isinstance(step, Call):
            values.update((value.name, value) for value in step.outputs)
            yield from zip(step.outputs, step.layouts, strict=True)
            yield from ((values[name], layout) for name, layout in step.reads)
        elif isinstance(step, Convert):
            values[step.output] = step.value
            yield from ((step.value, layout) for layout in (step.after, (step.src, step.dst)))
        elif isinstance(step, ConvertTogether):
            values.update(zip(step.outputs, step.values, strict=True))


def _parts(program: Program, *others: Any) -> tuple[tuple[Size, int], ...] | None:
    """The sizes of a program, and of `others`, with the number of equal parts that each must have; None if they are
    not equal.
    """
    mesh_shape = program.mesh.shape
    found: dict[tuple[int, int, int, int], tuple[Size, int]] = {}

    def note(size: Size, parts: int) -> None:
        found[size.slope, size.constant, size.divisor, parts] = size, parts

    for size in (size for size in sizes_in((program.steps, *others)) if size.divisor > 1):
        note(size, 1)
    for value, layout in _layouts(program):
        for part in layout:
            if part.is_split and isinstance(size := value.shape[part.dim], Size):
                if part.is_own or part.shares or size % (parts := num_parts(layout, mesh_shape, part.dim) * part.unit):
                    return None
                note(size, parts)
    return tuple(found.values())


def _largest(program: Program, known: int, limit: float) -> float:
    """The largest size for which a peak at size `known` is within `limit` times that.

    No tensor, not even one inside an op, grows by more than the square of what the dim grows by that grows most.
    """
    sizes = [size for value, _ in _layouts(program) for size in value.shape if isinstance(size, Size)]
    least = min((max(size.at(known), 1) * size.divisor / abs(size.slope) for size in sizes), default=known)
    return known + least * (max(limit, 1.0) ** 0.5 - 1)


def _dims(shapes: Sequence[Shapes]) -> dict[tuple[int, int], int]:
    """(tensor, dim) of each size that differs -> its difference to the first of them; {} if that is not fixed."""
    varying = [
        (tensor, dim)
        for tensor, shape in enumerate(shapes[0])
        for dim in range(len(shape))
        if len({each[tensor][dim] for each in shapes}) > 1
    ]
    if not varying or len({each[varying[0][0]][varying[0][1]] for each in shapes}) < len(shapes):
        return {}
    found = {}
    for tensor, dim in varying:
        differences = {each[tensor][dim] - each[varying[0][0]][varying[0][1]] for each in shapes}
        if len(differences) > 1:
            return {}
        found[tensor, dim] = differences.pop()
    return found


def _with_size(shapes: Shapes, dims: Mapping[tuple[int, int], int], size: int) -> Shapes:
    return tuple(
        tuple(size + dims[tensor, dim] if (tensor, dim) in dims else old for dim, old in enumerate(shape))
        for tensor, shape in enumerate(shapes)
    )
