"""Numbers of a plan that computes in another dtype than it stores, and its price with sums in a third one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.training import PARAM_DTYPES, REDUCE_DTYPES, Training
from autopar.ir.graph import short_dtype
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a plan, and the same choices with gradients summed in another dtype.

    `sum_bytes`, `other_sum_bytes`: of all collectives of backward in a step; of stages, on all of them together.
    """

    stored_dtype: str
    param_dtype: str
    reduce_dtype: str
    step_s: float
    sum_bytes: int
    other_reduce_dtype: str
    other_step_s: float
    other_sum_bytes: int


def precision_of(plan: Plan | StagedPlan) -> Precision | None:
    """None for a plan that computes all in its own dtype."""
    training = plan.training
    if not training.param_dtype:
        return None
    summed = training.reduce_dtype or training.param_dtype
    other = "float32" if summed == training.param_dtype else training.param_dtype
    anew = _summed_in(plan, other)
    sizes = _sum_bytes(plan), _sum_bytes(anew)
    values = (item.value for item in plan.graph.of_kind("parameter"))
    stored = {short_dtype(value.stored_dtype) for value in values if value.stored_dtype is not None}
    names = ", ".join(sorted(stored)) or "in their own dtype"
    return Precision(names, training.param_dtype, summed, plan.step_s, sizes[0], other, anew.step_s, sizes[1])


def precision_lines(found: Precision | None) -> Iterator[str]:
    """The lines of a plan's text."""
    if found is None:
        return
    digits = f"rounds to one part in {2 / torch.finfo(PARAM_DTYPES[found.param_dtype]).eps:.0f}"
    yield (
        f"Computed in {found.param_dtype}: each op, softmax, norms and losses too unless the model casts, {digits}."
        f" Parameters, their gradients and the optimizer's state stay {found.stored_dtype}; casts come before gathers."
    )
    kept = torch.finfo(REDUCE_DTYPES[found.reduce_dtype]).eps <= torch.finfo(torch.float32).eps
    loses = f"terms below 1/{2 / torch.finfo(REDUCE_DTYPES[found.reduce_dtype]).eps:.0f} of a sum are lost"
    becomes = "no further rounding" if kept else loses
    yield (
        f"Gradients are summed over ranks in {found.reduce_dtype} ({becomes}); with"
        f" reduce_dtype={found.other_reduce_dtype} a step would take {format_seconds(found.other_step_s)}, and"
        f" collectives of backward move {format_bytes(found.other_sum_bytes)} in place of"
        f" {format_bytes(found.sum_bytes)}."
    )


def _summed_in(plan: Plan | StagedPlan, dtype: str) -> Plan | StagedPlan:
    training = replace(plan.training, reduce_dtype=dtype)
    if isinstance(plan, StagedPlan):
        stages = tuple(_priced(stage, replace(stage.training, reduce_dtype=dtype)) for stage in plan.stages)
        return replace(plan, stages=stages, training=training)
    return _priced(plan, training)


def _priced(plan: Plan, training: Training) -> Plan:
    graph = training.reduced(plan.graph)
    costs = evaluate(graph, plan.assignment, plan.mesh, plan.cluster, training=training)
    return replace(plan, graph=graph, training=training, costs=costs)


def _sum_bytes(plan: Plan | StagedPlan) -> int:
    stages = plan.stages if isinstance(plan, StagedPlan) else (plan,)
    return sum(
        stage.costs.num_issued(one) * one.collective.num_bytes
        for stage in stages
        for one in stage.costs.collectives
        if one.collective.phase == "backward"
    )
