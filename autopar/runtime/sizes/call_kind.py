"""`CallKind`: what is shared by calls that differ in the sizes of their tensors alone."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.ir.export.run_export import DynamicDims
from autopar.ir.graph import Graph
from autopar.ir.sizes.same_names import is_of_other_sizes, named_like
from autopar.ir.sizes.sized_trace import SizedTrace
from autopar.ir.trace_with_loss import check_alike, recorded, traced, traced_for_sizes
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.call_key import tell_time_of_another, tell_time_of_trace
from autopar.runtime.load_program import Loaded
from autopar.runtime.sizes.kept_plan import CLOSE, CallPlanner, KeptPlan, Shapes, Trial
from autopar.runtime.sizes.sized_program import NUM_COMPARED, MadeProgram, SizedProgram, sized_program
from autopar.sbp.placement import Layout
from autopar.torch_compat import pytree

MOST_PLANS = 8
MOST_TRACES = 4  # for ranges of sizes: a model that decides by more sizes is traced for each
# Sizes whose forward is recorded, before the model is traced for a range of them: that takes as long as about twenty
# recordings, and is the way to one program for all sizes.
MOST_RECORDED = 8
LONG_TRACE_S = 2.0  # a trace for other sizes that takes longer is told
Examples = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class CallKind:
    """The traces and plans of calls that differ in the sizes of their tensors alone.

    `first`: shapes of the first of them; a dim that differs from it in a later call is dynamic in traces from then on.
    `reads_grad_mode`: whether a trace asked whether gradients are recorded. `made_of`: the graph of the first program.
    """

    first: Shapes
    reads_grad_mode: bool = False
    made_of: Graph | None = None
    plans: list[KeptPlan] = field(default_factory=list)
    traces: list[SizedTrace] = field(default_factory=list)
    dynamic: dict[int, set[int]] = field(default_factory=dict)
    is_fixed: bool = False  # tracing for a range is of no use
    num_recorded: int = 0
    traced_s: float = 0.0  # seconds of the last graph
    is_told: bool = False  # that traces for other sizes take long
    made: list[MadeProgram] = field(default_factory=list)  # the last ones
    sized: list[SizedProgram] = field(default_factory=list)
    last_trace: SizedTrace | None = None  # of which the last graph is

    def graph(self, examples: Examples, trace: Callable[..., Any]) -> Graph:
        """The graph of a call on `examples`: of a trace that was made for a range of sizes, if one holds, of a recorded
        forward, or a new one.

        `trace`: (how, *what else `how` takes) -> what `how` gives for the model.
        """
        start_s = time.perf_counter()
        self.last_trace = None
        graph = self._of_known_trace(examples) or self._recorded(examples, trace)
        if graph is None:
            graph = self._traced(examples, lambda: trace(traced), lambda dynamic: trace(traced_for_sizes, dynamic))
            if self.made_of is None:
                trace(check_alike)
        self.traced_s = time.perf_counter() - start_s
        return graph

    def _recorded(self, examples: Examples, trace: Callable[..., Any]) -> Graph | None:
        """The graph of a forward that is recorded; None if it is not certain to be that of an export."""
        if self.made_of is None or (self.num_recorded >= MOST_RECORDED and not self.is_fixed):
            return None
        try:
            graph = self._named(trace(recorded))
        except AutoparError:
            return None
        if not is_of_other_sizes(graph, self.made_of):
            return None
        self._note(shapes_of(examples))
        self.num_recorded += 1
        return graph

    def _of_known_trace(self, examples: Examples) -> Graph | None:
        for sized in reversed(self.traces):
            if (graph := self._graph(sized, examples)) is not None:
                self.last_trace = sized
                return graph
        return None

    def _traced(
        self, examples: Examples, trace: Callable[[], Graph], trace_sizes: Callable[[DynamicDims], SizedTrace]
    ) -> Graph:
        shapes = shapes_of(examples)
        is_other = shapes != self.first and self._note(shapes)
        if self.is_fixed or not is_other or len(self.traces) >= MOST_TRACES:
            return self._named(trace())
        try:
            sized = trace_sizes(self._leaves(examples))
        except AutoparError:  # a refusal of symbolic sizes; one of the model itself is raised by the other trace
            self.is_fixed = True
            return self._named(trace())
        graph = self._graph(sized, examples)
        if graph is None or sized.range.is_point:
            self.is_fixed = True
            return self._named(trace()) if graph is None else graph
        if not self._has_first_names(graph):  # a range takes ops that a number does not need
            own = self._named(trace())
            if self._has_first_names(own):
                self.is_fixed = True
                return own
        self.traces.append(sized)
        self.last_trace = sized
        return graph

    def trial(
        self,
        graph: Graph,
        shapes: Shapes,
        stored: Mapping[str, str],
        outputs: Mapping[str, Layout],
        planner: CallPlanner,
    ) -> Trial | None:
        """The fastest of the known plans for `graph`; None if none can be kept.

        Arguments as of `KeptPlan.choices_for`.
        """
        found = [(kept, kept.choices_for(graph, stored, outputs, planner)) for kept in self.plans]
        trials = [Trial(kept, choices, shapes) for kept, choices in found if choices is not None]
        if len(trials) < 2:
            return next(iter(trials), None)
        return min(trials, key=lambda trial: trial.choices.plan.step_s)

    def known(self, shapes: Shapes) -> MadeProgram | None:
        """The program for a call of these shapes, if one for all sizes does; it stays on trial as that was."""
        found = (sized.made_for(shapes) for sized in self.sized)
        return next((made for made in found if made is not None), None)

    def recall(
        self, key: Any, call: Examples, loaded: dict[Any, Any], trials: dict[Any, Trial | None]
    ) -> tuple[Any, Any]:
        """(program, trial) for a call of these sizes, the same on every rank, kept under `key`; (None, None) if none is
        known.
        """
        if (made := self.known(shapes_of(call))) is None:
            return None, None
        loaded[key], trials[key] = made.loaded, made.trial
        return made.loaded, made.trial

    def note(self, trial: Trial | None, loaded: Any) -> None:
        """Add a program that was made; once there are enough of them, find the one for all sizes."""
        self.made_of = self.made_of or loaded.graph
        if trial is None or not isinstance(loaded, Loaded):
            return
        self.made = [*self.made, MadeProgram(self.last_trace, trial, loaded)][-NUM_COMPARED:]
        if len(self.made) == NUM_COMPARED and len(self.sized) < MOST_TRACES and (found := sized_program(self.made)):
            self.sized.append(found)

    def tell_time(self, seconds: float, *, is_planned: bool) -> None:
        """Warn of how long a call took before it ran: if it was planned, or once if its trace took long."""
        if is_planned:
            tell_time_of_another(seconds, is_for_sizes=self.made_of is not None)
        elif self.made_of is not None and self.traced_s > LONG_TRACE_S and not self.is_told:
            self.is_told = True
            tell_time_of_trace(self.traced_s)

    def keep(self, plan: Plan | StagedPlan, shapes: Shapes, planning_s: float, over: Trial | None) -> Plan | StagedPlan:
        """The plan to run: `plan`, made for these shapes in so many seconds, unless that which was on trial for them is
        as good. It is kept for other sizes.
        """
        if isinstance(plan, StagedPlan):
            return plan
        if over is not None and (1 - CLOSE) * over.choices.plan.step_s <= plan.step_s:
            over.kept.widen(shapes)
            return over.choices.plan
        self.plans = [*self.plans, KeptPlan.of(plan, shapes, planning_s)][-MOST_PLANS:]
        return plan

    def _graph(self, sized: SizedTrace, examples: Examples) -> Graph | None:
        """The graph of these sizes; None as well where only a trace of its own can tell why there is none."""
        try:
            graph = sized.graph(*examples)
        except AutoparError:
            return None
        return None if graph is None else self._named(graph)

    def _named(self, graph: Graph) -> Graph:
        """`graph` with the names of the first one, to which plans refer."""
        return graph if self.made_of is None else named_like(graph, self.made_of)

    def _has_first_names(self, graph: Graph) -> bool:
        """Whether its ops have the names to which plans refer."""
        return self.made_of is None or graph.position.keys() == self.made_of.position.keys()

    def _note(self, shapes: Shapes) -> bool:
        """Add the dims in which `shapes` differ from the first; whether there is any."""
        for number, (first, shape) in enumerate(zip(self.first, shapes, strict=True)):
            differ = {dim for dim, (a, b) in enumerate(zip(first, shape, strict=True)) if a != b}
            if differ:
                self.dynamic.setdefault(number, set()).update(differ)
        return bool(self.dynamic)

    def _leaves(self, examples: Examples) -> DynamicDims:
        """The dynamic dims by the number of the leaf, of all leaves."""
        leaves = leaves_of(examples)
        tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        return {tensors[number]: sorted(dims) for number, dims in self.dynamic.items()}


def leaves_of(examples: Examples) -> list[Any]:
    """The leaves of a call, with keywords in the order of keys."""
    args, kwargs = examples
    return pytree.tree_leaves((args, dict(sorted(kwargs.items()))))


def shapes_of(examples: Examples) -> Shapes:
    """The shapes of the tensors of a call, in the order of keys."""
    return tuple(tuple(leaf.shape) for leaf in leaves_of(examples) if isinstance(leaf, torch.Tensor))
