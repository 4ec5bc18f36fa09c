"""The content of `explain` for a plan with stages or microbatches, as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from autopar.costmodel.work_bound import floor_s, speeds_floor_s
from autopar.explain.batch_size import notes
from autopar.explain.common_text import (
    hand_table,
    on_host_lines,
    origin,
    origin_of_figures,
    step_line,
    table,
    timings_line,
    title,
)
from autopar.explain.memory_over_time import Moment, memory_over_time
from autopar.explain.memory_savings import MemorySaving, memory_savings
from autopar.explain.precision_text import precision_lines, precision_of
from autopar.explain.report import report
from autopar.ir.print_graph import printable
from autopar.plans.serialise import HandCosts
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.placement import format_layout
from autopar.schedule.timeline import format_counts, format_timeline
from autopar.units import format_bytes, format_seconds


def format_staged(plan: StagedPlan) -> str:
    """The text of a plan in stages, in sections of fixed order; the same plan gives the same text."""
    sections = [
        _head(plan),
        _stages(plan),
        format_timeline(plan.timeline),
        _memory(plan),
        _savings(plan),
        _crossing(plan),
        _hand(plan),
    ]
    note = "Ops and layouts of one stage: plan.stages[number].explain()."
    return "\n\n".join(section for section in (*sections, note, timings_line(plan.timings)) if section)


def staged_json(plan: StagedPlan) -> dict[str, Any]:
    """The content of `format_staged`, and each stage's own report, as plain dicts, lists, strings and numbers."""
    return {
        "mesh": str(plan.mesh),
        "cluster": plan.cluster.name,
        "optimizer": plan.training.described,
        "precision": None if (precision := precision_of(plan)) is None else asdict(precision),
        "schedule": {
            "name": plan.schedule.name,
            "num_stages": plan.schedule.num_stages,
            "num_ranks": plan.schedule.num_ranks,
        },
        "num_microbatches": plan.schedule.num_microbatches,
        "step_s": plan.step_s,
        "lower_bound_s": plan.lower_bound_s,
        "bound_of": plan.bound_of,
        "gap": plan.gap,
        "notes": list(notes(plan)),
        "bubble": plan.timeline.bubble,
        "starts": list(plan.starts),
        "timeline": [[[str(span.action), span.start_s, span.end_s] for span in row] for row in plan.timeline.rows],
        "peak_bytes": list(plan.peak_bytes),
        "memory_over_time": [_moments_json(plan, rank) for rank in range(plan.schedule.num_ranks)],
        "memory_choices": [asdict(one) for one in memory_savings(plan)],
        "stages": [report(stage).as_json() for stage in plan.stages],
        "hand": {name: asdict(costs) for name, costs in plan.hand.items()},
        "timings_s": dict(plan.timings),
        "is_from_file": plan.is_from_file,
    }


def _moments_json(plan: StagedPlan, rank: int) -> list[dict[str, Any]]:
    moments = memory_over_time(plan, rank)
    return [{"start_s": x.start_s, "in_flight": x.in_flight, "bytes": dict(x.bytes_by_kind)} for x in moments]


def _head(plan: StagedPlan) -> str:
    least = f"no {printable(plan.bound_of)} takes less than {format_seconds(plan.lower_bound_s)} (gap {plan.gap:.1%})"
    groups, training = plan.cluster.groups, plan.training
    floor = floor_s(plan.graph, plan.mesh, plan.cluster, training=training)
    floor = floor if groups is None else speeds_floor_s(plan.graph, groups, training)
    how = "evenly by all devices" if groups is None else "by all devices as fast as each is"
    shared = f"the work shared {how} takes {format_seconds(floor)}"
    bound = f"{least}; {shared}" if plan.lower_bound_s else f"no lower bound; {shared}"
    num_on_host = sum(len(stage.assignment.state_on_host) for stage in plan.stages)
    host_bytes = sum(stage.costs.state_on_host_bytes for stage in plan.stages) // plan.schedule.num_ranks
    return "\n".join(
        [
            title(str(plan.mesh), plan.cluster.name, origin_of_figures(plan.cluster), plan.training.described),
            f"Schedule: {plan.schedule}. Run it by model.train_step(...).",
            step_line(plan.step_s, f"found by {plan.found_by or 'hand'}", bound, is_from_file=plan.is_from_file),
            (
                f"The schedule takes {format_seconds(plan.timeline.step_s)} of it; gathering parameters, reducing"
                " gradients and the optimizer take the rest."
            ),
            *on_host_lines(num_on_host, host_bytes),
            *precision_lines(precision_of(plan)),
            *notes(plan),
        ]
    )


