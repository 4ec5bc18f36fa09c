"""Weights of paths through backward, under which a table of sums gives lower bounds of plans with overlap."""

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costmodel.overlap.backward_lanes import BySeconds, Handover
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph


@dataclass(frozen=True)
class PathWeights:
    """Weights of paths through backward: from each run of ops on along a lane, and along compute to the end.

    A run is an op, or the copies of blocks whose ops are alike: within it a path stays where it is, so that all members
    of a class have one weight. `run_of`: representative op -> its run, in the order of backward; `several`: runs of
    more than one op, of which a path leaves compute behind the last; `leaving[run][lane]`: the weight of paths that
    leave compute there. Other paths stay. `overlap`: as of the cluster.
    """

    run_of: Mapping[str, int]
    several: frozenset[int]
    leaving: tuple[Mapping[int, float], ...]
    overlap: float

    def at(self, run: int) -> "RunWeights":
        """The weights of the work of a run; all 1 of `IN_TURN`."""
        before: BySeconds = {}
        for leaving in self.leaving[:run]:
            for lane, weight in leaving.items():
                before[lane] = before.get(lane, 0.0) + weight
        return RunWeights(
            tuple(sorted(before.items())),
            () if run in self.several or not self.leaving else tuple(sorted(self.leaving[run].items())),
            self.overlap,
        )


@dataclass(frozen=True, slots=True)
class RunWeights:
    """The weights of paths in a run, as (lane, weight).

    `before`: of those that follow the lane already; `leaving`: of those that leave compute for it at this op.
    `overlap`: as of the cluster, 0 where nothing is put off.
    """

    before: tuple[tuple[int, float], ...] = ()
    leaving: tuple[tuple[int, float], ...] = ()
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


# All of backward in turn.
IN_TURN = PathWeights({}, frozenset(), (), 0.0)


@dataclass(frozen=True)
class Paths:
    """Paths with their weights, of sum 1: where each leaves compute, None where it never does.

    `overlap`: as of the cluster.
    """

    overlap: float
    shares: tuple[tuple[Handover | None, float], ...] = ((None, 1.0),)

    @property
    def is_trivial(self) -> bool:
        """Whether the only path is along compute."""
        return all(handover is None for handover, _ in self.shares)

    def towards(self, other: "Paths", step: float) -> "Paths":
        """The weights between these (`step` 0) and those of `other` (1)."""
        mixed: dict[Handover | None, float] = {}
        for shares, factor in ((self.shares, 1 - step), (other.shares, step)):
            for handover, share in shares:
                mixed[handover] = mixed.get(handover, 0.0) + factor * share
        return Paths(self.overlap, tuple(mixed.items()))

    def weights(self, graph: Graph, folded: Folded) -> PathWeights:
        """Their weights in the runs; within a run of several ops a path leaves at the nearer end."""
        runs, same = _runs(graph, folded), folded.representative
        number = {position: number for number, run in enumerate(runs) for position in run}
        leaving: list[BySeconds] = [{} for _ in runs]
        for handover, share in self.shares:
            if handover is not None:
                at = number[handover.position]
                at -= bool(at) and _is_near_start(runs[at], handover.position)
                leaving[at][handover.lane] = leaving[at].get(handover.lane, 0.0) + share
        run_of = {op.name: number[at] for at, op in enumerate(graph.ops) if same[op.name] == op.name}
        several = frozenset(at for at, run in enumerate(runs) if len(run) > 1)
        return PathWeights(run_of, several, tuple(leaving), self.overlap)


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
