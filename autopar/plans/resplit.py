"""`resplit`: a plan with the batch in other shares."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.plans.plan import Plan, plan_of
from autopar.plans.seen_rank import in_shares


def resplit(plan: Plan, sizes: Mapping[int, tuple[int, ...]]) -> Plan:
    """`plan` with the batch in shares of these sizes on each axis that has it in shares; all other choices stay.

    What a search had proven of it, and its predicted peak, were of other shares.
    """
    shares = tuple((axis, sizes[axis]) for axis, _ in plan.mesh.shares)
    if shares == plan.mesh.shares:
        return plan
    place: dict[str, Any] = {"training": plan.training, "memory_limit_bytes": plan.memory_limit_bytes}
    mesh = replace(plan.mesh, shares=shares)
    made = plan_of(plan.graph, in_shares(plan.assignment, dict(shares)), mesh, plan.cluster, **place)
    return replace(made, found_by=plan.found_by, is_from_file=plan.is_from_file)