def _stages(plan: StagedPlan) -> str:
    lines = []
    for number, (stage, times) in enumerate(zip(plan.stages, plan.times)):
        spent = (times.forward_s, times.backward_s + times.weight_s, times.send_s, stage.costs.once_s)
        first, last = stage.graph.ops[0], stage.graph.ops[-1]
        span = f"%{first.name} ({first.module or first.line}) to %{last.name} ({last.module or last.line})"
        own = stage.assignment
        saved = (str(len(x)) for x in (own.recomputed, own.offloaded, own.state_on_host))
        in_flight = str(stage.training.num_in_flight)
        where = f" ({printable(stage.cluster.name)})" if plan.cluster.groups is not None else ""
        lines.append(
            [
                str(number),
                f"{plan.schedule.rank_of(number)}{where}",
                printable(span),
                *map(format_seconds, spent),
                in_flight,
                *saved,
            ]
        )
    headers = ["stage", "rank", "ops", "forward", "backward", "p2p", "once per step", "in flight"]
    return "Stages (times of one microbatch):\n" + table(
        lines, [*headers, "recomputed", "offloaded", "state offloaded"]
    )


def _memory(plan: StagedPlan) -> str:
    """The section on memory: at the start, the peak and the end of the step, and microbatches in flight over it."""
    ranks = range(plan.schedule.num_ranks)
    over_time = [memory_over_time(plan, rank) for rank in ranks]
    kinds = list(dict.fromkeys(kind for stage in plan.stages for kind in stage.costs.memory_bytes))
    lines = [line for rank in ranks for line in _memory_lines(rank, over_time[rank], kinds)]
    limits = dict.fromkeys(map(format_bytes, plan.rank_limits_bytes))
    told = ", ".join(f"{size} on rank {rank}" for rank, size in enumerate(map(format_bytes, plan.rank_limits_bytes)))
    limit = "" if plan.memory_limit_bytes == float("inf") else f" (limit {told if len(limits) > 1 else min(limits)})"
    rows = table(lines, ["rank", "when", "in flight", *kinds, "total"]) + _peaks(plan)
    counts = format_counts([[(x.start_s, x.in_flight) for x in row] for row in over_time], plan.timeline.step_s)
    return (
        f"Memory per device, by rank of the pipeline{limit}:\n{rows}\n\nMicrobatches in flight over the step:\n{counts}"
    )


def _peaks(plan: StagedPlan) -> str:
    peaks = ", ".join(f"rank {rank} {format_bytes(size)}" for rank, size in enumerate(plan.peak_bytes))
    claim = origin(is_from_file=plan.is_from_file)
    return f"\nThese are estimates; peaks in a dry run of the programs{claim}: {peaks}." if peaks else ""


def _memory_lines(rank: int, moments: Sequence[Moment], kinds: Sequence[str]) -> Iterator[list[str]]:
    worst = max(moments, key=lambda moment: moment.total_bytes)
    for when, shown in (("start", moments[0]), (f"peak, {format_seconds(worst.start_s)}", worst), ("end", moments[-1])):
        sizes = (format_bytes(shown.bytes_by_kind.get(kind, 0)) for kind in kinds)
        yield [str(rank), when, str(shown.in_flight), *sizes, format_bytes(shown.total_bytes)]


def _savings(plan: StagedPlan) -> str:
    """The section on the ablation of choices that save memory."""
    lines = [_saving_line(one) for one in memory_savings(plan)]
    title = "Ablation: memory per device and time per step of the plan without each choice that saves memory:"
    return (
        title + "\n" + table(lines, ["stage", "choice", "memory without", "saves", "step without", "costs"])
        if lines
        else ""
    )


def _saving_line(saving: MemorySaving) -> list[str]:
    saved, slower_s = saving.bytes_without - saving.num_bytes, saving.step_s - saving.step_s_without
    saves = f"nothing, adds {format_bytes(-saved)}" if saved < 0 else format_bytes(saved)
    costs = f"nothing, gains {format_seconds(-slower_s)}" if slower_s < 0 else format_seconds(slower_s)
    return [
        saving.where,
        saving.choice,
        format_bytes(saving.bytes_without),
        saves,
        format_seconds(saving.step_s_without),
        costs,
    ]


def _crossing(plan: StagedPlan) -> str:
    lines = []
    for number, stage in enumerate(plan.stages[:-1]):
        for value in dict.fromkeys(stage.graph.outputs):
            lines.append([f"{number} to {number + 1}", str(value), format_layout(stage.assignment.outputs[value.name])])
    return "Boundary tensors:\n" + table(lines, ["stages", "value", "layout"]) if lines else ""


def _hand(plan: StagedPlan) -> str:
    here = HandCosts(plan.step_s, max(plan.memory_bytes))
    return hand_table(plan.hand, here, plan.memory_limit_bytes, is_from_file=plan.is_from_file)
