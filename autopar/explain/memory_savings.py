"""Ablation: the memory that each choice of a plan saves and the time it costs, by pricing the plan without it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.costmodel.evaluate import Costs, evaluate
from autopar.costmodel.training import Training
from autopar.ir.graph import Graph, Value
from autopar.ir.passes.keep_loss import loss_only
from autopar.ir.split_stages import cut
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.assignment import NO_CHOICES
from autopar.schedule.orders import Schedule
from autopar.schedule.simulate import Order, as_array, ordered, step_s

# Fields of an assignment that save memory where they are not empty, with what they decide.
_DECISIONS = {
    "recomputed": "activation checkpointing",
    "offloaded": "activation offload",
    "state_on_host": "optimizer offload",
    "regathered": "regathered parameters",
}


@dataclass(frozen=True, slots=True)
class MemorySaving:
    """One choice with and without.

    where: the number of the stage, or "all". Bytes of a device of that stage, or of the fullest rank; step_s: of the
    whole plan.
    """

    where: str
    choice: str
    num_bytes: int
    bytes_without: int
    step_s: float
    step_s_without: float


def memory_savings(plan: StagedPlan) -> Iterator[MemorySaving]:
    """The choices of each stage, then the number of microbatches; each is left out alone."""
    order, whole_s = ordered(plan.schedule), plan.step_s  # which takes longer than to price a choice
    for number, stage in enumerate(plan.stages):
        num_bytes = stage.costs.total_memory_bytes
        for choice, costs in costs_without(stage):
            other_s = _step_s(plan, number, costs, order)
            yield MemorySaving(str(number), choice, num_bytes, costs.total_memory_bytes, whole_s, other_s)
    num = plan.schedule.num_microbatches
    if num > 1:
        other = _in_one(plan)
        yield MemorySaving(
            "all", f"{num} microbatches", max(plan.memory_bytes), max(other.memory_bytes), whole_s, other.step_s
        )


def _step_s(plan: StagedPlan, number: int, costs: Costs, order: Order) -> float:
    """The step of the plan with other `costs` of stage `number`; `order`: that of its schedule."""
    stage, times = plan.stages[number], [*plan.times]
    forward_s, backward_s = (costs.microbatch_s(phase) for phase in ("forward", "backward"))
    weight_s = times[number].weight_s  # of the same products
    times[number] = replace(times[number], forward_s=forward_s, backward_s=backward_s - weight_s)
    other = replace(plan, stages=(*plan.stages[:number], replace(stage, costs=costs), *plan.stages[number + 1 :]))
    return float(step_s(order, as_array(times))) + max(sum(rank.values()) for rank in other.once_s)


def costs_without(plan: Plan) -> Iterator[tuple[str, Costs]]:
    """Each choice of the plan that saves memory, with the costs of the plan without it."""
    for name, decision in _DECISIONS.items():
        without = replace(plan.assignment, **{name: getattr(NO_CHOICES, name)})
        if without != plan.assignment:
            yield decision, evaluate(plan.graph, without, plan.mesh, plan.cluster, training=plan.training)


def _in_one(plan: StagedPlan) -> StagedPlan:
    """The plan with the same stages and layouts and the whole batch as one microbatch."""
    graphs = (stage.graph for stage in cut(loss_only(plan.graph), plan.starts))
    training = replace(plan.training, num_microbatches=1, num_in_flight=1, num_waiting=0)
    priced = ((stage, graph, _costs_in_one(stage, graph, training)) for stage, graph in zip(plan.stages, graphs))
    stages = tuple(replace(stage, graph=graph, training=training, costs=costs) for stage, graph, costs in priced)
    kept = plan.schedule.name
    name = "gpipe" if kept == "1f1b" else kept  # 1f1b needs a microbatch a stage
    schedule = Schedule(name, plan.schedule.num_stages, plan.schedule.num_ranks, 1)
    return replace(plan, schedule=schedule, stages=stages, training=training)


def _costs_in_one(stage: Plan, graph: Graph, training: Training) -> Costs:
    names = {old.name: new.name for old, new in zip(stage.graph.outputs, graph.outputs) if isinstance(new, Value)}
    outputs = {names[name]: layout for name, layout in stage.assignment.outputs.items()}
    # without the ops that only a microbatch has: its share of a mean
    assignment = replace(stage.assignment.restricted(graph), outputs=outputs)
    return evaluate(graph, assignment, stage.mesh, stage.cluster, training=training)
