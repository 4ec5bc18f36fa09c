"""The time of a pass, forward or backward, whose parameters' collectives go on beside compute, and bounds of it.

A pass runs on lanes: compute, and one for each link level. Compute and the collectives that it waits for follow one
another in the order of the program. The others take turns on the lane of the outermost link level that a group spans:

* the gather of a prefetched bucket, started where the one before arrives; compute waits for it where it is used;
* the reduction of such a bucket's gradients, started when the last of them is computed; the next one waits for its end;
* other reductions, which the end of the pass waits for.

A collective that compute waits for goes first, and delays what is on its lane. While others are under way, compute
loses 1 - `Cluster.overlap` of their seconds.

So a pass takes no less than a path: in backward along compute up to an op, and along a lane from there to the end; in
forward along a lane up to an op, and along compute from there. Or along compute throughout. For weights of such paths
that sum to 1, the weighted sum of their lengths is at most the time, for every plan, and a sum over its choices
(`path_weights.PathWeights`): what the exact search of such sums finds is a lower bound for plans with overlap.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.training import Training

# Lane -> seconds.
BySeconds = dict[int, float]


def has_overlap(cluster: Cluster, training: Training) -> bool:
    """Whether all of parameters' collectives go on beside compute, gathers ahead too: of one whole batch."""
    return cluster.overlap > 0 and not training.is_split


def ends_with_overlap(cluster: Cluster, training: Training) -> bool:
    """Whether the last of several microbatches, or of a stage, has the reductions of the step beside its backward.

    Where weight gradients are put off, they begin behind it.
    """
    return cluster.overlap > 0 and training.is_split and not training.num_waiting


