"""Two groups of interior copies of a repeat, one planned fast, the other light, for a memory limit that binds.

At the best price of memory a plan above the limit and one within it have equal objectives. With copies of each such
that they fill the limit, the step exceeds the lower bound of that price only by the conversions between the groups, and
by the price of the bytes that whole copies leave unused.
"""

from autopar.ir.folding.fold import Folded
from autopar.ir.folding.segments import Segments, copies_of
from autopar.ir.graph import Graph
from autopar.sbp.assignment import Assignment

# The least number of copies: the first, a fast one, a light one, the last.
_LEAST_COPIES = 4


def can_mix(folded: Folded) -> bool:
    """Whether a repeat has enough interior copies for two groups."""
    return any(repeat.count >= _LEAST_COPIES for repeat in folded.repeats)


def two_groups(folded: Folded, share: float) -> Segments:
    """Segments of each repeat: the first copy, `share` of the interior copies (at least one), the others, the last
    copy.

    >>> from autopar.ir.folding.fold import Repeat
    >>> two_groups(Folded({}, (Repeat(("a",), 3), Repeat(("b",), 32))), 0.42)
    ((1, 1, 1), (1, 12, 18, 1))
    """
    return tuple(_groups(repeat.count, share) for repeat in folded.repeats)


def _groups(count: int, share: float) -> tuple[int, ...]:
    if count < _LEAST_COPIES:
        return (1,) * count
    first = min(max(1, int(share * (count - 2))), count - 3)
    return 1, first, count - 2 - first, 1


def mixture(graph: Graph, folded: Folded, segments: Segments, above: Assignment, within: Assignment) -> Assignment:
    """`within` with the first group of interior copies in `segments` (of `two_groups`) as in `above`."""
    return within.merged(above, _first_group(graph, folded, segments))


def _first_group(graph: Graph, folded: Folded, segments: Segments) -> frozenset[str]:
    """The names of the ops of the first group, of their values, and of the inputs that only they read."""
    last = [sizes[1] if len(sizes) == _LEAST_COPIES else 0 for sizes in segments]
    copies = copies_of(folded, graph)
    names = {name for name, places in copies.items() if all(1 <= copy <= last[repeat] for repeat, copy in places)}
    return frozenset(names | {value.name for op in graph.ops if op.name in names for value in op.outputs})
