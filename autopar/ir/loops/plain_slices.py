"""Loops over steps with the slices that they read and write in one form: `select`, and a `stack` of what is written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Op, Slot, Value
from autopar.ir.loops.find_loops import MIN_STEPS, SELECT

_SLICE = "aten.slice.Tensor"
# Whether what is written has the dim along which it is written.
_WRITES = {"aten.select_scatter.default": False, "aten.slice_scatter.default": True}


def plain_slices(graph: Graph) -> Graph:
    """`graph` with slices of one index as `select`, and tensors of which many steps write an index each as stacks."""
    stacks = _stacks(graph)
    return replace(graph, ops=tuple(part for op in graph.ops for part in _plain(op, stacks)))


@dataclass(frozen=True)
class _StackedWrites:
    """The values written at each index, in order; None in place of a write that is not the last."""

    parts: tuple[Value, ...] | None


def _plain(op: Op, stacks: Mapping[str, _StackedWrites]) -> Iterator[Op]:
    if op.name in stacks:
        parts = stacks[op.name].parts
        if parts is not None:
            joins = "aten.cat.default" if _WRITES[op.target] else "aten.stack.default"
            args = tuple(map(Slot, range(len(parts)))), op.args[2]
            yield replace(op, target=joins, args=args, inputs=parts)
        return
    if op.target != _SLICE or op.kwargs or len(op.args) != 4 or op.outputs[0].shape[op.args[1]] != 1:
        yield op
        return
    value, dim, start = op.outputs[0], op.args[1], op.args[2]
    if not isinstance(start, int) or op.inputs[0].shape[dim] == 1 or not 0 <= start < op.inputs[0].shape[dim]:
        yield op
        return
    shape = (*value.shape[:dim], *value.shape[dim + 1 :])
    part = replace(value, name=f"{op.name}_at", shape=shape)
    yield replace(op, name=part.name, target=SELECT, args=(Slot(0), dim, start), outputs=(part,))
    yield replace(op, target="aten.reshape.default", args=(Slot(0), value.shape), inputs=(part,))


def _stacks(graph: Graph) -> dict[str, _StackedWrites]:
    """By the name of each write of a chain that writes all indices of a dim once and of which only the last is read."""
    by_name = {op.name: op for op in graph.ops}
    written: dict[str, _StackedWrites] = {}
    for last in graph.ops:
        if last.target not in _WRITES or _is_written_on(last, graph):
            continue
        chain = [last]
        while len(chain[-1].inputs) == 2 and (before := by_name.get(chain[-1].inputs[0].name)) is not None:
            if before.target != last.target or before.args[2] != last.args[2] or not _is_written_on(before, graph):
                break
            chain.append(before)
        indices = {_index(op): op.inputs[1] for op in chain}
        dim = last.args[2]
        if len(chain) < MIN_STEPS or indices.keys() != set(range(last.outputs[0].shape[dim])):
            continue
        if len(indices) != len(chain) or any(op.inputs[1].dtype != last.outputs[0].dtype for op in chain):
            continue
        written.update((op.name, _StackedWrites(None)) for op in chain)
        written[last.name] = _StackedWrites(tuple(indices[at] for at in sorted(indices)))
    return written


def _index(op: Op) -> int:
    """The index that is written; -1 if there are several."""
    if op.kwargs or op.args[:2] != (Slot(0), Slot(1)):
        return -1
    if not _WRITES[op.target]:
        return op.args[3] % op.outputs[0].shape[op.args[2]]
    is_one = len(op.args) == 5 and op.inputs[1].shape[op.args[2]] == 1
    return op.args[3] if is_one and isinstance(op.args[3], int) else -1


def _is_written_on(op: Op, graph: Graph) -> bool:
    """Whether nothing but the next write reads it."""
    uses = graph.uses.get(op.outputs[0].name, ())
    if len(uses) != 1 or uses[0].user not in graph.position:
        return False
    user = graph.ops[graph.position[uses[0].user]]
    return user.target == op.target and uses[0].slot == 0
