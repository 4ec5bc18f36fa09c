"""`check_idle`: that experts without rows change nothing, so that a program in which all have rows is right.

A loop over experts may leave those without rows out, or do something else for them. A second trace, in which no mask
selects any row, shows it: without what is written to selected rows, which for no rows is nothing, both graphs must be
the same.
"""

from dataclasses import replace

from autopar.errors import TraceError
from autopar.ir.experts.expert_loops import SCATTERS, find_loops
from autopar.ir.experts.keep_rows import ROWS
from autopar.ir.graph import Graph, Op, Value
from autopar.ir.passes.common_subexpressions import merge_duplicates
from autopar.ir.passes.dead_code import drop_dead


def selects_rows(graph: Graph) -> bool:
    """Whether masks select rows in a graph of a model, before any pass."""
    return any(op.target == ROWS for op in graph.ops)


def check_idle(graph: Graph, idle: Graph) -> None:
    """`idle`: the graph with no rows. TraceError if the rest of it is another one."""
    find_loops(merge_duplicates(graph))  # of anything else it says more
    ours, theirs = _rest(graph), _rest(idle)
    if ours != theirs:
        at = next(op for op in graph.ops if op.target == ROWS)
        raise TraceError(
            f"{at.line}: the model does something else for an expert without rows than leaving it out, or uses the rows"
            " of one for something else than to write to them; a plan needs one fixed program: add or write rows only,"
            " and compute all else from masks"
        )


def _rest(graph: Graph) -> tuple[object, ...]:
    """The calls of a graph without writes to selected rows, equal for graphs that are the same but for names."""
    places = {value.name for op in graph.ops if op.target == ROWS for value in op.outputs}
    same: dict[str, Value] = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = replace(op, inputs=tuple(same.get(value.name, value) for value in op.inputs))
        if op.target in SCATTERS and any(value.name in places for value in op.inputs[1:]):
            same[op.outputs[0].name] = op.inputs[0]
        else:
            ops.append(op)
    outputs = tuple(same.get(item.name, item) if isinstance(item, Value) else item for item in graph.outputs)
    mutations = tuple((fqn, same.get(value.name, value)) for fqn, value in graph.mutations)
    found = drop_dead(merge_duplicates(replace(graph, ops=tuple(ops), outputs=outputs, mutations=mutations)))
    number: dict[str, object] = {item.value.name: item.fqn for item in found.inputs}
    calls: list[object] = []
    for op in found.ops:
        sizes = tuple((value.shape, value.dtype) for value in op.outputs)
        read = tuple(number[value.name] for value in op.inputs)
        calls.append((op.target, repr(op.args), repr(op.kwargs), read, sizes, op.is_no_grad))
        number.update((value.name, (len(calls), i)) for i, value in enumerate(op.outputs))
    results = tuple(number[item.name] if isinstance(item, Value) else item for item in found.outputs)
    return *calls, results, tuple((fqn, number[value.name]) for fqn, value in found.mutations)
