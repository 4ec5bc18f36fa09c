"""`resplit`: a plan with the batch in other shares."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.plans.plan import Plan, plan_of
from autopar.sbp.placement import Layout
from autopar.sbp.signature import Signature, Strategy


def resplit(plan: Plan, sizes: Mapping[int, tuple[int, ...]]) -> Plan:
    """`plan` with the batch in shares of these sizes on each axis that has it in shares; all other choices stay.

    What a search had proven of it, and its predicted peak, were of other shares.
    """
    shares = tuple((axis, sizes[axis]) for axis, _ in plan.mesh.shares)
    if shares == plan.mesh.shares:
        return plan
    by_axis, choices = dict(shares), plan.assignment

    def layout(placed: Layout) -> Layout:
        return tuple(replace(one, shares=by_axis[axis]) if one.shares else one for axis, one in enumerate(placed))

    def strategy(chosen: Strategy) -> Strategy:
        return Strategy(tuple(_signature(one, by_axis.get(axis, ())) for axis, one in enumerate(chosen.signatures)))

    each: dict[str, Any] = {
        name: {key: layout(one) for key, one in getattr(choices, name).items()}
        for name in ("layouts", "kept", "outputs")
    }
    strategies = {name: strategy(one) for name, one in choices.strategies.items()}
    place = {"training": plan.training, "memory_limit_bytes": plan.memory_limit_bytes}
    changed = replace(choices, strategies=strategies, **each)
    made = plan_of(plan.graph, changed, replace(plan.mesh, shares=shares), plan.cluster, **place)
    return replace(made, found_by=plan.found_by, is_from_file=plan.is_from_file)


def _signature(signature: Signature, sizes: tuple[int, ...]) -> Signature:
    inputs, outputs = (
        tuple(replace(one, shares=sizes) if one.shares else one for one in side)
        for side in (signature.inputs, signature.outputs)
    )
    return replace(signature, inputs=inputs, outputs=outputs)
