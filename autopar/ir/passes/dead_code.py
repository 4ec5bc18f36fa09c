"""The passes that remove ops whose results, or the numbers in them, are not used."""

from dataclasses import replace

from autopar.ir.graph import Graph, Op, Value, arguments_of

_LIKE = {"aten.zeros_like.default": 0, "aten.ones_like.default": 1, "aten.full_like.default": None}


def fill_by_shape(graph: Graph) -> Graph:
    """`graph` in which `zeros_like(x[0])` is filled by its shape: nothing of the sample is read. What has the shape of
    all samples stays, since it is split with them.
    """
    picked = {op.outputs[0].name for op in graph.ops if op.target == "aten.select.int"}
    return replace(
        graph, ops=tuple(_filled(op) if op.inputs and op.inputs[0].name in picked else op for op in graph.ops)
    )


def _filled(op: Op) -> Op:
    if op.target not in _LIKE or len(op.inputs) > 1:
        return op
    value, (output,) = _LIKE[op.target], op.outputs
    value = arguments_of(op)["fill_value"] if value is None else value
    return replace(
        op, target="aten.full.default", args=(output.shape, value), kwargs=(("dtype", output.dtype),), inputs=()
    )


def drop_dead(graph: Graph) -> Graph:
    """`graph` with only the ops and constants that an output or a mutation needs; its other inputs all stay."""
    wanted = {item.name for item in graph.outputs if isinstance(item, Value)} | {
        value.name for _, value in graph.mutations
    }
    ops = _needed(graph.ops, wanted)
    inputs = tuple(item for item in graph.inputs if item.kind != "constant" or item.value.name in wanted)
    constant_ops = _needed(graph.constant_ops, wanted)
    constants = {name: tensor for name, tensor in graph.constants.items() if name in wanted}
    return replace(graph, ops=ops, inputs=inputs, constant_ops=constant_ops, constants=constants)


def _needed(ops: tuple[Op, ...], wanted: set[str]) -> tuple[Op, ...]:
    """The ops that the values called `wanted` depend on; adds the names of their inputs to `wanted`."""
    kept = []
    for op in reversed(ops):
        if not wanted.isdisjoint([value.name for value in op.outputs]):
            kept.append(op)
            wanted.update([value.name for value in op.inputs])
    return tuple(reversed(kept))
