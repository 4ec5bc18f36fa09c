"""`carried_outputs`: the outputs of a call that the next one is given in place of an argument, as a key-value cache."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Graph, Op, Slot, Value, arguments_of
from autopar.ir.inference.append_op import APPEND, WRITE
from autopar.ir.inference.kv_caches import written_in_place

# Ops that give their first operand with rows behind it, or written into it.
_GROWING = {"aten.cat.default"}
_INDEX_COPY = "aten.index_copy.default"
_WRITING = {
    _INDEX_COPY,
    "aten.index_put.default",
    "aten.slice_scatter.default",
    "aten.select_scatter.default",
    "aten.scatter.src",
}


def carried_outputs(graph: Graph) -> tuple[tuple[int, str], ...]:
    """(number of an output, name of the argument that it was before) for each output that is an argument with rows
    behind it or written into it; the first such output of each argument.
    """
    origin = {item.value.name: item.value for item in graph.of_kind("argument") if item.value.shape}
    arguments = dict(origin)
    for op in graph.ops:
        if (before := _before(op)) is not None and before.name in origin:
            origin[op.outputs[0].name] = origin[before.name]
    found: dict[str, int] = {}
    for index, value in enumerate(graph.outputs):
        if isinstance(value, Value) and value.name in origin and value.name not in arguments:
            before = origin[value.name]
            if (len(before.shape), before.dtype) == (len(value.shape), value.dtype):
                found.setdefault(before.name, index)
    return tuple((index, name) for name, index in found.items())


def with_appends(graph: Graph) -> Graph:
    """`graph` in which what is carried, and is an argument with rows behind it, is appended to in place (`APPEND`), and
    an argument that the model itself writes to is written to (`WRITE`).
    """
    grown = {graph.outputs[index].name for index, _ in graph.carried}
    in_place = written_in_place(graph.output_spec)
    written = {graph.outputs[index].name: name for index, name in graph.carried if index in in_place}
    reads = Counter(value.name for op in graph.ops for value in op.inputs)
    alone = {output for output, name in written.items() if reads[name] == 1}  # nobody needs what was there before

    def changed(op: Op) -> Op:
        name = op.outputs[0].name if op.outputs else ""
        if name in alone and op.target == _INDEX_COPY:
            return replace(op, target=WRITE)
        return _appending(op) if name in grown else op

    return replace(graph, ops=tuple(map(changed, graph.ops)))


def carried_values(graph: Graph) -> Mapping[str, Value]:
    """Name of an argument -> the output of the call that is carried in its place."""
    return {name: graph.outputs[index] for index, name in graph.carried}


def _appending(op: Op) -> Op:
    if op.target not in _GROWING or len(op.inputs) != 2:
        return op
    return replace(op, target=APPEND, args=(Slot(0), Slot(1), arguments_of(op)["dim"]), kwargs=())


def _before(op: Op) -> Value | None:
    """The value that `op` gives with rows behind it or written into it; None if it does neither."""
    if (op.target in _GROWING and len(op.inputs) > 1) or op.target in _WRITING:
        return op.inputs[0]
    return None
