"""`choose_plan`: the better of the best plans with and without stages and microbatches."""

import math
from dataclasses import dataclass, replace
from functools import partial

from autopar.costmodel.cluster.load_cluster import Cluster
from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.planner.budget import Budget, Progress, Watch
from autopar.planner.fit_memory import Predict, fitting
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.pipeline.search_pipeline import plan_in_stages
from autopar.planner.rarely_collected import rarely_collected
from autopar.planner.request import ANYTHING, PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import PIPELINE, StagedPlan

# If a plan leaves more than this share of the memory limit free, the limit does not bind.
_FREE = 0.1
# Stages and microbatches change the training loop: they are chosen if they gain more than this share of a step.
_WORTH = 0.05
# Shares of the time left: for stages on an open mesh, and for plans without stages on a given mesh.
_SHARE_OF_STAGES, _SHARE_OF_WHOLE = 0.75, 0.75
# The share of a plan's time for its first search; the rest is for further ones, if its plan does not fit.
_SHARE_OF_FIRST = 0.5


@rarely_collected()
def choose_plan(
    graph: Graph,
    mesh: Mesh | Devices,
    cluster: Cluster,
    request: PlanRequest = ANYTHING,
    *,
    progress: Progress | None = None,
    predict: Predict | None = None,
    watch: Watch | None = None,
) -> Plan | StagedPlan:
    """The best plan within the time limit; for training also with stages, microbatches and activation checkpointing.

    After the time limit, and after Ctrl-C, planning ends with the best plan so far, possibly a hand plan. `predict`:
    plan -> predicted peak in bytes of a device of each rank, which must be within the limit; by default the estimate of
    the search is used. `watch`: called with each artifact, in order (`planner.printed`). MicrobatchError or another
    AutoparError if no plan satisfies the request.
    """
    budget, request = Budget.of(request.time_limit_s, progress, watch), request.on(cluster)
    timed = None if predict is None else lambda plan: budget.run("peak", partial(predict, plan))
    ways = _Ways(graph, mesh, cluster, request, timed)
    if ways.has_stages and not request.trains:
        raise AutoparError(
            f"mesh {mesh} has a pipeline axis: stages are run by model.train_step(...), not by model(...); call that"
            f" first, or take a mesh without {PIPELINE}"
        )
    budget.show("graph", graph)
    with budget.ended_by_interrupt():
        plan = _chosen(ways, budget)
        found_by = f"{plan.found_by}, ended by {budget.ended_by}" if budget.is_spent else plan.found_by
        plan = replace(plan, found_by=found_by, timings=budget.all_timings)
    budget.show("plan", plan)
    return plan


@dataclass(frozen=True)
class _Ways:
    """A planning task, with the two ways to plan it: without stages and microbatches, and with them."""

    graph: Graph
    mesh: Mesh | Devices
    cluster: Cluster
    request: PlanRequest
    predict: Predict | None

    @property
    def has_stages(self) -> bool:
        """Whether the mesh has a pipeline axis."""
        return isinstance(self.mesh, Mesh) and PIPELINE in self.mesh.axis_names

    @property
    def is_one_node(self) -> bool:
        """Whether the innermost link level joins all devices."""
        return self.mesh.num_devices <= (self.cluster.levels[0].size or self.mesh.num_devices)

    def in_stages(self, budget: Budget) -> Plan | StagedPlan:
        """The best plan in stages and microbatches."""
        found = self.in_stages_within(budget, math.inf)
        assert found is not None, "every plan takes less than infinitely long"
        return found

    def in_stages_within(self, budget: Budget, cutoff_s: float) -> Plan | StagedPlan | None:
        """The result of `plan_in_stages`."""
        return plan_in_stages(
            self.graph, self.mesh, self.cluster, self.request, budget=budget, cutoff_s=cutoff_s, predict=self.predict
        )

    def whole(self, budget: Budget, to_beat_s: float = math.inf) -> Plan:
        """The best plan of `make_plan` that fits; the first search leaves time for others in case its plan does not."""
        tries, request = iter((budget.part(_SHARE_OF_FIRST),)), self.request

        def make(allowed_bytes: float) -> Plan:
            if budget.is_spent and allowed_bytes < request.limit_bytes:
                raise InfeasibleError(f"another plan was not looked for, since planning was ended by {budget.ended_by}")
            within = replace(request, memory_limit_bytes=allowed_bytes)
            return make_plan(
                self.graph, self.mesh, self.cluster, within, to_beat_s=to_beat_s, budget=next(tries, budget)
            )

        return fitting(make, request.limit_bytes, self.predict, to_beat_s=to_beat_s / (1 - _WORTH))


def _chosen(ways: _Ways, budget: Budget) -> Plan | StagedPlan:
    request = ways.request
    if ways.has_stages or (request.trains and not request.is_open and request.num_microbatches != 1):
        return ways.in_stages(budget)
    if not request.trains or request.num_microbatches == 1 or (isinstance(ways.mesh, Devices) and request.pins):
        return ways.whole(budget)
    return _if_memory_binds(ways, budget) if isinstance(ways.mesh, Mesh) else _better(ways, budget)


def _if_memory_binds(ways: _Ways, budget: Budget) -> Plan | StagedPlan:
    """The plan on a mesh without a pipeline axis, where microbatches and checkpointing only save memory."""
    try:
        plan = ways.whole(budget.part(_SHARE_OF_WHOLE))
    except InfeasibleError as error:
        try:
            return ways.in_stages(budget)
        except InfeasibleError:
            raise  # names the memory of the lightest of all plans, those with microbatches included
        except AutoparError:  # the batch cannot be cut, or there is no loss
            raise error from None
    if plan.costs.total_memory_bytes <= (1 - _FREE) * ways.request.limit_bytes or budget.is_spent:
        return plan
    try:
        staged = ways.in_stages_within(budget, plan.step_s)
    except AutoparError:  # the batch cannot be cut, there is no loss, or nothing fits
        return plan
    return _worth(staged, plan)


def _better(ways: _Ways, budget: Budget) -> Plan | StagedPlan:
    """The better plan of both ways, on an open mesh.

    Within a node plans without stages are searched in any case: stages gain little there, and hand plans are no guide
    for a batch too small to split.
    """
    failure: AutoparError | None = None
    staged: Plan | StagedPlan | None = None
    try:
        staged = ways.in_stages(budget.part(_SHARE_OF_STAGES))
    except AutoparError as error:
        failure = error
    if staged is not None and budget.is_spent:
        return staged
    try:
        to_beat_s = math.inf if staged is None or ways.is_one_node else staged.step_s
        plan = ways.whole(budget, to_beat_s)
    except InfeasibleError as error:
        if staged is None:
            raise failure if isinstance(failure, InfeasibleError) else error from None
        return staged
    return _worth(staged, plan)


def _worth(other: Plan | StagedPlan | None, plan: Plan) -> Plan | StagedPlan:
    """`other` if it gains enough, else `plan`."""
    least = _WORTH if isinstance(other, StagedPlan) else 0.0
    return plan if other is None or other.step_s >= (1 - least) * plan.step_s else other
