"""A plan in stages as text and as data."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from autopar.explain.report import report
from autopar.explain.text import FROM_FILE, format_bytes, format_seconds, hand_title, on_host_line, step_line
from autopar.ir.print_graph import printable
from autopar.plans.memory_over_time import Moment, memory_over_time
from autopar.plans.memory_savings import Bought, bought
from autopar.sbp.placement import format_layout
from autopar.schedule.orders import Schedule
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.timeline import format_counts, format_timeline, trace_json

if TYPE_CHECKING:
    from autopar.plans.plan import Plan
    from autopar.plans.staged_plan import StagedPlan


def format_staged(plan: "StagedPlan") -> str:
    """All sections, in a fixed order; the same plan gives the same text."""
    sections = [
        _head(plan),
        _stages(plan),
        format_timeline(plan.timeline),
        _memory(plan),
        _bought(plan),
        _crossing(plan),
        _hand(plan),
    ]
    note = "What each op of a stage does: plan.stages[number].explain()."
    return "\n\n".join(section for section in (*sections, note, _timings(plan)) if section)


def staged_json(plan: "StagedPlan") -> dict[str, Any]:
    """The content of `format_staged`, and each stage's own report, as plain dicts, lists, strings and numbers."""
    return {
        "mesh": str(plan.mesh),
        "cluster": plan.cluster.name,
        "optimizer": plan.training.optimizer,
        "schedule": {
            "name": plan.schedule.name,
            "num_stages": plan.schedule.num_stages,
            "num_ranks": plan.schedule.num_ranks,
        },
        "num_microbatches": plan.schedule.num_microbatches,
        "step_s": plan.step_s,
        "lower_bound_s": plan.lower_bound_s,
        "notes": list(plan.notes),
        "bubble": plan.timeline.bubble,
        "starts": list(plan.starts),
        "timeline": [[[str(span.action), span.start_s, span.end_s] for span in row] for row in plan.timeline.rows],
        "peak_bytes": list(plan.peak_bytes),
        "memory_over_time": [_moments_json(plan, rank) for rank in range(plan.schedule.num_ranks)],
        "memory_choices": [asdict(one) for one in bought(plan)],
        "stages": [report(stage).as_json() for stage in plan.stages],
        "hand": {
            name: {"step_s": costs.step_s, "memory_bytes": costs.memory_bytes} for name, costs in plan.hand.items()
        },
        "timings_s": dict(plan.timings),
        "is_from_file": plan.is_from_file,
    }


def _moments_json(plan: "StagedPlan", rank: int) -> list[dict[str, Any]]:
    found = memory_over_time(plan, rank)
    return [{"start_s": x.start_s, "in_flight": x.in_flight, "bytes": dict(x.bytes_by_kind)} for x in found]


def plan_json(plan: "Plan | StagedPlan") -> dict[str, Any]:
    """What `explain` says as plain dicts, lists, strings and numbers."""
    return staged_json(plan) if hasattr(plan, "stages") else report(plan).as_json()


def plan_trace(plan: "Plan | StagedPlan") -> str:
    """A trace file of the planned step; without stages and microbatches, of one forward and one backward."""
    if hasattr(plan, "stages"):
        over_time = {rank: memory_over_time(plan, rank) for rank in range(plan.schedule.num_ranks)}
        memory = {rank: [(x.start_s, x.bytes_by_kind) for x in row] for rank, row in over_time.items()}
        return trace_json({"planned": plan.timeline}, memory)
    times = StageTimes(plan.costs.microbatch_s("forward"), plan.costs.microbatch_s("backward"))
    return trace_json({"planned": simulate(Schedule("accumulate", 1, 1, 1), [times])})


def _head(plan: "StagedPlan") -> str:
    floor = (
        f"no plan takes less than {format_seconds(plan.lower_bound_s)}, the work shared evenly"
        if plan.lower_bound_s
        else "no bound"
    )
    cluster = f"{printable(plan.cluster.name)} ({printable(plan.cluster.source)})"
    return "\n".join(
        [
            f"Plan for mesh {plan.mesh} on cluster {cluster}, optimizer {plan.training.optimizer}.",
            f"Schedule: {plan.schedule}. Run it by model.train_step(...).",
            step_line(plan.step_s, f"found by {plan.found_by or 'hand'}", floor, is_from_file=plan.is_from_file),
            (
                f"Of it {format_seconds(plan.timeline.step_s)} run by the schedule; the rest gathers parameters,"
                " reduces gradients, updates."
            ),
            *_on_host(plan),
            *plan.notes,
        ]
    )


