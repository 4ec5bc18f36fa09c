"""The passes that remove ops that return their input, and keep memory in rows where an op needs that."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.ir.graph import Graph, Op, Slot, Value, arguments_of
from autopar.ir.passes.rewire import rewire


def drop_identities(graph: Graph) -> Graph:
    """`graph` without ops that only copy their input: without in-place ops, copies and memory formats do not matter."""
    replaced: dict[str, Value] = {}
    kept = []
    for op in graph.ops:
        if _is_identity(op):
            replaced[op.outputs[0].name] = op.inputs[0]
        else:
            kept.append(op)
    return rewire(graph, kept, replaced)


def keep_rows_contiguous(graph: Graph) -> Graph:
    """`graph` in which what ops read by its strides is contiguous: the last dim of what becomes complex has stride 1.

    A model that makes it so may do it by a copy that is an identity by its values, or by an op whose result has other
    strides here. Of a contiguous tensor it is a view.
    """
    ops = list[Op]()
    for op in graph.ops:
        if op.target in _READ_BY_STRIDES:
            source = op.inputs[0]
            made = Value(f"{op.outputs[0].name}_rows", source.shape, source.dtype, source.needs_grad)
            named = {"name": made.name, "inputs": (source,), "outputs": (made,), "args": (Slot(0),), "kwargs": ()}
            ops.append(replace(op, target="aten.contiguous.default", **named))
            op = replace(op, inputs=(made,))
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def _is_identity(op: Op) -> bool:
    test = _TESTS.get(op.target)
    if test is None or not op.inputs or op.outputs[0].needs_grad != op.inputs[0].needs_grad:
        return False
    return test(op)


def _always(op: Op) -> bool:
    return True


def _same_shape(op: Op) -> bool:
    return op.inputs[0].shape == op.outputs[0].shape


def _same_dtype(op: Op) -> bool:
    return op.inputs[0].dtype == op.outputs[0].dtype


def _same_order(op: Op) -> bool:
    return op.args[1] == tuple(range(len(op.args[1])))


def _drops_nothing(op: Op) -> bool:
    named = arguments_of(op)
    return not named["train"] or named["p"] == 0


_READ_BY_STRIDES = ("aten.view_as_complex.default",)
_TESTS: Mapping[str, Callable[[Op], bool]] = {
    "aten.alias.default": _always,
    "aten.clone.default": _always,
    "aten.contiguous.default": _always,
    "aten.detach.default": _always,
    "aten.lift_fresh.default": _always,
    "aten.lift_fresh_copy.default": _always,
    "aten.expand.default": _same_shape,
    "aten.reshape.default": _same_shape,
    "aten.slice.Tensor": _same_shape,
    "aten.to.dtype": _same_dtype,
    "aten.permute.default": _same_order,
    "aten.cat.default": lambda op: len(op.inputs) == 1,
    "aten.dropout.default": _drops_nothing,
    "aten.feature_dropout.default": _drops_nothing,
    "aten.alpha_dropout.default": _drops_nothing,
}
