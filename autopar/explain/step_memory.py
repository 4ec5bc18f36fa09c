"""`step_memory`: the memory of a device over a step without stages, by kind, as the search adds it up."""

from collections.abc import Iterator

from autopar.costmodel.activations.saved_activations import region_of_ops
from autopar.costmodel.evaluate import passes_of
from autopar.costmodel.memory import input_bytes
from autopar.costmodel.overlap.pass_time import PassCost
from autopar.costmodel.step_cost import step_cost
from autopar.explain.memory_over_time import Moment
from autopar.plans.plan import Plan
from autopar.sbp.analysis.sampled_graph import Sampled

# Kinds that are there while a backward runs, by their largest.
_IN_BACKWARD = ("recomputed", "waiting", "fetched", "transient")


def step_memory(plan: Plan) -> tuple[Moment, ...]:
    """A moment for each change of the memory, from the start of forward to the update, of a step with one microbatch.

    What an op saves is there from the end of its forward to the end of its backward; so are gathered parameters, from
    the first op that reads them on. A gradient is there once the backward of the first of its readers is done. No
    moment exceeds the estimate of the plan's memory, and the end of forward has all of its activations.
    """
    graph, training = plan.graph, plan.training
    assert training.num_microbatches == 1, "a step in microbatches has a schedule"
    forward, backward = passes_of(graph, plan.assignment, plan.mesh, plan.cluster, training)
    made, gradients = _by_position(plan)
    now = dict(plan.costs.memory_bytes) | dict.fromkeys(("activations", "gathered", "gradients", *_IN_BACKWARD), 0)
    now = {kind: size for kind, size in now.items() if kind in plan.costs.memory_bytes}
    moments = [Moment(0.0, 1, dict(now))]
    for position, end_s in _ends(forward):
        if position in made:
            for kind, size in made[position].items():
                now[kind] += size
            moments.append(Moment(end_s, 1, dict(now)))
    start_s = forward.time_s + plan.costs.waiting_s.get("forward", 0.0)
    now |= {kind: size for kind, size in plan.costs.memory_bytes.items() if kind in _IN_BACKWARD}
    moments.append(Moment(start_s, 1, dict(now)))
    for position, end_s in _ends(backward):
        if position in made or position in gradients:
            for kind, size in made.get(position, {}).items():
                now[kind] -= size
            now["gradients"] += gradients.get(position, 0)
            moments.append(Moment(start_s + end_s, 1, dict(now)))
    now |= {kind: 0 for kind in _IN_BACKWARD if kind in now}
    end_s = start_s + backward.time_s + plan.costs.waiting_s.get("backward", 0.0)
    return (*moments, Moment(end_s, 0, dict(now)), Moment(plan.step_s, 0, dict(now)))


def _by_position(plan: Plan) -> tuple[dict[int, dict[str, int]], dict[int, int]]:
    """(position of an op -> kind -> bytes that its forward adds, position -> bytes of gradients that are complete once
    its backward is done).
    """
    graph, chosen, position = plan.graph, plan.assignment, plan.graph.position
    step = step_cost(Sampled(graph), chosen, plan.mesh, plan.cluster, plan.training)
    away = region_of_ops(chosen.recomputed).keys() | region_of_ops(chosen.offloaded).keys()
    made: dict[int, dict[str, int]] = {}

    def add(at: int, kind: str, size: int) -> None:
        if size:
            here = made.setdefault(at, {})
            here[kind] = here.get(kind, 0) + size

    for name, cost in step.ops.items():
        add(position[name], "activations", 0 if name in away else cost.saved_bytes)
    for cost in step.all_conversions():
        users = [position[use.user] for use in cost.conversion.uses if use.user in position]
        add(min(users, default=len(graph.ops) - 1), "gathered" if cost.is_parameter else "activations", cost.kept_bytes)
    gradients: dict[int, int] = {}
    for item in graph.inputs:
        size = input_bytes(item, chosen.layouts[item.value.name], plan.mesh.shape, plan.training).get("gradients", 0)
        if size:
            readers = [position[use.user] for use in graph.uses.get(item.value.name, ()) if use.user in position]
            at = min(readers, default=0)
            gradients[at] = gradients.get(at, 0) + size
    return made, gradients


def _ends(cost: PassCost) -> Iterator[tuple[int, float]]:
    """(position of an op, seconds from the start of the pass until it ends) in the order of the pass."""
    spans = [span for span in cost.spans if span.what == "compute"]
    return ((span.position, span.end_s) for span in spans)