def _on_host(plan: "StagedPlan") -> Iterator[str]:
    num = sum(len(stage.assignment.state_on_host) for stage in plan.stages)
    if num:
        yield on_host_line(
            num, sum(stage.costs.state_on_host_bytes for stage in plan.stages) // plan.schedule.num_ranks
        )


def _table(lines: list[list[str]], headers: list[str]) -> str:
    return tabulate(lines, headers, disable_numparse=True)


def _stages(plan: "StagedPlan") -> str:
    lines = []
    for number, (stage, times) in enumerate(zip(plan.stages, plan.times)):
        spent = (times.forward_s, times.backward_s + times.weight_s, times.send_s, stage.costs.once_s)
        first, last = stage.graph.ops[0], stage.graph.ops[-1]
        span = f"%{first.name} ({first.module or first.line}) to %{last.name} ({last.module or last.line})"
        own = stage.assignment
        saved = (str(len(x)) for x in (own.recomputed, own.offloaded, own.state_on_host))
        in_flight = str(stage.training.num_in_flight)
        lines.append(
            [
                str(number),
                str(plan.schedule.rank_of(number)),
                printable(span),
                *map(format_seconds, spent),
                in_flight,
                *saved,
            ]
        )
    headers = ["stage", "rank", "ops", "forward", "backward", "sends", "once a step", "in flight"]
    return "Stages (times of one microbatch):\n" + _table(lines, [*headers, "recomputed", "offloaded", "state on host"])


def _memory(plan: "StagedPlan") -> str:
    """At the start, the worst time and the end of the step, and how many microbatches are in flight over it."""
    ranks = range(plan.schedule.num_ranks)
    over_time = [memory_over_time(plan, rank) for rank in ranks]
    kinds = list(dict.fromkeys(kind for stage in plan.stages for kind in stage.costs.memory_bytes))
    lines = [line for rank in ranks for line in _memory_lines(rank, over_time[rank], kinds)]
    limit = "" if plan.memory_limit_bytes == float("inf") else f" (limit {format_bytes(plan.memory_limit_bytes)})"
    table = _table(lines, ["rank", "when", "in flight", *kinds, "all"]) + _peaks(plan)
    counts = format_counts([[(x.start_s, x.in_flight) for x in row] for row in over_time], plan.timeline.step_s)
    return (
        f"Memory of a device of each rank of the pipeline{limit}:\n{table}\n\nMicrobatches in flight over the"
        f" step:\n{counts}"
    )


def _peaks(plan: "StagedPlan") -> str:
    peaks = ", ".join(f"rank {rank} {format_bytes(size)}" for rank, size in enumerate(plan.peak_bytes))
    origin = f" ({FROM_FILE.lower()})" if plan.is_from_file else ""
    return f"\nThese are estimates; the most at one time, as the programs run{origin}: {peaks}." if peaks else ""


def _memory_lines(rank: int, moments: Sequence[Moment], kinds: Sequence[str]) -> Iterator[list[str]]:
    worst = max(moments, key=lambda moment: moment.total_bytes)
    for when, found in (("start", moments[0]), (f"most, {format_seconds(worst.start_s)}", worst), ("end", moments[-1])):
        sizes = (format_bytes(found.bytes_by_kind.get(kind, 0)) for kind in kinds)
        yield [str(rank), when, str(found.in_flight), *sizes, format_bytes(found.total_bytes)]


def _bought(plan: "StagedPlan") -> str:
    """What each choice that saves memory gains and costs."""
    lines = [_bought_line(one) for one in bought(plan)]
    title = "What saves memory; a device, and a step of the whole plan, without it:"
    return title + "\n" + _table(lines, ["stage", "choice", "memory", "it saves", "step", "it costs"]) if lines else ""


def _bought_line(one: Bought) -> list[str]:
    saved, slower_s = one.bytes_without - one.num_bytes, one.step_s - one.step_s_without
    saves = f"none, takes {format_bytes(-saved)}" if saved < 0 else format_bytes(saved)
    costs = f"none, gains {format_seconds(-slower_s)}" if slower_s < 0 else format_seconds(slower_s)
    return [one.where, one.choice, format_bytes(one.bytes_without), saves, format_seconds(one.step_s_without), costs]


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
    lines = [
        [printable(name), format_seconds(step_s), f"{step_s / plan.step_s:.2f}", format_bytes(size)]
        for name, step_s, size in rows
    ]
    return hand_title(is_from_file=plan.is_from_file) + _table(lines, ["plan", "step", "ratio", "memory"])


def _timings(plan: "StagedPlan") -> str:
    if not plan.timings:
        return ""
    return (
        "Planning: " + ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in plan.timings.items()) + "."
    )
