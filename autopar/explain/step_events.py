"""`step_events`: the timeline of a step without stages, as the cost model has it, in Trace Event Format."""

from collections.abc import Iterator
from typing import Any

from autopar.costmodel.evaluate import passes_of
from autopar.costmodel.overlap.pass_time import LaneSpan
from autopar.plans.plan import Plan


def step_events(plan: Plan) -> Iterator[dict[str, Any]]:
    """The events of forward, backward and update: on thread 0 compute, on thread 1 + i the collectives that span link
    level i; complete events "X" in microseconds, metadata "M".
    """
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "planned"}}
    names = ["compute", *(f"link level {number}" for number in range(len(plan.cluster.levels)))]
    for number, name in enumerate(names):
        yield {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}
    start_s, graph = 0.0, plan.graph
    for phase, cost in zip(
        ("forward", "backward"), passes_of(graph, plan.assignment, plan.mesh, plan.cluster, plan.training)
    ):
        for span in cost.spans:
            if span.end_s > span.start_s:
                yield _event(span, graph.ops[span.position].name, phase, start_s)
        start_s += cost.time_s
        if phase in plan.costs.waiting_s:
            waiting_s = plan.costs.waiting_s[phase]
            yield _event(LaneSpan(None, 0, "wait", 0.0, waiting_s), "activations on the host", phase, start_s)
            start_s += waiting_s
    for what, seconds in (("update", plan.costs.optimizer_s), ("wait", plan.costs.waiting_s.get("update", 0.0))):
        yield _event(LaneSpan(None, 0, what, 0.0, seconds), "optimizer", "update", start_s)
        start_s += seconds


def _event(span: LaneSpan, op: str, phase: str, start_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": 0 if span.lane is None else 1 + span.lane,
        "name": op if span.what == "compute" else f"{span.what}: {op}",
        "cat": phase,
        "args": {"op": op, "what": span.what},
        "ts": 1e6 * (start_s + span.start_s),
        "dur": 1e6 * (span.end_s - span.start_s),
    }
