"""A plan in stages as text and as data."""

from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from autopar.explain.report import report
from autopar.explain.text import format_bytes, format_seconds
from autopar.plan.timeline import format_timeline
from autopar.sbp.placement import format_layout

if TYPE_CHECKING:
    from autopar.plan.plan import Plan
    from autopar.plan.staged import StagedPlan


def format_staged(plan: "StagedPlan") -> str:
    """All sections, in a fixed order; the same plan gives the same text."""
    sections = [_head(plan), _stages(plan), _memory(plan), _bought(plan), _crossing(plan), format_timeline(plan.timeline), _hand(plan)]
    note = "What each op of a stage does: plan.stages[number].explain()."
    return "\n\n".join(section for section in (*sections, note, _timings(plan)) if section)


def staged_json(plan: "StagedPlan") -> dict[str, Any]:
    """The content of `format_staged`, and each stage's own report, as plain dicts, lists, strings and numbers."""
    return {
        "mesh": str(plan.mesh),
        "cluster": plan.cluster.name,
        "optimizer": plan.training.optimizer,
        "schedule": {"name": plan.schedule.name, "num_stages": plan.schedule.num_stages, "num_ranks": plan.schedule.num_ranks},
        "num_microbatches": plan.schedule.num_microbatches,
        "step_s": plan.step_s,
        "lower_bound_s": plan.lower_bound_s,
        "bubble": plan.timeline.bubble,
        "starts": list(plan.starts),
        "timeline": [[[str(span.action), span.start_s, span.end_s] for span in row] for row in plan.timeline.rows],
        "stages": [report(stage).as_json() for stage in plan.stages],
        "hand": {name: {"step_s": costs.step_s, "memory_bytes": costs.memory_bytes} for name, costs in plan.hand.items()},
        "timings_s": dict(plan.timings),
    }


def _head(plan: "StagedPlan") -> str:
    floor = f"no plan takes less than {format_seconds(plan.lower_bound_s)}, the work shared evenly" if plan.lower_bound_s else "no bound"
    return "\n".join(
        [
            f"Plan for mesh {plan.mesh} on cluster {plan.cluster.name} ({plan.cluster.source}), optimizer {plan.training.optimizer}.",
            f"Schedule: {plan.schedule}. Run it by model.train_step(...).",
            f"Step {format_seconds(plan.step_s)}, found by {plan.found_by or 'hand'}; {floor}.",
        ]
    )


def _table(lines: list[list[str]], headers: list[str]) -> str:
    return tabulate(lines, headers, disable_numparse=True)


def _stages(plan: "StagedPlan") -> str:
    lines = []
    for number, (stage, times) in enumerate(zip(plan.stages, plan.times)):
        spent = (times.forward_s, times.backward_s + times.weight_s, times.send_s, stage.costs.once_s)
        first, last = stage.graph.ops[0], stage.graph.ops[-1]
        span = f"%{first.name} ({first.module or first.line}) to %{last.name} ({last.module or last.line})"
        again, moved = str(len(stage.assignment.recomputed)), str(len(stage.assignment.offloaded))
        in_flight = str(stage.training.num_in_flight)
        lines.append([str(number), str(plan.schedule.rank_of(number)), span, *map(format_seconds, spent), in_flight, again, moved])
    headers = ["stage", "rank", "ops", "forward", "backward", "sends", "once a step", "in flight", "recomputed", "offloaded"]
    return "Stages (times of one microbatch):\n" + _table(lines, headers)


def _memory(plan: "StagedPlan") -> str:
    kinds = list(dict.fromkeys(kind for stage in plan.stages for kind in stage.costs.memory_bytes))
    lines = []
    for rank in range(plan.schedule.num_ranks):
        own = [plan.stages[number].costs.memory_bytes for number in plan.schedule.stages_of(rank)]
        sizes = [sum(found.get(kind, 0) for found in own) for kind in kinds]
        lines.append([str(rank), *map(format_bytes, (*sizes, sum(sizes)))])
    limit = "" if plan.memory_limit_bytes == float("inf") else f" (limit {format_bytes(plan.memory_limit_bytes)})"
    return f"Memory of a device of each rank of the pipeline{limit}:\n" + _table(lines, ["rank", *kinds, "all"])


def _bought(plan: "StagedPlan") -> str:
    """What each choice that saves memory gains and costs."""
    lines = []
    for number, stage in enumerate(plan.stages):
        lines += [[str(number), *line] for line in _choices_of(stage)]
    return "What saves memory, and what it costs a step:\n" + _table(lines, ["stage", "choice", "saves", "costs"]) if lines else ""


def _choices_of(stage: "Plan") -> list[list[str]]:
    lines = []
    for what, other in stage.without_savings():
        saved, slower = (
            other.total_memory_bytes - stage.costs.total_memory_bytes,
            stage.costs.step_s - other.step_s,
        )
        lines.append([what, format_bytes(max(0, saved)), format_seconds(max(0.0, slower))])
    return lines


def _crossing(plan: "StagedPlan") -> str:
    lines = []
    for number, stage in enumerate(plan.stages[:-1]):
        for value in dict.fromkeys(stage.graph.outputs):
            lines.append([f"{number} to {number + 1}", str(value), format_layout(stage.assignment.outputs[value.name])])
    return "What is sent from stage to stage:\n" + _table(lines, ["stages", "value", "layout"]) if lines else ""


def _hand(plan: "StagedPlan") -> str:
    if not plan.hand:
        return ""
    rows = [("this plan", plan.step_s, max(plan.memory_bytes))]
    rows += [(name, costs.step_s, costs.memory_bytes) for name, costs in plan.hand.items()]
    lines = [[name, format_seconds(step_s), f"{step_s / plan.step_s:.2f}", format_bytes(size)] for name, step_s, size in rows]
    return "Beside plans written by hand, priced alike:\n" + _table(lines, ["plan", "step", "ratio", "memory"])


def _timings(plan: "StagedPlan") -> str:
    if not plan.timings:
        return ""
    return "Planning: " + ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in plan.timings.items()) + "."
