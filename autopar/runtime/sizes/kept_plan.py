"""`KeptPlan`: a plan that calls of other sizes keep, as long as planning anew cannot pay."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from typing import Protocol

from autopar.errors import AutoparError
from autopar.ir.graph import Graph, Value
from autopar.plans.choices import Choices
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.placement import Layout, format_layout, is_even, local_shape

CLOSE = 0.05  # a plan is kept where one that is made anew takes no less than this share less
# Planning anew is said to take at least this long: a plan that was read from a file took no time.
LEAST_PLANNING_S = 1.0
MOST_PREDICTED = 8  # choices for other sizes whose predicted peak is remembered

Shapes = tuple[tuple[int, ...], ...]  # of the tensors of a call


class CallPlanner(Protocol):
    """A planner that every rank calls alike, and that gives every rank the same."""

    def __call__(
        self, graph: Graph, fixed: dict[str, str], trains: bool, outputs: Mapping[str, Layout]
    ) -> Plan | StagedPlan:
        """The plan of `graph`. `fixed`: layouts of parameters that are laid out already. `trains`: it is for
        `train_step`. `outputs`: layouts of outputs.
        """
        ...

    def peaks(self, plan: Plan) -> tuple[int, ...]:
        """The predicted peak of a plan."""
        ...


@dataclass
class KeptPlan:
    """A plan, and the sizes of calls for which it is known to be as fast as one that is made for them.

    `ranges`: sizes (least, most) between the calls that it was made for, or compared with a plan made anew. A call of
    other sizes runs under it too. How much faster a plan made anew would be is not known then; it is at most the
    predicted time of the call. Once that adds up to what planning takes, a plan is made for these sizes. So the time
    lost is at most twice what it would be if the sizes of all calls were known beforehand.
    """

    plan: Plan
    shapes: Shapes  # of the call that it was made for
    planning_s: float  # the same on every rank
    least: tuple[int, ...]
    most: tuple[int, ...]
    lost_s: float = 0.0
    predicted: list[tuple[Choices, int]] = field(default_factory=list)  # for other sizes, with their peaks

    @classmethod
    def of(cls, plan: Plan, shapes: Shapes, planning_s: float) -> "KeptPlan":
        return cls(plan, shapes, max(planning_s, LEAST_PLANNING_S), _flat(shapes), _flat(shapes))

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The predicted peak; () if nobody predicted it here."""
        return () if self.plan.is_from_file else self.plan.peak_bytes

    def covers(self, shapes: Shapes) -> bool:
        """Whether calls of these shapes lie between those that it is known to be good for; of as many samples a cache
        may have any length.
        """
        if self.plan.graph.carried and [shape[:1] for shape in shapes] == [shape[:1] for shape in self.shapes]:
            return True
        return all(low <= size <= high for low, size, high in zip(self.least, _flat(shapes), self.most, strict=True))

    def widen(self, shapes: Shapes) -> None:
        """It is as good as a plan made for these shapes; affine times are so between two sizes where they are."""
        self.least = tuple(map(min, self.least, _flat(shapes)))
        self.most = tuple(map(max, self.most, _flat(shapes)))
        self.lost_s = 0.0

    def choices_for(
        self, graph: Graph, stored: Mapping[str, str], outputs: Mapping[str, Layout], planner: CallPlanner
    ) -> Choices | None:
        """The choices for a graph of the same model with other sizes.

        None if there is none, if it does not fit, or if it has other layouts than parameters and outputs must have.
        `stored`: FQN -> layout of what lies on the mesh already.
        """
        try:
            choices = Choices.of(self.plan, graph)
        except (AutoparError, ValueError):
            return None
        layouts = choices.assignment.layouts
        lying = ((item.fqn, layouts[item.value.name]) for item in graph.inputs if item.fqn in stored)
        if any(format_layout(layout) != stored[fqn] for fqn, layout in lying):
            return None
        if any(choices.assignment.outputs[name] != layout for name, layout in outputs.items()):
            return None
        return choices if self._fits(choices, planner) else None

    def _fits(self, choices: Choices, planner: CallPlanner) -> bool:
        """Whether the peak of `choices` is within the limit, as a known one times what tensors grow by says.

        Squared, since an op may have tensors inside that grow twice as much as its outputs, such as scores; parts that
        differ grow by rounding besides. The peak is predicted only where that is too much.
        """
        limit, rounding = self.plan.memory_limit_bytes, _rounding(choices)
        for graph, peak_bytes in self._known_peaks(choices):
            if peak_bytes * (rounding * _growth(graph, choices.graph)) ** 2 <= limit:
                return True
        peak_bytes = max(planner.peaks(choices.plan))
        self.predicted = [*self.predicted, (choices, peak_bytes)][-MOST_PREDICTED:]
        return peak_bytes <= limit

    def _known_peaks(self, choices: Choices) -> Iterator[tuple[Graph, float]]:
        """Graphs that run under the same choices or the plan's, each with a bound of its peak under `choices`.

        What does not divide lies whole where the plan splits it, as many times as large as there are devices at most,
        and is converted on the way to an op that splits it.
        """
        yield from ((each.graph, peak) for each, peak in self.predicted if each.assignment == choices.assignment)
        peak_bytes = max(self.peak_bytes, default=self.plan.memory_limit_bytes)
        yield self.plan.graph, peak_bytes * (1 if choices.has_known_assignment else 2 * self.plan.mesh.num_devices)


