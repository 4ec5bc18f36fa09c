"""`emit`: a program printed as Python, so that the code that runs can be read."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.codegen.names import axis_names, called, code, comment, keywords, local_name, variable
from autopar.codegen.program import (
    AnyStep,
    Call,
    Convert,
    ConvertTogether,
    Gather,
    OffloadedRegion,
    Program,
    RecomputedRegion,
    RegatheredOperand,
    Release,
    StartGather,
    Variable,
    reads,
)
from autopar.ir.graph import Input, Value, short_dtype
from autopar.sbp.local_ops import local_target
from autopar.sbp.placement import Layout, Placement, format_layout
from autopar.sbp.redistribute import (
    Collective,
    LayoutStep,
    again_in_backward,
    collectives_of_value,
    collectives_together,
)

Inputs = tuple[tuple[Input, Layout], ...]


def emit(program: Program, *, is_typed: bool = False) -> str:
    """The source of `forward(self, *arguments)`; of a split program, that of `gather(self)` before it.

    `gather` returns variable -> tensor, which `forward` reads in `self.used`. `is_typed` adds the layout of each
    variable, for a type checker of placements.
    """
    emitter = _Emitter(program, is_typed)
    gather = [*emitter.gather(program.gather), ""] if program.gather else []
    return "\n".join([*gather, *emitter.forward()]) + "\n"


class _Emitter:
    def __init__(self, program: Program, is_typed: bool) -> None:
        self.program = program
        self.is_typed = is_typed
        self.axis_names = axis_names(program.mesh, program.joint_axes)
        self.offload = "None"  # the scope opened last
        self.is_offloading = False

    def gather(self, gather: Gather) -> list[str]:
        results = [one.name for group in gather.results for one in group]
        together = self._together(gather.steps, set(results))
        body = [*self._axes(), *self._inputs(_names_read(gather.steps) | set(results), ("parameter",), together)]
        for step in gather.steps:
            body += self._step(step)
        body += ["return {", *(f"    {name!r}: {variable(name)}," for name in results), "}"]
        return _function("gather(self)", body)

    def forward(self) -> list[str]:
        arguments = [variable(item.value.name) for item, _ in self.program.inputs if item.kind == "argument"]
        body = [
            *self._axes(),
            *(["seed = self.draw_seed()"] if self.program.has_random_ops else []),
            *self._all_inputs(),
        ]
        for step in self.program.steps:
            body += self._step(step)
        stored = {item.fqn: layout for item, layout in self.program.inputs}
        for fqn, name in self.program.mutations:
            body += [*self._declare(name, stored[fqn]), f"self.write_back({fqn!r}, {variable(name)})"]
        for item, layout in self.program.outputs:
            body += self._declare(item.name, layout) if isinstance(item, Variable) else []
        outputs = [self._output(item) for item, _ in self.program.outputs]
        body.append(f"return ({', '.join(outputs)},)" if outputs else "return ()")
        return _function(f"forward({', '.join(['self', *arguments])})", body)

    def _axes(self) -> list[str]:
        return [f"({', '.join(self.axis_names.values())},) = self.axes"]

    def _all_inputs(self) -> list[str]:
        outputs = {item.name for item, _ in self.program.outputs if isinstance(item, Variable)}
        kept = outputs | {name for _, name in self.program.mutations}
        names = kept | _names_read(self.program.steps)
        if self.program.gather is None:
            together = self._together(self.program.steps, kept)
            return self._inputs(names, ("parameter", "buffer", "constant", "argument"), together)
        lines = self._inputs(names, ("buffer", "constant", "argument"))
        for one in (one for group in self.program.gather.results for one in group if one.name in names):
            lines.append(f"{variable(one.name)} = self.used[{one.name!r}]  {comment(describe(one.value, one.layout))}")
            lines += self._declare(one.name, one.layout)
        return lines

    def _inputs(self, names: set[str], kinds: tuple[str, ...], together: Sequence[Inputs] = ()) -> list[str]:
        """The lines for the inputs of `kinds` whose names are among the `names` read; several `together`."""
        lines = []
        first = {group[0][0].value.name: group for group in together}
        others = {item.value.name for group in together for item, _ in group[1:]}
        for item, layout in self.program.inputs:
            if item.kind not in kinds or item.value.name not in names or item.value.name in others:
                continue
            group = first.get(item.value.name, ((item, layout),))
            lines += [self._input(item, layout)] if len(group) == 1 else _inputs_together(group)
            lines += [text for one, of in group for text in self._declare(one.value.name, of)]
        return lines

    def _together(self, steps: Sequence[AnyStep], kept: set[str]) -> list[Inputs]:
        """The stored parameters that only one conversion together of these `steps` reads, by conversion.

        Those of a lower dtype are cast by themselves. `kept`: names that are read besides.
        """
        num_reads = Counter(name for step in steps for name in reads(step))
        stored = {
            item.value.name: (item, layout)
            for item, layout in self.program.inputs
            if item.kind == "parameter"
            and item.value.stored_dtype is None
            and item.value.name not in kept
            and item.fqn not in dict(self.program.mutations)
        }
        starts = (step.bucket if isinstance(step, StartGather) else step for step in steps if reads(step))
        groups = [
            tuple(stored[name] for name in bucket.sources if name in stored and num_reads[name] == 1)
            for bucket in starts
            if isinstance(bucket, ConvertTogether)
        ]
        return [group for group in groups if len(group) > 1]

    def _input(self, item: Input, layout: Layout) -> str:
        note = comment(describe(item.value, layout))
        if item.kind == "argument":
            return note
        if item.kind == "constant":
            return f"{variable(item.value.name)} = self.constants[{item.value.name!r}]  {note}"
        # a buffer that autograd saved must not change in the write-back
        read = "local_copy" if item.fqn in dict(self.program.mutations) else "local"
        stored = f"self.{read}({item.fqn!r})"
        if item.value.stored_dtype is not None:
            stored = f"cast_stored({stored}, {code(item.value.dtype)})"
        return f"{variable(item.value.name)} = {stored}  {note}"

    def _step(self, step: AnyStep) -> list[str]:
        if isinstance(step, Release):
            return [f"del {', '.join(map(variable, step.names))}"]
        if isinstance(step, RecomputedRegion):
            return self._region(step)
        if isinstance(step, OffloadedRegion):
            return self._offload(step)
        if isinstance(step, Convert):
            return [self._convert(step), *self._declare(step.output, step.after)]
        if isinstance(step, StartGather):
            earlier = f"bucket_{step.earlier}" if step.earlier >= 0 else ""
            return [f"bucket_{step.bucket.number} = GatherBucket{self._bucket(step.bucket)}.started({earlier})"]
        if isinstance(step, ConvertTogether):
            return self._convert_together(step)
        return self._call(step)

    def _region(self, step: RecomputedRegion) -> list[str]:
        inputs, name = ", ".join(map(variable, step.inputs)), f"region_{step.number}"
        outputs = f"({''.join(f'{variable(output)}, ' for output in step.outputs)})"
        body = [line for one in step.steps for line in self._step(one)]
        call = f"{outputs} = recomputed({name}, {inputs})"
        return [*_function(f"{name}({inputs})", [*body, f"return {outputs}"]), call]

    def _offload(self, step: OffloadedRegion) -> list[str]:
        name = f"offload_{step.number}"
        opened = f"{name} = Offload({', '.join([self.offload, *map(variable, step.stay)])})"
        self.offload, self.is_offloading = name, True
        body = [line for one in step.steps for line in self._step(one)]
        self.is_offloading = False
        return [opened, f"with {name}:", *("    " + line for line in body)]

    def _convert(self, step: Convert) -> str:
        function = "convert" if step.value.needs_grad else "move"
        planned = _planned(step.axes, step.src, step.dst, step.after)
        note = _note(collectives_of_value(planned, step.value, self.program.mesh.shape))
        placements = f"{code(step.src)}, {code(step.dst)}{_sum_in(step.value) if step.value.needs_grad else ''}"
        extent = "" if step.extent is None else f", extent={code(step.extent)}"
        call = f"{function}({variable(step.source)}, {self._axis(step.axes)}, {placements}{extent})"
        return f"{variable(step.output)} = {call}  {comment(f'{format_layout(step.after)}: {note}')}"

    def _convert_together(self, step: ConvertTogether) -> list[str]:
        steps = [_planned(step.axes, *ends) for ends in zip(step.src, step.dst, step.after, strict=True)]
        done = collectives_together(steps, step.values, self.program.mesh.shape)
        left = _tuple(map(variable, step.outputs))
        note = comment(f"{' '.join(map(format_layout, step.after))}: {_note(done)}")
        if step.number < 0:
            lines = [f"{left} = convert_together{self._bucket(step)}  {note}"]
        else:
            name = f"bucket_{step.number}"
            made = [] if step.is_prefetched else [f"{name} = GatherBucket{self._bucket(step)}"]
            lines = [*made, f"{left} = {name}.converted()  {note}"]
        return lines + [text for one in zip(step.outputs, step.after) for text in self._declare(*one)]

    def _bucket(self, step: ConvertTogether) -> str:
        """The arguments of a bucket's conversion."""
        stored = ", ".join(map(variable, step.sources)) + _sum_in(step.values[0])
        stored += f", extents={_tuple(map(code, step.extents))}" if step.extents else ""
        return f"({self._axis(step.axes)}, {_tuple(map(code, step.src))}, {_tuple(map(code, step.dst))}, {stored})"

    def _call(self, step: Call) -> list[str]:
        targets = ", ".join(variable(value.name) for value in step.outputs)
        left = f"({targets},)" if step.is_tuple or len(step.outputs) > 1 else targets
        described = "; ".join(describe(value, layout) for value, layout in zip(step.outputs, step.layouts))
        line = f"{left} = {self._called(step)}({', '.join(self._arguments(step))})"
        for scope in self._scopes(step):
            line = f"with {scope}: {line}"
        notes = [
            comment(f"{variable(one.source)} is gathered again in backward: {self._how_again(one)}")
            for one in step.again
        ]
        declared = [
            text for value, layout in zip(step.outputs, step.layouts) for text in self._declare(value.name, layout)
        ]
        needed = [text for name, layout in step.reads for text in self._declare(name, layout)]
        return [comment(f"{described}  {step.origin}".rstrip()), *notes, *needed, line, *declared]

    def _regathered(self, again: RegatheredOperand) -> str:
        if again.bucket >= 0:
            return f"({variable(again.whole)}, bucket_{again.bucket}, {again.place})"
        steps = [
            f"({self._axis(step.axes)}, {code(step.src)}, {code(step.dst)}, {code(step.extent)})"
            if step.extent is not None
            else f"({self._axis(step.axes)}, {code(step.src)}, {code(step.dst)})"
            for step in again.steps
        ]
        return f"({', '.join([variable(again.whole), variable(again.source), *steps])})"

    def _how_again(self, again: RegatheredOperand) -> str:
        if again.bucket >= 0:
            return f"with bucket_{again.bucket}"
        steps = [_planned(step.axes, step.src, step.dst, step.after) for step in again.steps]
        return _note(again_in_backward(steps, again.steps[0].value, self.program.mesh.shape))

    def _scopes(self, step: Call) -> list[str]:
        scopes = []
        if step.random >= 0:
            axes = "".join(f", {self._axis((axis,))}" for axis in step.split_axes)
            scopes.append(f"seeded({'self.step_seed' if step.is_alike else 'seed'}, {step.random}{axes})")
        if step.is_no_grad:
            scopes.append("torch.no_grad()")
        if step.again:
            rest = [f"rest={self.offload}"] if self.is_offloading else []
            scopes.append(f"regathered({', '.join([*map(self._regathered, step.again), *rest])})")
        return [", ".join(scopes)] if scopes else []

    def _called(self, step: Call) -> str:
        if step.roles:
            return f"local.{local_name(local_target(step.target))}"
        return called(step.target)

    def _arguments(self, step: Call) -> list[str]:
        roles = [(role, f"({', '.join(self._axis((axis,)) for axis in axes)},)") for role, axes in step.roles]
        return [*map(code, step.args), *keywords([*((key, code(arg)) for key, arg in step.kwargs), *roles])]

    def _declare(self, name: str, layout: Layout) -> list[str]:
        return (
            [f"{variable(name)} = declare({variable(name)}, {', '.join(map(code, layout))})"] if self.is_typed else []
        )

    def _output(self, item: Any) -> str:
        return code(item)

    def _axis(self, axes: tuple[int, ...]) -> str:
        return self.axis_names[axes]


