"""A graph with at most four copies of each repeat, and how many ops of the whole graph each of its ops stands for.

The first copy of a repeat reads what comes before it, and the last is read by what follows. The second stands for all
others but the last but one, whose neighbour may differ. So a sum over ops and conversions is a sum over the sampled
graph, each term as often as it occurs, and costs the same however deep a model is.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir.folding.fold import Folded, Repeat
from autopar.ir.graph import Graph, Op, Value
from autopar.sbp.analysis.sample_blocks import drop_copies

Regions = tuple[tuple[str, ...], ...]
_NUM_KEPT = 4


@dataclass(frozen=True)
class Sampled:
    """times: name of an op or input that stands for several of the whole graph -> how many. repeat_of: op of a repeat
    that lacks copies -> number of the repeat.
    """

    graph: Graph
    times: Mapping[str, int] = field(default_factory=dict)
    repeat_of: Mapping[str, int] = field(default_factory=dict)

    def num(self, name: str) -> int:
        """The number of ops or inputs of the whole graph that this one represents."""
        return self.times.get(name, 1)

    def num_readings(self, maker: str, user: str) -> int:
        """The number of uses in the whole graph that one use by op `user` represents, of a value of op or input
        `maker`.

        Values between copies of one repeat are used as often as there are makers, others once by each copy.
        """
        is_inside = maker in self.repeat_of and self.repeat_of.get(user) == self.repeat_of[maker]
        return self.num(maker if is_inside else user)

    def num_between(self, *ops: str) -> int:
        """The number of times that the last of `ops` occurs between the others, two neighbours, or behind the one."""
        *ends, name = ops
        is_beside = self.repeat_of.get(name, -1) in {self.repeat_of.get(end) for end in ends}
        return 1 if is_beside else self.num(name)


def sampled(graph: Graph, folded: Folded, marked: Sequence[Regions] = (), named: Collection[str] = ()) -> Sampled:
    """`graph` without the copies of `folded.repeats` that are like their second copy in all that is counted.

    marked: sets of regions (recomputed, offloaded), named: inputs (with optimizer state on the host); a repeat whose
    copies are not all alike in these keeps all copies.
    """
    whole = _Whole(graph, folded, marked, named)
    repeats = [repeat for repeat in folded.repeats if repeat.count > _NUM_KEPT and whole.is_uniform(repeat)]
    if not repeats:
        return Sampled(graph)
    times: Counter[str] = Counter()
    repeat_of: dict[str, int] = {}
    for number, repeat in enumerate(repeats):
        second, copy_of = whole.copy(repeat, 1), whole.copies(repeat)
        inputs = {value.name for op in second for value in op.inputs if whole.is_of_one_copy(value, copy_of)}
        times.update(dict.fromkeys([*(op.name for op in second), *inputs], repeat.count - 3))
        kept = (op.name for copy in (0, 1, repeat.count - 2, repeat.count - 1) for op in whole.copy(repeat, copy))
        repeat_of |= dict.fromkeys(kept, number)
    all_but_last = [replace(repeat, count=repeat.count - 1) for repeat in repeats]
    return Sampled(drop_copies(graph, all_but_last, [_NUM_KEPT - 1] * len(repeats)), dict(times), repeat_of)


def of_graph(regions: Regions, graph: Graph) -> Regions:
    """The regions whose ops are in `graph`."""
    ops = {op.name for op in graph.ops}
    return tuple(region for region in regions if region[0] in ops)


class _Whole:
    """The whole graph, with what tells whether the copies of a repeat are alike."""

    def __init__(self, graph: Graph, folded: Folded, marked: Sequence[Regions], named: Collection[str]) -> None:
        self.graph, self.same, self.named = graph, folded.representative, frozenset(named)
        self.position = {op.name: number for number, op in enumerate(graph.ops)}
        self.inputs = {item.value.name for item in graph.inputs}
        self.maker = {value.name: number for number, op in enumerate(graph.ops) for value in op.outputs}
        self.regions = [self._placed(regions) for regions in marked]

    def copy(self, repeat: Repeat, number: int) -> tuple[Op, ...]:
        start, block = self.position[repeat.ops[0]], len(repeat.ops)
        return self.graph.ops[start + number * block : start + (number + 1) * block]

    def is_uniform(self, repeat: Repeat) -> bool:
        """Whether all copies between the first and the last are like the second, and only neighbours share values."""
        copy_of = self.copies(repeat)
        for number in range(repeat.count - 1):
            values = (value for op in self.copy(repeat, number) for value in op.outputs)
            uses = (use for value in values for use in self.graph.uses.get(value.name, ()))
            if not all(copy_of.get(use.user, -1) - number in (0, 1) for use in uses):
                return False
        second = self._reads(repeat, 1, copy_of)
        return all(self._reads(repeat, number, copy_of) == second for number in range(2, repeat.count - 1))

    def is_of_one_copy(self, value: Value, copy_of: Mapping[str, int]) -> bool:
        """Whether a value is an input that one copy reads; `copy_of`: as `copies` gives it."""
        if value.name not in self.inputs:
            return False
        uses = self.graph.uses[value.name]
        return len(uses) == 1 or len({copy_of.get(use.user, -1) for use in uses}) == 1

    def copies(self, repeat: Repeat) -> dict[str, int]:
        """Name of each op of the repeat -> number of its copy."""
        start, block = self.position[repeat.ops[0]], len(repeat.ops)
        return {op.name: i // block for i, op in enumerate(self.graph.ops[start : start + block * repeat.count])}

    def _placed(self, regions: Regions) -> dict[str, tuple[int, int]]:
        """Name of each op of a region -> (position of the region's first op, number of the region's form)."""
        forms: dict[tuple[int, ...], int] = {}
        placed: dict[str, tuple[int, int]] = {}
        for region in regions:
            at = [self.position[name] for name in region]
            form = forms.setdefault(tuple(position - at[0] for position in at), len(forms))
            placed |= dict.fromkeys(region, (at[0], form))
        return placed

    def _reads(self, repeat: Repeat, number: int, copy_of: Mapping[str, int]) -> list[Any]:
        """All that is counted of the ops of a copy, by positions in it: class, origin of each input, regions."""
        reads: list[Any] = []
        start = self.position[repeat.ops[0]] + number * len(repeat.ops)
        for op in self.copy(repeat, number):
            reads.append(self.same[op.name])
            for value in op.inputs:
                made = self.maker.get(value.name)
                if made is not None and self.graph.ops[made].name in copy_of:
                    reads.append(made - start)
                elif made is None and self.is_of_one_copy(value, copy_of):
                    reads.append((self.same[value.name], value.name in self.named))
                else:
                    reads.append(value.name)
            for placed in self.regions:
                first, form = placed.get(op.name, (None, -1))
                reads.append(form if first is None else (first - start, form))
        return reads
