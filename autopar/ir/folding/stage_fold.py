"""The fold of a stage, derived from the fold of the whole graph."""

from collections.abc import Collection

from autopar.ir.folding.fold import Folded, Repeat
from autopar.ir.graph import Graph


def fold_of_stage(folded: Folded, stage: Graph, received: Collection[str]) -> Folded:
    """The fold of `stage`: copies of a repeat of the whole graph's `folded` that lie in the stage stay one class.

    A class is represented by its first member in the stage. A value `received` from the previous stage is a class of
    its own.
    """
    first: dict[str, str] = {}
    representative = {
        op.name: first.setdefault(folded.representative.get(op.name, op.name), op.name) for op in stage.ops
    }
    for name in (item.value.name for item in stage.inputs):
        # a received value has the name of an op of another stage
        representative[name] = (
            name if name in received else first.setdefault(folded.representative.get(name, name), name)
        )
    classes = [folded.representative.get(op.name, op.name) for op in stage.ops]
    repeats = []
    for repeat in folded.repeats:
        starts = [position for position, name in enumerate(classes) if name == repeat.ops[0]]
        block = len(repeat.ops)
        whole = [start for start in starts if tuple(classes[start : start + block]) == repeat.ops]
        if len(whole) > 1:
            repeats.append(Repeat(tuple(op.name for op in stage.ops[whole[0] : whole[0] + block]), len(whole)))
    return Folded(representative, tuple(repeats))
