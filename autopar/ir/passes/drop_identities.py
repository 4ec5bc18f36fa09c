"""The pass that removes ops that return their input."""

from collections.abc import Callable, Mapping

from autopar.ir.graph import Graph, Op, Value, arguments_of
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
