"""Guards in a graph under construction: what its first output checks, and sizes that follow from values."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.ir.export.functionalise import View, read
from autopar.ir.export.infer_metas import Meta
from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.graph import Graph, Value, resolve
from autopar.ir.guards.guard_ops import GUARDED, SIZED, gives_several, sized_target


def note_guard(args: Sequence[Any], env: Mapping[Any, Any], builder: OpBuilder, at: Origin) -> None:
    """Note the condition of a branch, whose values are read where it was decided."""
    nodes, condition, line = args
    values = tuple(read(env[node], builder, at) if isinstance(env[node], View) else env[node] for node in nodes)
    free = tuple(_without_gradient(value, builder, at) for value in values)
    builder.guards.append((free, condition, line))


def _without_gradient(value: Value, builder: OpBuilder, at: Origin) -> Value:
    return (
        builder.emit("aten.detach.default", (value,), at=replace(at, name="detach"))[0] if value.needs_grad else value
    )


def with_guards(outputs: Sequence[Any], builder: OpBuilder) -> tuple[Any, ...]:
    """The outputs of a graph, of which one checks all guards: the loss if there is one."""
    places = [i for i, item in enumerate(outputs) if isinstance(item, Value)]
    if not builder.guards or not places:
        return tuple(outputs)
    place = max(places, key=lambda i: (outputs[i].needs_grad and outputs[i].shape == (), outputs[i].needs_grad, -i))
    values = tuple(dict.fromkeys(value for guard in builder.guards for value in guard[0]))
    number = {value: i for i, value in enumerate(values)}
    conditions = {(_renumbered(text, [number[v] for v in used]), line) for used, text, line in builder.guards}
    texts, lines = zip(*sorted(conditions))
    checked = builder.emit(GUARDED, (outputs[place], values, texts, lines), at=Origin("guarded"))[0]
    return (*outputs[:place], checked, *outputs[place + 1 :])


def _renumbered(condition: str, numbers: Sequence[int]) -> str:
    """The condition with `v0`, `v1`, ... numbered as in the whole list.

    >>> _renumbered("Eq(v0, 3)", [5])
    'Eq(v5, 3)'
    """
    return re.sub(r"\bv(\d+)\b", lambda found: f"v{numbers[int(found[1])]}", condition)


def emit_sized(
    builder: OpBuilder, target: str, args: Any, kwargs: dict[str, Any], *, metas: Sequence[Meta], at: Origin, line: str
) -> tuple[Value, ...]:
    """Append a call whose results have sizes that depend on values, as `metas` has them for the example."""
    sizes = ";".join(f"{str(meta.dtype).removeprefix('torch.')} {','.join(map(str, meta.shape))}" for meta in metas)
    leaves = [args, *kwargs.values()]
    needs_grad = not at.is_no_grad and any(value.needs_grad for value in _values(leaves))
    made = [Meta(meta.shape, meta.dtype, needs_grad and meta.dtype.is_floating_point) for meta in metas]
    given = {**kwargs, "sizes": sizes, "line": line}
    return builder.emit(sized_target(target), args, given, at=at, made=(made, gives_several(resolve(target))))


def has_sizes_of_values(graph: Graph) -> bool:
    """Whether an op of the graph has results whose sizes depend on values."""
    return any(op.target.startswith(f"{SIZED}.") for op in graph.ops)


def _values(tree: Any) -> Iterator[Value]:
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _values(item)
