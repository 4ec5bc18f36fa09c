"""Weights of paths through both passes, under which a table of sums gives lower bounds of plans with overlap."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.costmodel.overlap.pass_time import BySeconds, Handover
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph


@dataclass(frozen=True)
class PathWeights:
    """Weights of paths through a pass: from each run of ops on along a lane, and along compute throughout.

    The order is that of backward, which forward is seen in, too: from its end along compute, then along a lane.
    A run is an op, or the copies of blocks whose ops are alike: within it a path stays where it is, so that all members
    of a class have one weight. `run_of`: representative op -> its run; `several`: runs of more than one op, of which a
    path leaves compute behind the last; `copies[run]`: the least number of members of a class; `leaving[run][lane]`:
    the weight of paths that leave compute there; `throughout[lane]`: of those along a lane from the start. Others stay.
    `overlap`: as of the cluster.
    """

    run_of: Mapping[str, int]
    several: frozenset[int]
    copies: tuple[int, ...]
    leaving: tuple[Mapping[int, float], ...]
    throughout: Mapping[int, float]
    overlap: float
    is_backward: bool

    def at(self, run: int) -> "RunWeights":
        """The weights of the work of a run; all 1 where there is no overlap."""
        if not self.leaving:
            return RunWeights()
        before: BySeconds = dict(self.throughout)
        for leaving in self.leaving[:run]:
            for lane, weight in leaving.items():
                before[lane] = before.get(lane, 0.0) + weight
        copies = self.copies[run]
        leaving = {} if run in self.several else self.leaving[run]
        started = {
            lane: (copies - 1) / copies * weight + self.throughout.get(lane, 0.0) / copies
            for lane, weight in before.items()
        }
        in_turn = _items(before), _items(leaving)
        return RunWeights(*in_turn, _items(started) if self.is_backward else None, self.overlap)


def _items(weights: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(weights.items()))


@dataclass(frozen=True, slots=True)
class RunWeights:
    """The weights of paths in a run, as (lane, weight).

    `before`: of those that follow the lane already; `leaving`: of those that leave compute for it at this op;
    `started`: of those that follow it when what this run needs is gathered again in backward, which in the first of
    several copies, and for an op by itself, may be any time before. `overlap`: as of the cluster, 0 where nothing is
    put off.
    """

    before: tuple[tuple[int, float], ...] = ()
    leaving: tuple[tuple[int, float], ...] = ()
    started: tuple[tuple[int, float], ...] | None = None
    overlap: float = 0.0

    @property
    def compute(self) -> float:
        """Of compute."""
        return 1.0 - sum(weight for _, weight in self.before)

    def blocking(self, lane: int) -> float:
        """Of a collective that compute waits for."""
        return self.compute + dict(self.before).get(lane, 0.0)

    def put_off(self, lane: int) -> float:
        """Of a reduction: paths on its lane take all of it, those on compute what it takes of compute."""
        leaving = dict(self.leaving)
        stays = self.compute - sum(leaving.values())
        return dict(self.before).get(lane, 0.0) + leaving.get(lane, 0.0) + (1 - self.overlap) * stays

    def gathered(self, lane: int) -> float:
        """Of the gather of a prefetched bucket."""
        if self.started is None:
            return self.put_off(lane)
        return dict(self.started).get(lane, 0.0) + (1 - self.overlap) * self.compute


@dataclass(frozen=True, slots=True)
class MicrobatchWeights:
    """The weights of what a device does in each microbatch: of `weight_gradients`, and of `others`; and of the
    reductions of gradients once a step.
    """

    others: float = 1.0
    weight_gradients: float = 1.0
    reductions: float = 1.0


@dataclass(frozen=True)
class StepWeights:
    """The weights of paths through both passes; `microbatch`: of paths through the stages of a pipeline."""

    forward: PathWeights
    backward: PathWeights
    microbatch: MicrobatchWeights = MicrobatchWeights()

    def at(self, run: int) -> "BothWeights":
        """The weights of the work of a run in both."""
        return BothWeights(self.forward.at(run), self.backward.at(run), self.microbatch)

    def of(self, op: str) -> "BothWeights":
        """The weights at a representative op."""
        return self.at(self.backward.run_of.get(op, 0))


@dataclass(frozen=True, slots=True)
class BothWeights:
    """The weights of paths in a run of both passes."""

    forward: RunWeights = RunWeights()
    backward: RunWeights = RunWeights()
    microbatch: MicrobatchWeights = MicrobatchWeights()

    @property
    def is_in_turn(self) -> bool:
        """Whether both passes do all in turn."""
        return self.forward == self.backward == RunWeights()


# All in turn.
IN_TURN = StepWeights(
    PathWeights({}, frozenset(), (), (), {}, 0.0, is_backward=False),
    PathWeights({}, frozenset(), (), (), {}, 0.0, is_backward=True),
)

# Where the path through a pass changes between compute and a lane, None if it never does -> its share.
Shares = Mapping[Handover | None, float]


@dataclass(frozen=True)
class Paths:
    """Paths through forward and through backward with their shares, of sum 1 each.

    `overlap`: as of the cluster.
    """

    overlap: float
    forward: Shares = field(default_factory=lambda: {None: 1.0})
    backward: Shares = field(default_factory=lambda: {None: 1.0})

    @property
    def is_trivial(self) -> bool:
        """Whether the only path is along compute."""
        return all(handover is None for handover in (*self.forward, *self.backward))

    def towards(self, other: "Paths", step: float) -> "Paths":
        """The shares between these (`step` 0) and those of `other` (1)."""
        return Paths(
            self.overlap, _mixed(self.forward, other.forward, step), _mixed(self.backward, other.backward, step)
        )

    def weights(self, graph: Graph, folded: Folded) -> StepWeights:
        """Their weights in the runs; within a run of several copies a path changes at the nearer end."""
        runs, same = _runs(graph, folded), folded.representative
        number = {position: number for number, run in enumerate(runs) for position in run}
        run_of = {op.name: number[at] for at, op in enumerate(graph.ops) if same[op.name] == op.name}
        names = [op.name for op in graph.ops]
        copies = tuple(min(Counter(same[names[position]] for position in run).values()) for run in runs)
        several = frozenset(at for at, run in enumerate(runs) if len(run) > 1)

        def weights(shares: Shares, *, is_backward: bool) -> PathWeights:
            leaving: list[BySeconds] = [{} for _ in runs]
            throughout: BySeconds = {}
            for handover, share in shares.items():
                if handover is None:
                    continue
                at = number.get(handover.position, -1)
                at -= at >= 0 and _is_near_start(runs[at], handover.position)
                weights = leaving[at] if at >= 0 else throughout
                weights[handover.lane] = weights.get(handover.lane, 0.0) + share
            return PathWeights(run_of, several, copies, tuple(leaving), throughout, self.overlap, is_backward)

        return StepWeights(weights(self.forward, is_backward=False), weights(self.backward, is_backward=True))


def _mixed(here: Shares, there: Shares, step: float) -> Shares:
    mixed: dict[Handover | None, float] = {}
    for shares, factor in ((here, 1 - step), (there, step)):
        for handover, share in shares.items():
            mixed[handover] = mixed.get(handover, 0.0) + factor * share
    return mixed


def _is_near_start(run: range, position: int) -> bool:
    """Whether a position is in the first half of a run of several, of which backward begins with the last op."""
    return len(run) > 1 and run.stop - position <= position - run.start


def _runs(graph: Graph, folded: Folded) -> list[range]:
    """The positions of each run, in the order of backward."""
    last = {folded.representative[op.name]: position for position, op in enumerate(graph.ops)}
    starts, end = list[int](), -1
    for position, op in enumerate(graph.ops):
        if position > end:
            starts.append(position)
        end = max(end, last[folded.representative[op.name]])
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(graph.ops)])][::-1]