@lru_cache(maxsize=2**12)
def lane_of(levels: tuple[LinkLevel, ...], mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """The lane of collectives on mesh axes `axes`: the number of the outermost link level that a group spans.

    >>> levels = LinkLevel(8, 1e-6, 1e11), LinkLevel(0, 1e-5, 1e10)
    >>> lane_of(levels, (4, 8), (1,)), lane_of(levels, (4, 8), (0,)), lane_of(levels, (3, 6), (1,))
    (0, 1, 1)
    """
    num_devices = math.prod(mesh_shape)
    others = [axis for axis in range(len(mesh_shape)) if axis not in axes]
    ranks = np.arange(num_devices).reshape(mesh_shape).transpose([*others, *axes])
    groups = ranks.reshape(-1, math.prod(mesh_shape[axis] for axis in axes))
    sizes = np.cumprod([level.size or num_devices for level in levels])
    within = (number for number, size in enumerate(sizes) if (groups // size == groups[:, :1] // size).all())
    return next(within, len(levels) - 1)


@dataclass(slots=True)
class AtOp:
    """The work of a pass at an op: seconds of compute, and of collectives by lane.

    `blocking`: those that compute waits for; `put_off`: reductions of gradients that are complete after this op;
    `reduced`: those of prefetched buckets; `gathered`: prefetched ones that the op needs.
    """

    compute_s: float = 0.0
    blocking: BySeconds = field(default_factory=dict)
    put_off: BySeconds = field(default_factory=dict)
    reduced: BySeconds = field(default_factory=dict)
    gathered: BySeconds = field(default_factory=dict)

    @property
    def along_s(self) -> float:
        """Seconds of compute and of what it waits for."""
        return self.compute_s + sum(self.blocking.values())

    @property
    def in_turn_s(self) -> float:
        """Seconds of all of it, one after the other."""
        return self.along_s + sum(sum(kind.values()) for kind in (self.put_off, self.reduced, self.gathered))


@dataclass(frozen=True, slots=True)
class Handover:
    """The op, by its position in the graph, at which the longest path changes between compute and `lane`.

    The position behind the last op is the start of backward.
    """

    position: int
    lane: int


@dataclass(frozen=True)
class PassCost:
    """A pass over the graph: the work at each op, in the order of the graph, which backward runs from its end.

    `overlap`: as of the cluster.
    """

    ops: tuple[AtOp, ...] = ()
    overlap: float = 0.0
    is_backward: bool = False

    @property
    def hidden_s(self) -> float:
        """Seconds of collectives that go on while others, or compute, do."""
        return self._in_turn_s - self.time_s

    @property
    def _in_turn_s(self) -> float:
        return sum(at.in_turn_s for at in self.ops)

    @cached_property
    def time_s(self) -> float:
        """Seconds of the pass, at most those of all in turn."""
        clock = self._run(_Clock(self.overlap))
        return min(self._in_turn_s, max([clock.now_s, *clock.lanes.values()]))

    @property
    def spans(self) -> list["LaneSpan"]:
        """The times of its ops and collectives, on each lane."""
        spans: list[LaneSpan] = []
        self._run(_SpanClock(self.overlap, spans))
        return spans

    def _run(self, clock: "_Clock") -> "_Clock":
        gathered = [at.gathered for _, at in self._in_order() if at.gathered]
        following = iter([*gathered[1:], {}])
        ready: BySeconds | None = None
        reduced: BySeconds = {}
        for clock.position, at in self._in_order():
            if at.gathered:
                ends = clock.start(at.gathered, "gather") if ready is None else ready
                clock.wait(ends, sum(at.gathered.values()))
                ready = clock.start(next(following), "gather ahead")
            clock.compute(at.compute_s)
            for lane, time_s in at.blocking.items():
                clock.block(lane, time_s, (ready or {}, reduced))
            if at.reduced:
                clock.wait(reduced)
                reduced = clock.start(at.reduced, "reduction")
                clock.now_s += (1 - self.overlap) * sum(at.reduced.values())
            for lane, time_s in at.put_off.items():
                clock.start({lane: time_s}, "reduction")
                clock.now_s += (1 - self.overlap) * time_s
        return clock

    def _in_order(self) -> Iterator[tuple[int, AtOp]]:
        numbered = list(enumerate(self.ops))
        return reversed(numbered) if self.is_backward else iter(numbered)

    @cached_property
    def handover(self) -> Handover | None:
        """Where the longest path changes between compute and a lane; None if it is along compute throughout."""
        longest, longest_s = None, self.length_s(None)
        for lane in sorted({lane for at in self.ops for lane in _summed(at.put_off, at.reduced, at.gathered)}):
            lengths = self._lengths(lane)
            position = int(lengths.argmax())
            if lengths[position] > longest_s:
                longest, longest_s = Handover(position, lane), float(lengths[position])
        return longest

    def length_s(self, handover: Handover | None) -> float:
        """Seconds along a path."""
        if handover is not None:
            return float(self._lengths(handover.lane)[handover.position])
        kinds = (kind for at in self.ops for kind in (at.put_off, at.reduced, at.gathered))
        beside_s = sum(sum(kind.values()) for kind in kinds)
        return sum(at.along_s for at in self.ops) + (1 - self.overlap) * beside_s

    @cached_property
    def _known_lengths(self) -> dict[int, np.ndarray]:
        return {}

    def _lengths(self, lane: int) -> np.ndarray:
        """f64[ops + 1]: seconds of the path that changes between compute and `lane` at each position."""
        if lane not in self._known_lengths:
            size, loss = len(self.ops) + 1, 1 - self.overlap
            along, lost, own, on_lane, gathers, lost_by_gathers = np.zeros((6, size))
            for position, at in enumerate(self.ops):
                beside = _summed(at.put_off, at.reduced)
                along[position], lost[position] = at.along_s, loss * sum(beside.values())
                own[position] = beside.get(lane, 0.0)
                on_lane[position] = own[position] + at.blocking.get(lane, 0.0)
            for started, needed, gather in self._gathers():
                gathers[started] += gather.get(lane, 0.0)
                lost_by_gathers[needed] += loss * sum(gather.values())
            on_compute = along + _after(along + lost + lost_by_gathers)
            self._known_lengths[lane] = on_compute + own + np.cumsum(on_lane) - on_lane + np.cumsum(gathers)
        return self._known_lengths[lane]

    def _gathers(self) -> Iterator[tuple[int, int, BySeconds]]:
        """(first position of a handover that has it on its lane, first position of one that has not, gather).

        In forward a path follows a lane until compute needs what is gathered. In backward it may leave compute when a
        gather is started, behind the op before the one that needs the previous gather.
        """
        needed = [position for position, at in enumerate(self.ops) if at.gathered]
        if not self.is_backward:
            yield from ((position, position, self.ops[position].gathered) for position in needed)
            return
        needed = needed[::-1]
        for previous, position in zip([*needed[:1], *needed], needed):
            yield previous + 1, position + 1, self.ops[position].gathered


class _Clock:
    """The time along compute, and when each lane has done what was started on it."""

    def __init__(self, overlap: float) -> None:
        self.now_s, self.overlap = 0.0, overlap
        self.lanes: BySeconds = {}
        self.position = 0  # of the op

    def compute(self, time_s: float) -> None:
        self.now_s += time_s

    def start(self, collective: BySeconds, what: str) -> BySeconds:
        """Start a collective; lane -> when it has ended."""
        for lane, time_s in collective.items():
            self.lanes[lane] = max(self.lanes.get(lane, 0.0), self.now_s) + time_s
        return {lane: self.lanes[lane] for lane in collective}

    def wait(self, ends: BySeconds, beside_s: float = 0.0) -> None:
        """Wait until a collective has ended that went on beside compute for `beside_s`."""
        self.now_s = max([self.now_s + (1 - self.overlap) * beside_s, *ends.values()])

    def block(self, lane: int, time_s: float, others: Sequence[BySeconds]) -> None:
        """A collective that compute waits for."""
        self.now_s += time_s
        for ends in (self.lanes, *others):
            if lane in ends:
                ends[lane] += time_s


@dataclass(slots=True)
class LaneSpan:
    """Seconds, from the start of a pass, of the op at `position` on compute, lane None, or of a collective for it."""

    lane: int | None
    position: int
    what: str
    start_s: float
    end_s: float


class _SpanClock(_Clock):
    """A clock that notes a span of whatever it times."""

    def __init__(self, overlap: float, spans: list[LaneSpan]) -> None:
        super().__init__(overlap)
        self.spans = spans

    def compute(self, time_s: float) -> None:
        self.spans.append(LaneSpan(None, self.position, "compute", self.now_s, self.now_s + time_s))
        super().compute(time_s)

    def start(self, collective: BySeconds, what: str) -> BySeconds:
        ends = super().start(collective, what)
        for lane, time_s in collective.items():
            self.spans.append(LaneSpan(lane, self.position, what, ends[lane] - time_s, ends[lane]))
        return ends

    def block(self, lane: int, time_s: float, others: Sequence[BySeconds]) -> None:
        for span in self.spans:
            if span.lane == lane and span.end_s > self.now_s:  # it is delayed
                span.start_s += time_s if span.start_s >= self.now_s else 0.0
                span.end_s += time_s
        self.spans.append(LaneSpan(lane, self.position, "collective", self.now_s, self.now_s + time_s))
        super().block(lane, time_s, others)


def _summed(*kinds: BySeconds) -> BySeconds:
    """Lane -> seconds of all kinds."""
    total: BySeconds = {}
    for kind in kinds:
        for lane, time_s in kind.items():
            total[lane] = total.get(lane, 0.0) + time_s
    return total


def _after(values: np.ndarray) -> np.ndarray:
    """f64, the sum of the values behind each position."""
    return np.cumsum(values[::-1])[::-1] - values
