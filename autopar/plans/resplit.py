"""A plan with the batch in other shares; all other choices stay.

What a search had proven of it, and its predicted peak, were of other shares.
"""

from dataclasses import replace
from typing import Any

from autopar.mesh import Mesh
from autopar.plans.plan import Plan, plan_of
from autopar.plans.seen_rank import in_shares
from autopar.plans.staged_plan import StagedPlan


def resplit(plan: Plan, sizes: tuple[int, ...]) -> Plan:
    """`plan` with the batch in shares of these sizes on the axis that has it in shares, if there is one."""
    mesh = _reshared(plan.mesh, sizes)
    if mesh == plan.mesh:
        return plan
    place: dict[str, Any] = {"training": plan.training, "memory_limit_bytes": plan.memory_limit_bytes}
    made = plan_of(plan.graph, in_shares(plan.assignment, dict(mesh.shares)), mesh, plan.cluster, **place)
    return replace(made, found_by=plan.found_by, is_from_file=plan.is_from_file)


def resplit_stages(plan: StagedPlan, sizes: tuple[int, ...]) -> StagedPlan:
    """As `resplit`, of a plan in stages or microbatches."""
    mesh = _reshared(plan.mesh, sizes)
    if mesh == plan.mesh:
        return plan
    stages = tuple(resplit(stage, sizes) for stage in plan.stages)
    return replace(plan, mesh=mesh, stages=stages, lower_bound_s=0.0, peak_bytes=())


def _reshared(mesh: Mesh, sizes: tuple[int, ...]) -> Mesh:
    return replace(mesh, shares=tuple((axis, sizes) for axis, _ in mesh.shares))
