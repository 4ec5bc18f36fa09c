"""The fold of a whole graph as it is seen within one of its stages."""

from collections.abc import Collection

from autopar.ir.folding.fold import Folded, Repeat
from autopar.ir.graph import Graph


def within(folded: Folded, stage: Graph, received: Collection[str]) -> Folded:
    """`folded`, of a graph of which `stage` has some ops and inputs: the copies of a repeat that lie in the stage stay
    alike.

    A class is represented by its first member in the stage; what is `received` from the stage before is like no other
    value.
    """
    first: dict[str, str] = {}
    representative = {
        op.name: first.setdefault(folded.representative.get(op.name, op.name), op.name) for op in stage.ops
    }
    for name in (item.value.name for item in stage.inputs):
        # what is received has the name of the op that makes it elsewhere
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
