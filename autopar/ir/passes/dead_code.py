"""The pass that removes ops whose results are not used."""

from dataclasses import replace

from autopar.ir.graph import Graph, Op, Value


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
        if any(value.name in wanted for value in op.outputs):
            kept.append(op)
            wanted.update(value.name for value in op.inputs)
    return tuple(reversed(kept))
