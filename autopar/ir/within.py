"""The fold of a whole graph as it is seen within one of its stages."""

from autopar.ir.fold import Folded, Repeat
from autopar.ir.graph import Graph


def within(folded: Folded, stage: Graph) -> Folded:
    """`folded`, of a graph of which `stage` has some ops and inputs: the copies of a repeat that lie in the stage stay alike.

    A class is represented by its first member in the stage; what the whole graph does not have (a received value) is like no other.
    """
    first: dict[str, str] = {}
    names = (*(op.name for op in stage.ops), *(item.value.name for item in stage.inputs))
    representative = {name: first.setdefault(folded.representative.get(name, name), name) for name in names}
    classes = [folded.representative.get(op.name, op.name) for op in stage.ops]
    repeats = []
    for repeat in folded.repeats:
        starts = [position for position, name in enumerate(classes) if name == repeat.ops[0]]
        block = len(repeat.ops)
        whole = [start for start in starts if tuple(classes[start : start + block]) == repeat.ops]
        if len(whole) > 1:
            repeats.append(Repeat(tuple(op.name for op in stage.ops[whole[0] : whole[0] + block]), len(whole)))
    return Folded(representative, tuple(repeats))