@dataclass
class Trial:
    """Calls of these `shapes` that run under `choices`, which are those of a kept plan."""

    kept: KeptPlan
    choices: Choices
    shapes: Shapes

    @cached_property
    def call_s(self) -> float:
        """About the predicted time of a call: that of the kept plan times what its tensors grow by together."""
        before, after = (sum(x.num_bytes for x in _values(each)) for each in (self.kept.plan.graph, self.choices.graph))
        return self.kept.plan.step_s * after / max(before, 1)

    def is_over(self) -> bool:
        """Count a call; whether it is time to plan for these sizes."""
        if self.kept.covers(self.shapes):
            return False
        self.kept.lost_s += self.call_s
        return self.kept.lost_s > self.kept.planning_s


def _rounding(choices: Choices) -> float:
    """The most that the first rank's part of a tensor is larger than its share: 1 where all parts are equal."""
    assignment, mesh_shape = choices.assignment, choices.mesh.shape
    placed = [(item.value.shape, assignment.layouts[item.value.name]) for item in choices.graph.inputs]
    for op in choices.graph.ops:
        strategy = assignment.strategies[op.name]
        placed += [(x.shape, strategy.input_layout(i)) for i, x in enumerate(op.inputs)]
        placed += [(x.shape, strategy.output_layout(i)) for i, x in enumerate(op.outputs)]
    return max((_excess(*each, mesh_shape) for each in dict.fromkeys(placed)), default=1.0)


def _excess(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> float:
    if is_even(shape, layout, mesh_shape) or not prod(shape):
        return 1.0
    num_parts = prod(size for placement, size in zip(layout, mesh_shape) if placement.is_split)
    return prod(local_shape(shape, layout, mesh_shape)) * num_parts / prod(shape)


def _growth(before: Graph, after: Graph) -> float:
    """The most that a tensor grows by; inf if the graphs differ in more than sizes, as those of a size of 1 may."""
    olds, news = _values(before), _values(after)
    if len(olds) != len(news):
        return inf
    return max([1.0, *(new.num_bytes / old.num_bytes for old, new in zip(olds, news) if old.num_bytes)])


def _values(graph: Graph) -> list[Value]:
    return [item.value for item in graph.inputs] + [value for op in graph.ops for value in op.outputs]


def _flat(shapes: Shapes) -> tuple[int, ...]:
    return tuple(size for shape in shapes for size in shape)