def _inputs_together(group: Inputs) -> list[str]:
    names = [f"    {variable(item.value.name)},  {comment(describe(item.value, layout))}" for item, layout in group]
    return ["(", *names, ") = self.locals_together(", *(f"    {item.fqn!r}," for item, _ in group), ")"]


def _function(head: str, body: list[str]) -> list[str]:
    return [f"def {head}:", *("    " + line for line in body)]


def _names_read(steps: Iterable[AnyStep]) -> set[str]:
    return {name for step in steps for name in reads(step)}


def _planned(axes: tuple[int, ...], src: Placement, dst: Placement, after: Layout) -> LayoutStep:
    """The step from `src` to `dst` as the plan has it, without axes of size 1; `after`: the layout behind it."""
    before = tuple(src if axis in axes else placement for axis, placement in enumerate(after))
    return LayoutStep(axes, src, dst, before)


def _tuple(items: Iterable[str]) -> str:
    """A tuple of `items`, which is one with a single item too."""
    first, *others = items
    return f"({', '.join([first, *others])}{'' if others else ','})"


def _sum_in(value: Value) -> str:
    """The argument of a conversion whose gradient is summed in another dtype than its own."""
    return "" if value.sum_dtype is None else f", sum_in={code(value.sum_dtype)}"


def _note(collectives: tuple[Collective, ...]) -> str:
    return ", ".join(f"{c.kind} {c.num_bytes} B {c.phase}" for c in collectives) or "local"


def describe(value: Value, layout: Layout) -> str:
    """The text of a value's global shape and layout, such as `x: f32[4,8] S(0)B`."""
    return f"{value.name}: {short_dtype(value.dtype)}[{','.join(map(str, value.shape))}] {format_layout(layout)}"
