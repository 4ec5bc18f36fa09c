"""Two groups of interior copies of a repeat, one planned fast, the other light, for a memory limit that binds.

At the best price of memory a plan above the limit and one within it have equal objectives. With copies of each such
that they fill the limit, the step exceeds the lower bound of that price only by the conversions between the groups, and
by the price of the bytes that whole copies leave unused.
"""

from itertools import chain

from autopar.ir.folding.fold import Folded
from autopar.ir.folding.segments import Segments, copies_of
from autopar.ir.graph import Graph
from autopar.sbp.assignment import Assignment


def can_mix(segments: Segments) -> bool:
    """Whether a segment has enough copies for two groups."""
    return any(size > 1 for sizes in segments for size in sizes)


def two_groups(segments: Segments, share: float) -> Segments:
    """`segments` with each of several copies split in two: `share` of its copies (at least one), and the others.

    >>> two_groups(((1, 1, 1), (1, 30, 1)), 0.42)
    ((1, 1, 1), (1, 12, 18, 1))
    """
    return tuple(tuple(chain.from_iterable(_groups(size, share) for size in sizes)) for sizes in segments)


def _groups(size: int, share: float) -> tuple[int, ...]:
    if size < 2:
        return (size,)
    first = min(max(1, int(share * size)), size - 1)
    return first, size - first


def mixture(
    graph: Graph, folded: Folded, segments: Segments, share: float, above: Assignment, within: Assignment
) -> Assignment:
    """`within` with the first of the `two_groups` of each segment as in `above`."""
    return within.merged(above, _first_groups(graph, folded, segments, share))


def _first_groups(graph: Graph, folded: Folded, segments: Segments, share: float) -> frozenset[str]:
    """The names of the ops of the first groups, of their values, and of the inputs that only they read."""
    is_first = [[i < _groups(size, share)[0] < size for size in sizes for i in range(size)] for sizes in segments]
    copies = copies_of(folded, graph)
    names = {name for name, places in copies.items() if all(is_first[repeat][copy] for repeat, copy in places)}
    return frozenset(names | {value.name for op in graph.ops if op.name in names for value in op.outputs})
