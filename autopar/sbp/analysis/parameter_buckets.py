"""`parameter_buckets`: parameters that one collective may gather or reduce, of a copy of a block or of the ops between.

A bucket stays within a copy, so that all copies of a block have the same buckets and a folded plan has them too.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from autopar.ir.folding.fold import Folded, value_classes
from autopar.ir.graph import Graph
from autopar.sbp.assignment import InBucket


def parameter_buckets(
    graph: Graph, folded: Folded, most: float, *, least: float = 0.0, is_prefetched: bool = False
) -> Mapping[str, InBucket]:
    """Parameter -> its place in the bucket that may gather it or reduce its gradient, maybe alone there.

    A bucket has parameters of one dtype, all trained or all not, in order of first use, and of several at most `most`
    bytes; with fewer than `least` it takes the next one of any size. `is_prefetched`: as of `InBucket`.
    """
    places: dict[str, InBucket] = {}
    parameters = {item.value.name: item.value for item in graph.of_kind("parameter")}
    for _, names in groupby(_first_uses(graph, folded, parameters), key=lambda use: use[0]):
        kinds: dict[tuple, list[str]] = {}
        for _, name in names:
            kinds.setdefault((parameters[name].dtype, parameters[name].needs_grad), []).append(name)
        for of_kind in kinds.values():
            for bucket in _filled({name: parameters[name].num_bytes for name in of_kind}, most, least):
                num_bytes = sum(parameters[name].num_bytes for name in bucket)
                places.update((name, InBucket(num_bytes, place, is_prefetched)) for place, name in enumerate(bucket))
    return _alike(places, value_classes(graph, folded), parameters)


def _alike(
    places: Mapping[str, InBucket], classes: Mapping[str, str], parameters: Iterable[str]
) -> Mapping[str, InBucket]:
    """The places of parameters whose whole class has the same."""
    of_class: dict[str, set[InBucket | None]] = {}
    for name in parameters:
        of_class.setdefault(classes[name], set()).add(places.get(name))
    return {name: place for name, place in places.items() if len(of_class[classes[name]]) == 1}


def _first_uses(graph: Graph, folded: Folded, parameters: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """(number of the copy or of the run of ops between copies, parameter) of each parameter at its first use."""
    starts = {0}
    for repeat in folded.repeats:
        first, block = graph.position[repeat.ops[0]], len(repeat.ops)
        starts.update(first + copy * block for copy in range(repeat.count + 1))
    uses = {name: graph.uses[name][0] for name in parameters if name in graph.uses}
    at = {name: (graph.position[use.user], use.slot) for name, use in uses.items() if use.user in graph.position}
    in_order, borders = sorted(at, key=at.__getitem__), sorted(starts)
    yield from ((bisect_right(borders, at[name][0]), name) for name in in_order)


def _filled(sizes: Mapping[str, int], most: float, least: float) -> Iterator[list[str]]:
    """The names in their order in buckets of at most `most` bytes together, or of one that fills up to `least`."""
    bucket: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if bucket and filled + size > most and filled >= least:
            yield bucket
            bucket, filled = [], 0
        bucket.append(name)
        filled += size
    if bucket:
        yield bucket
