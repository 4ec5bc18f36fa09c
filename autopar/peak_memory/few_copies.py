"""The allocations and frees of a program with many copies of a block,
extrapolated exactly from runs with few copies.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.folding.fold import Repeat, fold
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.sbp.analysis.equal_runs import as_planned
from autopar.sbp.analysis.sample_blocks import drop_copies, droppable
from autopar.sbp.assignment import BUCKET_BYTES, Assignment, Conversion, buckets, conversions
from autopar.sbp.placement import local_shape

# (name of a phase, i64[changes]): bytes allocated (positive) and freed (negative), in order
Phases = list[tuple[str, np.ndarray]]
Run = Callable[[Graph, Assignment, bool], Phases]  # the last argument: whether gradients are reduced in buckets

# Copies of each repeat that are run: the first and the last have other neighbours, and memory of one copy may be freed
# in the next.
_NUM_RUN = 3
_BACKWARD = ("B", "I", "W")  # parts of a step in which the last copy comes first


def run_phases(graph: Graph, assignment: Assignment, mesh: Mesh, run: Run) -> Phases:
    """The result of `run` for the graph, computed from runs with only a few of the copies that are planned alike.

    It is exact: the changes of one further copy must equal those of the copy before it, otherwise the whole graph is
    run. All blocks get one further copy at once; if it is unclear which changes belong to which block, one block after
    the other does. Where a bucket reduces the gradients of several copies, each is reduced alone in these runs, and the
    memory of a bucket is added where one may exist.
    """
    sampled = _few_of(graph, assignment, mesh)
    if sampled is None:
        return run(graph, assignment, True)
    in_buckets = sampled.bucket_bytes == 0
    few, more = (run(*sampled.part(), in_buckets), run(*sampled.part(*range(len(sampled.times))), in_buckets))
    whole = [
        extended(one, other, _ordered(name, sampled.times)) for (name, one), (_, other) in zip(few, more, strict=True)
    ]
    if None in whole and sampled.num_ops_in_turn < len(graph.ops):
        each = zip(*(run(*sampled.part(number), in_buckets) for number in range(len(sampled.times))))
        whole = [
            known or extended_in_turn(one, [other for _, other in others], sampled.times)
            for known, (_, one), others in zip(whole, few, each, strict=True)
        ]
    told = [changed for changed in whole if changed is not None]
    if len(told) < len(whole):
        return run(graph, assignment, True)
    is_split, phases = any(name == "reduce" for name, _ in few), []
    for (name, _), (changes, start) in zip(few, told, strict=True):
        reduces = name == "reduce" if is_split else any(kind in name for kind in _BACKWARD)
        phases.append((name, _with_bucket(changes, start, sampled.bucket_bytes if reduces else 0)))
    return phases


def extended(few: np.ndarray, more: np.ndarray, times: Sequence[int]) -> tuple[np.ndarray, int] | None:
    """(`few` with each block of numbers that `more` has once more repeated `times` further, position of the first
    block).

    `times`: one number for each block, in their order. None if a block does not equal the numbers before it, or if
    blocks are ambiguous.

    >>> extended(np.array([1, 2, 3, 2, 3, 9]), np.array([1, 2, 3, 2, 3, 2, 3, 9]), (3,))[0].tolist()
    [1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 9]
    """
    if np.array_equal(few, more):
        return few, 0
    for num in range(len(times), 0, -1) if len(set(times)) == 1 else (len(times),):
        insertions = _insertions(few, more, num)
        if insertions:
            parts, end = [], 0
            for (position, block), count in zip(insertions, times):
                parts += [few[end:position], *[block] * count]
                end = position
            return np.concatenate([*parts, few[end:]]), _start(few, *insertions[0])
    return None


def extended_in_turn(
    few: np.ndarray, more: Sequence[np.ndarray], times: Sequence[int]
) -> tuple[np.ndarray, int] | None:
    """As `extended`, from an array in `more` for each block, which has only that block once more."""
    inserted = []
    for longer, count in zip(more, times, strict=True):
        insertions = [] if np.array_equal(few, longer) else _insertions(few, longer, 1)
        if insertions is None:
            return None
        inserted += [(position, block, count) for position, block in insertions]
    parts, end = [], 0
    for position, block, count in sorted(inserted, key=lambda one: one[0]):
        parts += [few[end:position], *[block] * count]
        end = position
    start = min((_start(few, position, block) for position, block, _ in inserted), default=0)
    return np.concatenate([*parts, few[end:]]), start


def _insertions(few: np.ndarray, more: np.ndarray, num: int) -> list[tuple[int, np.ndarray]] | None:
    """(position in `few`, block) of `num` insertions that turn `few`
    into `more`, each equal to the numbers before it.
    """
    if num == 0:
        return [] if np.array_equal(few, more) else None
    alike = few == more[: len(few)]
    start, added = len(alike) if alike.all() else int(np.argmin(alike)), len(more) - len(few)
    for length in range(added - num + 1, 0, -1) if num > 1 else (added,):
        block = more[start : start + length]
        if 0 < length <= start and np.array_equal(more[start - length : start], block):
            rest = _insertions(few[start:], more[start + length :], num - 1)
            if rest is not None:
                return [(start, block), *((position + start, other) for position, other in rest)]
    return None


def _start(few: np.ndarray, position: int, block: np.ndarray) -> int:
    while position >= len(block) and np.array_equal(few[position - len(block) : position], block):
        position -= len(block)
    return position


def _with_bucket(changes: np.ndarray, start: int, num_bytes: int) -> np.ndarray:
    """`changes` with a transient of `num_bytes` at the peak behind `start`, before which no copy has a gradient."""
    if not num_bytes or start >= len(changes):
        return changes
    most = start + int(np.argmax(np.cumsum(changes)[start:])) + 1
    return np.concatenate([changes[:most], [num_bytes, -num_bytes], changes[most:]])


def _ordered(phase: str, times: tuple[int, ...]) -> tuple[int, ...]:
    return times[::-1] if any(kind in phase for kind in _BACKWARD) else times


@dataclass(frozen=True)
class _Few:
    """A graph and its repeats of which copies can be left out.

    `bucket_bytes`: the most memory of reducing a bucket with gradients of several copies.
    """

    graph: Graph
    assignment: Assignment
    repeats: tuple[Repeat, ...]
    bucket_bytes: int

    @property
    def times(self) -> tuple[int, ...]:
        """The numbers of copies that `part` lacks of each repeat, in graph order."""
        return tuple(repeat.count - _NUM_RUN for repeat in self.repeats)

    @property
    def num_ops_in_turn(self) -> int:
        """The number of ops of all parts with one further copy of one repeat."""
        return sum(len(self.part(number)[0].ops) for number in range(len(self.repeats)))

    def part(self, *longer: int) -> tuple[Graph, Assignment]:
        """The graph and assignment with `_NUM_RUN` copies of each repeat,
        and one more of the repeats numbered `longer`.
        """
        short = drop_copies(
            self.graph, self.repeats, [_NUM_RUN + (number in longer) for number in range(len(self.repeats))]
        )
        return short, self.assignment.restricted(short)


def _few_of(graph: Graph, assignment: Assignment, mesh: Mesh) -> _Few | None:
    """The repeats of which copies can be left out; None if there are none, or too few to gain by it."""
    # the optimizer's state does not change the program
    folded = as_planned(fold(graph), graph, replace(assignment, state_on_host=frozenset()))
    long = droppable(graph, [repeat for repeat in folded.repeats if repeat.count > _NUM_RUN + 1], _NUM_RUN)
    copies = _Few(graph, assignment, long, 0)
    (few, _), (more, assigned) = copies.part(), copies.part(*range(len(long)))
    for left in ({op.name for op in short.ops} for short in (few, more)):
        if any(0 < len(left.intersection(region)) < len(region) for region in assignment.regions):
            return None
    if not long or len(few.ops) + len(more.ops) >= len(graph.ops):
        return None
    return replace(copies, bucket_bytes=_bucket_bytes(graph, long, conversions(more, assigned), mesh))


def _bucket_bytes(
    graph: Graph, repeats: Sequence[Repeat], conversions: dict[str, tuple[Conversion, ...]], mesh: Mesh
) -> int:
    """Bytes of reducing the largest bucket: its gradients in one tensor, and their sum.

    0 if no bucket has gradients of several copies.
    """
    position = graph.position
    copies, most = {}, 0
    for number, repeat in enumerate(repeats):
        first, block = position[repeat.ops[0]], len(repeat.ops)
        copies |= {
            op.name: (number, at // block) for at, op in enumerate(graph.ops[first : first + block * repeat.count])
        }
    kinds: defaultdict[tuple, list[Conversion]] = defaultdict(list)
    for bucket in buckets(conversions):
        # a bucket of the plan stays within a copy, and a gradient that fills a bucket is reduced alone
        if bucket[0].is_bucketed and bucket[0].in_bucket is None and bucket[0].latency_share < 1:
            kinds[bucket[0].value.dtype, bucket[0].src, bucket[0].dst].extend(bucket)
    for members in kinds.values():
        if len({copies.get(use.user) for one in members for use in one.uses}) > 1:
            split = math.prod(local_shape(members[0].value.shape, members[0].src, mesh.shape)) / math.prod(
                members[0].value.shape
            )
            largest = max(one.value.num_bytes for one in members)
            most = max(most, math.ceil(2 * split * (BUCKET_BYTES + largest)))
    return most
