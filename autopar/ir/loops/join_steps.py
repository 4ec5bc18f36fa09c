"""Values of steps that are joined after they were cut apart: those of steps in a row are cut out of all steps once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Op, Slot, Value
from autopar.ir.loops.scan_op import SCAN

_SLICE, _FLIP, _CAT = "aten.slice.Tensor", "aten.flip.default", "aten.cat.default"
_TURNS = (_FLIP, "aten.permute.default", "aten.reshape.default")


@dataclass(frozen=True)
class _StepsCut:
    """The steps from `start` to `stop` of `whole`, which has all, then changed by `turns`."""

    whole: Value
    start: int
    stop: int
    turns: tuple[Op, ...]

    def joined(self, other: "_StepsCut", dim: int) -> "_StepsCut | None":
        """Both along `dim`, if that is the one of the steps and they are in a row; else None."""
        is_alike = self.whole is other.whole and [_how(op) for op in self.turns] == [_how(op) for op in other.turns]
        first, last = (other, self) if any(op.target == _FLIP for op in self.turns) else (self, other)
        if not is_alike or first.stop != last.start or not self.turns:
            return None
        order = next((op.args[1] for op in self.turns if op.target == "aten.permute.default"), None)
        if order is None or order[dim] != 0:
            return None
        grown = tuple(_grown(op, dim, other.turns[number]) for number, op in enumerate(self.turns))
        return _StepsCut(self.whole, first.start, last.stop, grown)


def _how(op: Op) -> tuple[object, ...]:
    return op.target, op.args[1] if op.target != "aten.reshape.default" else len(op.args[1])


def _grown(op: Op, dim: int, other: Op) -> Op:
    """`op` on as many steps as it and `other` have."""
    at = 0 if op.target == _FLIP else dim
    (value,), (more,) = op.outputs, other.outputs
    shape = (*value.shape[:at], value.shape[at] + more.shape[at], *value.shape[at + 1 :])
    args = (op.args[0], shape) if op.target == "aten.reshape.default" else op.args
    return replace(op, args=args, outputs=(replace(value, shape=shape),))


def join_steps(graph: Graph) -> Graph:
    """`graph` with one cut in place of several, of the same steps in a row, that a `cat` joins."""
    made = {value.name: op for op in graph.ops for value in op.outputs}
    names = {*made, *(op.name for op in graph.ops)}
    ops: list[Op] = []
    for op in graph.ops:
        inputs = _flat(op, made) if op.target == _CAT else ()
        cuts = [_cut_of(value, made) for value in inputs]
        if sum(cut is not None for cut in cuts) > 1:
            ops += _rewritten(op, inputs, cuts, names)
        else:
            ops.append(op)
    return replace(graph, ops=tuple(ops))


def _cut_of(value: Value, made: Mapping[str, Op]) -> _StepsCut | None:
    turns: list[Op] = []
    while (op := made.get(value.name)) is not None and op.target in _TURNS:
        turns.insert(0, op)
        value = op.inputs[0]
    if op is not None and op.target == _SLICE and op.args[1] == 0 and _is_of_steps(op.inputs[0], made):
        return _StepsCut(op.inputs[0], op.args[2], op.args[3], tuple(turns))
    return _StepsCut(value, 0, value.shape[0], tuple(turns)) if _is_of_steps(value, made) else None


def _is_of_steps(value: Value, made: Mapping[str, Op]) -> bool:
    return value.name in made and made[value.name].target == SCAN


def _dim(op: Op) -> int:
    return op.args[1] % len(op.outputs[0].shape) if len(op.args) > 1 else 0


def _flat(op: Op, made: Mapping[str, Op]) -> tuple[Value, ...]:
    """The inputs of a `cat`, and in place of one that is another along the same dim those of that."""
    pairs = ((value, made.get(value.name)) for value in op.inputs)
    return tuple(
        part
        for value, other in pairs
        for part in (other.inputs if other and other.target == _CAT and _dim(other) == _dim(op) else (value,))
    )


def _rewritten(op: Op, given: Sequence[Value], cuts: Sequence[_StepsCut | None], names: set[str]) -> list[Op]:
    dim = _dim(op)
    parts: list[tuple[Value, _StepsCut | None, bool]] = []  # an input, its cut, whether it is of several
    for value, cut in zip(given, cuts):
        before = parts[-1][1] if parts else None
        both = before.joined(cut, dim) if before is not None and cut is not None else None
        if both is not None:
            parts[-1] = parts[-1][0], both, True
        else:
            parts.append((value, cut, False))
    found: list[Op] = []
    inputs = tuple(
        _written(cut, op, found, names) if is_several and cut is not None else value for value, cut, is_several in parts
    )
    if len(inputs) == len(given):
        return [op]
    if len(inputs) == 1:
        found[-1] = replace(found[-1], name=op.name, outputs=op.outputs)
        return found
    return [*found, replace(op, args=(tuple(map(Slot, range(len(inputs)))), dim), inputs=inputs)]


def _written(cut: _StepsCut, like: Op, ops: list[Op], names: set[str]) -> Value:
    value = cut.whole
    if (cut.start, cut.stop) != (0, value.shape[0]):
        shape = (cut.stop - cut.start, *value.shape[1:])
        name = _unique(like.name, names)
        made = replace(value, name=name, shape=shape)
        args = (Slot(0), 0, cut.start, cut.stop)
        ops.append(replace(cut.turns[0], name=name, target=_SLICE, args=args, inputs=(value,), outputs=(made,)))
        value = made
    for op in cut.turns:
        name = _unique(like.name, names)
        made = replace(op.outputs[0], name=name)
        ops.append(replace(op, name=name, inputs=(value,), outputs=(made,)))
        value = made
    return value


def _unique(stem: str, names: set[str]) -> str:
    name = next(n for n in (f"{stem}_{i}" for i in range(1, len(names) + 2)) if n not in names)
    names.add(name)
    return name
