"""What a program with many copies of a block takes and lets go of, allocation by allocation, from runs with few of
them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.folding.fold import Repeat, fold
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.plans.equal_runs import as_planned
from autopar.sbp.analysis.sample_blocks import drop_copies, droppable
from autopar.sbp.assignment import BUCKET_BYTES, Assignment, Conversion, buckets, conversions
from autopar.sbp.placement import local_shape

# (name, i64[changes]): bytes taken (positive) and let go of (negative), in order
Phases = list[tuple[str, np.ndarray]]
Run = Callable[[Graph, Assignment, bool], Phases]  # the last: whether gradients are reduced in buckets

# Copies that are run of each: the first and the last have other neighbours, and what one leaves is let go of in the
# next.
_NUM_RUN = 3
_BACKWARD = ("B", "I", "W")  # parts of a step in which the last copy comes first


def run_phases(graph: Graph, assignment: Assignment, mesh: Mesh, run: Run) -> Phases:
    """What `run` gives for the graph, of whose copies of a block that are planned alike only a few are run.

    Equal to the byte: what one copy more changes must be what the copy before it changed, else the whole graph is run.
    All blocks get one copy more at once; where it is unclear whose changes are whose, one block after the other does.
    Where gradients of several copies are reduced in one bucket, each is reduced alone, and as much as a bucket can take
    is added where there may be one.
    """
    found = _few_of(graph, assignment, mesh)
    if found is None:
        return run(graph, assignment, True)
    in_buckets = found.bucket_bytes == 0
    few, more = (run(*found.part(), in_buckets), run(*found.part(*range(len(found.times))), in_buckets))
    whole = [
        extended(one, other, _ordered(name, found.times)) for (name, one), (_, other) in zip(few, more, strict=True)
    ]
    if None in whole and found.num_ops_in_turn < len(graph.ops):
        each = zip(*(run(*found.part(number), in_buckets) for number in range(len(found.times))))
        whole = [
            known or extended_in_turn(one, [other for _, other in others], found.times)
            for known, (_, one), others in zip(whole, few, each, strict=True)
        ]
    if None in whole:
        return run(graph, assignment, True)
    is_split, phases = any(name == "reduce" for name, _ in few), []
    for (name, _), changed in zip(few, whole):
        reduces = name == "reduce" if is_split else any(kind in name for kind in _BACKWARD)
        phases.append((name, _with_bucket(*changed, found.bucket_bytes if reduces else 0)))
    return phases


def extended(few: np.ndarray, more: np.ndarray, times: Sequence[int]) -> tuple[np.ndarray, int] | None:
    """`few` with each block of numbers that `more` has once more than `few` repeated so many times, in the order in
    which they come; and where the first of these blocks begins.

    None where a block is not what stands before it, or it is unclear which is which.

    >>> extended(np.array([1, 2, 3, 2, 3, 9]), np.array([1, 2, 3, 2, 3, 2, 3, 9]), (3,))[0].tolist()
    [1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 9]
    """
    if np.array_equal(few, more):
        return few, 0
    for num in range(len(times), 0, -1) if len(set(times)) == 1 else (len(times),):
        found = _insertions(few, more, num)
        if found:
            parts, end = [], 0
            for (position, block), count in zip(found, times):
                parts += [few[end:position], *[block] * count]
                end = position
            return np.concatenate([*parts, few[end:]]), _start(few, *found[0])
    return None


def extended_in_turn(
    few: np.ndarray, more: Sequence[np.ndarray], times: Sequence[int]
) -> tuple[np.ndarray, int] | None:
    """As `extended`, of one array more for each block, in which only that block is once more."""
    inserted = []
    for longer, count in zip(more, times, strict=True):
        found = [] if np.array_equal(few, longer) else _insertions(few, longer, 1)
        if found is None:
            return None
        inserted += [(position, block, count) for position, block in found]
    parts, end = [], 0
    for position, block, count in sorted(inserted, key=lambda one: one[0]):
        parts += [few[end:position], *[block] * count]
        end = position
    start = min((_start(few, position, block) for position, block, _ in inserted), default=0)
    return np.concatenate([*parts, few[end:]]), start


def _insertions(few: np.ndarray, more: np.ndarray, num: int) -> list[tuple[int, np.ndarray]] | None:
    """(position in `few`, block) of `num` blocks, each equal to what stands before it, with which `few` is `more`."""
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
    """With so many bytes more for a moment where there are most behind `start`: no gradient of a copy is there
    before.
    """
    if not num_bytes or start >= len(changes):
        return changes
    most = start + int(np.argmax(np.cumsum(changes)[start:])) + 1
    return np.concatenate([changes[:most], [num_bytes, -num_bytes], changes[most:]])


def _ordered(phase: str, times: tuple[int, ...]) -> tuple[int, ...]:
    return times[::-1] if any(kind in phase for kind in _BACKWARD) else times


@dataclass(frozen=True)
class _Few:
    """A graph, and the repeats in it of which copies can be left out. bucket_bytes: what reducing a bucket of gradients
    of several copies takes at most.
    """

    graph: Graph
    assignment: Assignment
    repeats: tuple[Repeat, ...]
    bucket_bytes: int

    @property
    def times(self) -> tuple[int, ...]:
        """How many copies of each `part` lacks, in graph order."""
        return tuple(repeat.count - _NUM_RUN for repeat in self.repeats)

    @property
    def num_ops_in_turn(self) -> int:
        """Ops of the parts with one copy more of one repeat each."""
        return sum(len(self.part(number)[0].ops) for number in range(len(self.repeats)))

    def part(self, *longer: int) -> tuple[Graph, Assignment]:
        """`_NUM_RUN` copies of each repeat, and one more of those with these numbers."""
        short = drop_copies(
            self.graph, self.repeats, [_NUM_RUN + (number in longer) for number in range(len(self.repeats))]
        )
        return short, self.assignment.restricted(short)


def _few_of(graph: Graph, assignment: Assignment, mesh: Mesh) -> _Few | None:
    """None where no copies can be left out, or too few to gain by it."""
    # the program is the same wherever that is
    folded = as_planned(fold(graph), graph, replace(assignment, state_on_host=frozenset()))
    long = droppable(graph, [repeat for repeat in folded.repeats if repeat.count > _NUM_RUN + 1], _NUM_RUN)
    found = _Few(graph, assignment, long, 0)
    (few, _), (more, assigned) = found.part(), found.part(*range(len(long)))
    for left in ({op.name for op in short.ops} for short in (few, more)):
        if any(0 < len(left.intersection(region)) < len(region) for region in assignment.regions):
            return None
    if not long or len(few.ops) + len(more.ops) >= len(graph.ops):
        return None
    return replace(found, bucket_bytes=_bucket_bytes(graph, long, conversions(more, assigned), mesh))


def _bucket_bytes(graph: Graph, repeats: Sequence[Repeat], found: dict[str, tuple[Conversion, ...]], mesh: Mesh) -> int:
    """What reducing the largest bucket takes: its gradients in one tensor, and their sum; 0 if no bucket has those of
    several copies.
    """
    position = {op.name: number for number, op in enumerate(graph.ops)}
    copies, most = {}, 0
    for number, repeat in enumerate(repeats):
        first, block = position[repeat.ops[0]], len(repeat.ops)
        copies |= {
            op.name: (number, at // block) for at, op in enumerate(graph.ops[first : first + block * repeat.count])
        }
    kinds: defaultdict[tuple, list[Conversion]] = defaultdict(list)
    for bucket in buckets(found):
        if bucket[0].is_bucketed and bucket[0].latency_share < 1:  # a gradient that fills a bucket is reduced alone
            kinds[bucket[0].value.dtype, bucket[0].src, bucket[0].dst].extend(bucket)
    for members in kinds.values():
        if len({copies.get(use.user) for one in members for use in one.uses}) > 1:
            split = math.prod(local_shape(members[0].value.shape, members[0].src, mesh.shape)) / math.prod(
                members[0].value.shape
            )
            largest = max(one.value.num_bytes for one in members)
            most = max(most, math.ceil(2 * split * (BUCKET_BYTES + largest)))
    return most
