"""A graph with at most four copies of each repeat, and how many ops of the whole graph each of its ops stands for.

The first copy of a repeat reads what comes before it, and the last is read by what follows. The second stands for all
others but the last but one, whose neighbour may differ. So a sum over ops and conversions is a sum over the sampled
graph, each term as often as it occurs, and costs the same however deep a model is.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.folding.fold import Folded, Repeat
from autopar.ir.graph import Graph, Op, Value
from autopar.sbp.analysis.sample_blocks import drop_copies
from autopar.sbp.assignment import uses_of

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
        second = whole.copy(repeat, 1)
        inputs = {value.name for op in second for value in op.inputs if whole.is_of_one_copy(repeat, value)}
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
        self.uses = uses_of(graph)
        self.position = {op.name: number for number, op in enumerate(graph.ops)}
        self.inputs = {item.value.name for item in graph.inputs}
        self.maker = {value.name: number for number, op in enumerate(graph.ops) for value in op.outputs}
        self.regions = [{name: region for region in regions for name in region} for regions in marked]

    def copy(self, repeat: Repeat, number: int) -> tuple[Op, ...]:
        start, block = self.position[repeat.ops[0]], len(repeat.ops)
        return self.graph.ops[start + number * block : start + (number + 1) * block]

    def is_uniform(self, repeat: Repeat) -> bool:
        """Whether all copies between the first and the last are like the second, and only neighbours share values."""
        for number in range(repeat.count - 1):
            if not all(
                self._is_used_in_turn(repeat, number, value) for op in self.copy(repeat, number) for value in op.outputs
            ):
                return False
        second = self.copy(repeat, 1)
        return all(
            self._is_like(repeat, op, like, number - 1)
            for number in range(2, repeat.count - 1)
            for op, like in zip(self.copy(repeat, number), second)
        )

    def is_of_one_copy(self, repeat: Repeat, value: Value) -> bool:
        """Whether a value is an input that one copy reads."""
        return (
            value.name in self.inputs and len({self._copy_of(repeat, use.user) for use in self.uses[value.name]}) == 1
        )

    def _copy_of(self, repeat: Repeat, name: str) -> int:
        """-1 outside of the repeat."""
        number = (self.position.get(name, -1) - self.position[repeat.ops[0]]) // len(repeat.ops)
        return number if name in self.position and 0 <= number < repeat.count else -1

    def _is_used_in_turn(self, repeat: Repeat, number: int, value: Value) -> bool:
        return all(self._copy_of(repeat, use.user) - number in (0, 1) for use in self.uses.get(value.name, ()))

    def _is_like(self, repeat: Repeat, op: Op, like: Op, num_behind: int) -> bool:
        """`num_behind`: copies from `like` to `op`."""
        if self.same[op.name] != self.same[like.name] or not all(
            self._is_same_input(repeat, one, other, num_behind) for one, other in zip(op.inputs, like.inputs)
        ):
            return False
        shift = num_behind * len(repeat.ops)
        return all(self._shifted(of.get(like.name), shift) == of.get(op.name) for of in self.regions)

    def _shifted(self, region: tuple[str, ...] | None, num: int) -> tuple[str, ...] | None:
        return region and tuple(self.graph.ops[self.position[name] + num].name for name in region)

    def _is_same_input(self, repeat: Repeat, one: Value, other: Value, num_behind: int) -> bool:
        if one.name == other.name:
            return True
        if one.name in self.inputs or other.name in self.inputs:
            is_apart = self.is_of_one_copy(repeat, one) and self.is_of_one_copy(repeat, other)
            return (
                is_apart
                and self.same[one.name] == self.same[other.name]
                and (one.name in self.named) == (other.name in self.named)
            )
        return self.maker[one.name] - self.maker[other.name] == num_behind * len(repeat.ops)
