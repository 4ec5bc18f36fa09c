"""The pass that moves ops that depend on no input of the model out of the graph, to be computed once at load."""

from dataclasses import replace

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Input, Op, Value
from autopar.ir.op_facts import is_random


def split_constants(graph: Graph) -> Graph:
    """`graph` with all deterministic ops that depend on constants alone in `constant_ops`.

    Their values that other ops read become "constant" inputs. TraceError for a constant without contents.
    """
    known = {item.value.name: item.value for item in graph.of_kind("constant")}
    constant_ops, ops = [], []
    for op in graph.ops:
        is_constant = not is_random(op) and all(value.name in known for value in op.inputs)
        (constant_ops if is_constant else ops).append(op)
        if is_constant:
            known.update((value.name, value) for value in op.outputs)
    used = _used(graph, ops)
    frontier = [value for name, value in known.items() if name in used]
    _check_contents(graph, constant_ops, frontier)
    state = tuple(item for item in graph.inputs if item.kind != "constant")
    constants = tuple(Input("constant", value, value.name) for value in frontier)
    return replace(graph, inputs=(*state, *constants), ops=tuple(ops), constant_ops=tuple(constant_ops))


def _used(graph: Graph, ops: list[Op]) -> set[str]:
    used = {value.name for op in ops for value in op.inputs}
    used |= {item.name for item in graph.outputs if isinstance(item, Value)}
    return used | {value.name for _, value in graph.mutations}


def _check_contents(graph: Graph, constant_ops: list[Op], frontier: list[Value]) -> None:
    """TraceError for a tensor that the forward makes from numbers on the meta device, where the numbers are lost."""
    for name, tensor in graph.constants.items():
        if not tensor.is_meta or tensor.numel() == 0:
            continue
        reader = next(
            (op for op in (*constant_ops, *graph.ops) if any(value.name == name for value in op.inputs)), None
        )
        where = f"{reader.line}: " if reader else ""
        raise TraceError(
            f"{where}constant {name} was made on the meta device and has no contents; make it on the CPU, or register a"
            " buffer"
        )
