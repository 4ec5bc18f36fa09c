"""The search tasks of the stages of a rank, and the plans that solve them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from autopar.costmodel.activations.saved_activations import Regions
from autopar.costmodel.evaluate import Costs
from autopar.costmodel.training import Training
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph
from autopar.planner.pipeline.equal_stages import renamed, requested_of
from autopar.planner.request import PlanRequest
from autopar.sbp.assignment import Assignment
from autopar.search.table import CostTable, Edge


@dataclass(frozen=True, eq=False)
class Wanted:
    """The search task of one stage.

    `number`: of the stage. `wiring`: equal for isomorphic stages. `regions`: all blocks that may be recomputed;
    `most_saved`: the number of them that the hand plan recomputes.
    """

    number: int
    graph: Graph
    wiring: int
    request: PlanRequest
    regions: Regions
    most_saved: int

    @cached_property
    def key(self) -> Any:
        """A key that is equal for stages that differ only in what is in flight."""
        return self.wiring, requested_of(self.graph, self.request)

    @property
    def num_saved(self) -> int:
        """The number of blocks that are recomputed or offloaded."""
        return len(self.request.given.recomputed or self.request.given.offloaded)


Stages = tuple[Wanted, ...]  # of one rank


def key_of(stages: Stages) -> Any:
    """A key that is equal for ranks whose stages differ only in what is in flight."""
    return tuple(one.key for one in stages)


def pressure_of(trainings: Iterable[Training], limit_bytes: float) -> float:
    """The pressure on memory: the number of microbatches that keep tensors, for each byte of the limit."""
    return sum(one.num_in_flight + one.num_waiting for one in trainings) / limit_bytes


def side_by_side(tables: Sequence[CostTable], limit_bytes: float) -> CostTable:
    """The tables as one table, which share the memory limit only."""
    nodes, edges = [], []
    for table in tables:
        edges += [
            Edge(edge.a + len(nodes), edge.b + len(nodes), edge.cost_s, edge.memory_bytes) for edge in table.edges
        ]
        nodes += table.nodes
    return CostTable(tuple(nodes), tuple(edges), limit_bytes)


@dataclass(frozen=True, eq=False)
class StagePlans:
    """Plans of the stages of a rank, searched under such a `pressure`. is_free: the limit does not make them slower.
    is_short: memory costs more in them than to have optimizer state on the host. is_searched: not as they are by hand.
    lower_bound_s: no plans that were searched take less. memory_bytes: of the device, all together; costs: of the
    parts; NaN and () if nobody asked. share: of the copies of each segment, as they are in a group of their own.
    first: the assignments of the stages that were searched, of which the parts' are renamed; () for these.
    """

    parts: tuple[tuple[Graph, Assignment], ...]
    cost_s: float
    pressure: float = 0.0
    is_free: bool = False
    is_short: bool = False
    is_searched: bool = True
    lower_bound_s: float = 0.0
    memory_bytes: float = math.nan
    costs: tuple[Costs, ...] = ()
    share: float | None = None
    first: tuple[Assignment, ...] = ()

    def of_others(self, stages: Stages) -> "StagePlans":
        """The same for stages alike."""
        pairs = zip(self.parts, stages)
        parts = tuple((one.graph, renamed(own, like, one.graph)) for (like, own), one in pairs)
        first = self.first or tuple(own for _, own in self.parts)
        return replace(self, parts=parts, memory_bytes=math.nan, costs=(), first=first)


def segments(folded: Folded, num_saved: int) -> tuple[tuple[int, ...], ...]:
    """First, inner and last copies apart, and those that are recomputed or
    offloaded, which are the first, from those that are not.
    """
    lengths = []
    for repeat in folded.repeats:
        again = min(num_saved, repeat.count)
        num_saved -= again
        ends = sorted({0, 1, again, repeat.count - 1, repeat.count})
        lengths.append(tuple(b - a for a, b in pairwise(ends)))
    return tuple(lengths)
