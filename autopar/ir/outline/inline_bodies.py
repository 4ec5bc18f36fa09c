"""Inlining: replacing each opaque call of a module by the ops of its body."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from autopar.ir.experts.row_numbers import row_numbers
from autopar.ir.export.from_fx import ConvertedRegion, Expand, convert_region, origin_of
from autopar.ir.export.functionalise import View, whole
from autopar.ir.export.op_builder import OpBuilder, stem_of
from autopar.ir.export.placeholders import flat_arguments
from autopar.ir.graph import Op, Value
from autopar.ir.outline.export_once import INNER, Outline
from autopar.ir.outline.opaque_calls import Body
from autopar.torch_compat import pytree


@dataclass(frozen=True)
class _InlinedCall:
    """The ops of one call of module `fqn`, the values that they may read from `outside`, and their results."""

    fqn: str
    ops: tuple[Op, ...]
    outside: tuple[Value, ...]
    results: tuple[Value, ...]


@dataclass(frozen=True)
class _BodyRegion:
    """A body as a region: its `order` of arguments, and what each placeholder stands for: the name of a parameter or
    buffer within the module, or None for an argument.
    """

    module: Any
    order: tuple[Any, ...]
    placeholders: tuple[tuple[Node, str | None], ...]
    number_of: Callable[[Any], Any] | None

    @classmethod
    def of(cls, body: Body, program: ExportedProgram, outer: ConvertedRegion) -> "_BodyRegion":
        specs = program.graph_signature.input_specs
        nodes = (node for node in program.graph.nodes if node.op == "placeholder")
        names = (None if spec.kind is InputKind.USER_INPUT else spec.target or "" for spec in specs)
        stands_for = tuple((node, name and name.removeprefix(INNER)) for node, name in zip(nodes, names))
        order = tuple(flat_arguments(program.call_spec.in_spec, *_numbered(body)))
        return cls(program.graph_module, order, stands_for, row_numbers(program.graph_module, outer.number_of))

    def called(self, fqn: str, given: Sequence[Any], state: Mapping[str, View]) -> dict[str, Any]:
        """The fields of a region that are the body's, with the values of its placeholders where `fqn` is called."""
        leaves = iter([given[leaf.position] if isinstance(leaf, _Given) else leaf for leaf in self.order])
        env = {node: next(leaves) if name is None else state[fqn + name] for node, name in self.placeholders}
        return {"module": self.module, "env": env, "number_of": self.number_of}


def expander(outline: Outline, state: Mapping[str, View]) -> Expand:
    """The function that converts the opaque calls of `outline`; `state`: FQN of a parameter or buffer -> its view.

    The body is converted for the first call of a kind, and if memory is shared or written; otherwise the ops of the
    first call are copied with other names.
    """
    examples: dict[Any, _InlinedCall | None] = {}
    regions: dict[int, _BodyRegion] = {}

    def expand(node: Node, region: ConvertedRegion, builder: OpBuilder) -> tuple[Any, ...]:
        args: tuple[Any, ...] = node.args
        chain = outline.chains[args[1]]
        first = given = [region.env[item] for item in args[0]]
        made: tuple[Any, ...] = ()
        for number, (fqn, line) in enumerate(zip(chain.fqns, chain.lines)):
            if number:
                given = [one if link < 0 else made[link] for one, link in zip(first, chain.links)]
            made = call(fqn, line or origin_of(node, region).line, chain.body, given, region, builder)
        return made

    def call(
        fqn: str, line: str, number: int, given: Sequence[Any], region: ConvertedRegion, builder: OpBuilder
    ) -> tuple[Any, ...]:
        if number not in regions:
            regions[number] = _BodyRegion.of(*outline.bodies[number], region)
        inner = replace(region, line=line, inside=fqn, **regions[number].called(fqn, given, state))
        outside = [view for view in inner.env.values() if isinstance(view, View)]
        key = (number, inner.line, _likeness(view.value for view in outside))
        if (example := examples.get(key)) and _is_current(outside):
            return _repeat(example, fqn, [view.value for view in outside], builder)
        start, before = len(builder.ops), _memory(outside)
        results = convert_region(inner, builder)
        made = tuple(view for item, view in zip(outline.bodies[number][0].outputs, results) if _is_made(item))
        if key not in examples:
            is_plain = before == _memory(outside) and _is_current(outside)
            examples[key] = _example(fqn, builder.ops[start:], outside, made) if is_plain else None
        return made

    return expand


def _is_made(item: Any) -> bool:
    return isinstance(item, tuple) and item[0] == "made"


def _is_current(views: Iterable[View]) -> bool:
    return all(view.version == view.storage.version for view in views)


def _memory(views: Iterable[View]) -> list[Any]:
    return [(view.storage.version, view.storage.owner, view.steps) for view in views]


def _likeness(values: Iterable[Value]) -> Any:
    """A key of values on which ops that read them may depend: their properties, and which of them are the same."""
    first: dict[str, int] = {}
    return tuple(
        (value.shape, value.dtype, value.needs_grad, first.setdefault(value.name, len(first))) for value in values
    )


def _example(fqn: str, ops: Sequence[Op], outside: Sequence[View], results: Sequence[View]) -> _InlinedCall | None:
    """The example of a call; None if a result shares memory with other values or is not made by these ops."""
    made = {value.name for op in ops for value in op.outputs}
    if any(
        view.steps or view.storage.owner or view.version != view.storage.version or view.value.name not in made
        for view in results
    ):
        return None
    return _InlinedCall(fqn, tuple(ops), tuple(view.value for view in outside), tuple(view.value for view in results))


def _repeat(example: _InlinedCall, fqn: str, outside: Sequence[Value], builder: OpBuilder) -> tuple[View, ...]:
    """Emit the ops of the example for another call, with the names that a conversion would give them."""
    now = {old.name: new for old, new in zip(example.outside, outside)}
    for op in example.ops:
        name = builder.unique(stem_of(op.name))
        outputs = tuple(
            Value(builder.unique(f"{name}_out{i}") if op.is_tuple else name, old.shape, old.dtype, old.needs_grad)
            for i, old in enumerate(op.outputs)
        )
        now.update((old.name, new) for old, new in zip(op.outputs, outputs))
        module = fqn + op.module.removeprefix(example.fqn)
        inputs = tuple(now[value.name] for value in op.inputs)
        builder.ops.append(
            Op(name, op.target, op.args, op.kwargs, inputs, outputs, op.is_no_grad, module, op.line, op.is_tuple)
        )
    return tuple(whole(now[value.name]) for value in example.results)


@dataclass(frozen=True, slots=True)
class _Given:
    """A placeholder of an argument: the position of its tensor among those of the op."""

    position: int


def _numbered(body: Body) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the body, with its tensors replaced by their numbers."""
    number = itertools.count()
    return pytree.tree_map_only(torch.Tensor, lambda _: _Given(next(number)), (body.args, dict(body.kwargs)))
