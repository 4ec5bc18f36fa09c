"""A graph with at most four copies of each repeat, and how many ops of the whole graph each of its ops stands for.

The first copy of a repeat reads what comes before it, and the last is read by what follows. The second stands for all
others but the last but one, whose neighbour may differ. So a sum over ops and conversions is a sum over the sampled
graph, each term as often as it occurs, and costs the same however deep a model is.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.ir.folding.fold import Folded, Repeat
from autopar.ir.graph import Graph, Op
from autopar.sbp.analysis.read_slots import read_slots
from autopar.sbp.analysis.sample_blocks import drop_copies, is_used_in_turn

Regions = tuple[tuple[str, ...], ...]
# Copies of a repeat that are sampled, at most.
NUM_SAMPLED = 4


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

    def num_conversions(self, value: str) -> list[int]:
        """The number of conversions of the whole graph that each conversion of `value` (`conversions`) represents."""
        maker = self.graph.once(_makers).get(value, value)
        nums = [self.num_readings(maker, use.user) for use in self.graph.uses[value]]
        return nums if len(nums) == 1 else [self.num(maker), *nums]

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
    repeats = [repeat for repeat in folded.repeats if repeat.count > NUM_SAMPLED and whole.is_uniform(repeat)]
    if not repeats:
        return Sampled(graph)
    times: dict[str, int] = {}
    repeat_of: dict[str, int] = {}
    for number, repeat in enumerate(repeats):
        num_alike = repeat.count - 3
        times |= dict.fromkeys((op.name for op in whole.copy(repeat, 1)), num_alike)
        times |= dict.fromkeys(whole.inputs_of_second(repeat), num_alike)
        kept = (op.name for copy in (0, 1, repeat.count - 2, repeat.count - 1) for op in whole.copy(repeat, copy))
        repeat_of |= dict.fromkeys(kept, number)
    all_but_last = [replace(repeat, count=repeat.count - 1) for repeat in repeats]
    return Sampled(drop_copies(graph, all_but_last, [NUM_SAMPLED - 1] * len(repeats)), times, repeat_of)


def of_graph(regions: Regions, graph: Graph) -> Regions:
    """The regions whose ops are in `graph`."""
    return tuple(region for region in regions if region[0] in graph.position)


class _Whole:
    """The whole graph, with what tells whether the copies of a repeat are alike."""

    def __init__(self, graph: Graph, folded: Folded, marked: Sequence[Regions], named: Collection[str]) -> None:
        self.graph, self.same, self.named = graph, folded.representative, frozenset(named)
        self.slots = graph.once(read_slots)
        self.regions = [_placed(graph, regions) for regions in marked]

    def copy(self, repeat: Repeat, number: int) -> tuple[Op, ...]:
        start = self._start(repeat) + number * len(repeat.ops)
        return self.graph.ops[start : start + len(repeat.ops)]

    def inputs_of_second(self, repeat: Repeat) -> set[str]:
        """Names of the inputs that only the second copy reads."""
        indices = self.slots.index[self._slots_of(repeat)[0][self._is_of_one_copy(repeat)[0]]]
        return {self.graph.inputs[index].value.name for index in indices.tolist()}

    def is_uniform(self, repeat: Repeat) -> bool:
        """Whether all copies between the first and the last are like the second, and only neighbours share values."""
        start, block, count = self._start(repeat), len(repeat.ops), repeat.count
        if not is_used_in_turn(self.graph, (start, start + (count - 1) * block), block):
            return False
        classes = [self.same[op.name] for op in self.graph.ops[start + block : start + (count - 1) * block]]
        if any(classes[at : at + block] != classes[:block] for at in range(0, len(classes), block)):
            return False
        position = self._starts(repeat)[:, None] + np.arange(block)
        for first, form in self.regions:
            begins = np.where(first[position] < 0, 0, first[position] - position[:, :1])
            if not (_are_alike(begins) and _are_alike(form[position])):
                return False
        return _are_alike(np.diff(self.slots.first)[position]) and all(map(_are_alike, self._reads(repeat)))

    def _start(self, repeat: Repeat) -> int:
        return self.graph.position[repeat.ops[0]]

    def _starts(self, repeat: Repeat) -> np.ndarray:
        """i64[copies]: position of the first op of each copy but the first and the last."""
        return self._start(repeat) + len(repeat.ops) * np.arange(1, repeat.count - 1)

    def _slots_of(self, repeat: Repeat) -> np.ndarray:
        """i64[copies, slots of a copy] of all copies but the first and the last, which have as many."""
        first = self.slots.first[self._starts(repeat)]
        return first[:, None] + np.arange(first[1] - first[0])

    def _is_of_one_copy(self, repeat: Repeat) -> np.ndarray:
        """bool[copies, slots of a copy]: whether the value is an input that this copy alone reads."""
        at, slots, start = self._slots_of(repeat), self.slots, self._starts(repeat)[:, None]
        index = np.where(slots.maker[at] < 0, slots.index[at], 0)
        is_alone = (slots.first_user[index] >= start) & (slots.last_user[index] < start + len(repeat.ops))
        return (slots.maker[at] < 0) & is_alone & ~slots.is_returned[index]

    def _reads(self, repeat: Repeat) -> Iterator[np.ndarray]:
        """The origins of the values that the slots of each copy read: their kinds, and which they are, by positions."""
        at, slots, alone = self._slots_of(repeat), self.slots, self._is_of_one_copy(repeat)
        maker, index, start = slots.maker[at], slots.index[at], self._start(repeat)
        is_inside = (maker >= start) & (maker < start + len(repeat.ops) * repeat.count)
        number: dict[Any, int] = {}
        classes = np.zeros_like(index)
        for place in zip(*(axis.tolist() for axis in np.nonzero(alone))):
            name = self.graph.inputs[index[place]].value.name
            classes[place] = number.setdefault((self.same[name], name in self.named), len(number))
        yield np.where(is_inside, 0, np.where(alone, 1, 2))
        yield np.where(is_inside, maker - self._starts(repeat)[:, None], np.where(alone, classes, maker))
        yield np.where(alone, 0, index)


def _are_alike(rows: np.ndarray) -> bool:
    return bool((rows == rows[:1]).all())


def _makers(graph: Graph) -> dict[str, str]:
    """Name of each value that an op makes -> the op."""
    return {value.name: op.name for op in graph.ops for value in op.outputs}


def _placed(graph: Graph, regions: Regions) -> tuple[np.ndarray, np.ndarray]:
    """For each op the position of the first op of its region, and the number of the region's form; -1 of none."""
    forms: dict[tuple[int, ...], int] = {}
    first, form = (np.full(len(graph.ops), -1) for _ in range(2))
    for region in regions:
        at = [graph.position[name] for name in region]
        first[at] = at[0]
        form[at] = forms.setdefault(tuple(position - at[0] for position in at), len(forms))
    return first, form
