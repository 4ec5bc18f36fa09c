"""`short_html`: a plan in a few lines, as notebooks show it: static, without style of its own or script."""

from collections.abc import Iterator
from html import escape

from autopar.explain.common_text import unfit
from autopar.ir.print_graph import printable
from autopar.plans.plan import Plan
from autopar.plans.serialise import HandCosts
from autopar.plans.staged_plan import StagedPlan
from autopar.units import format_bytes, format_seconds

_MOST_COMPARED = 5


def short_html(plan: Plan | StagedPlan) -> str:
    """Step, bound, memory, schedule, and the fastest hand plans, as two tables."""
    head = f"Plan for {plan.mesh} on {plan.cluster.name}"
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in _facts(plan))
    return f"<div><b>{_text(head)}</b><table>{rows}</table>{_compared(plan)}</div>"


def _facts(plan: Plan | StagedPlan) -> Iterator[tuple[str, str]]:
    claim = " (from the plan's file, not verified by this run)" if plan.is_from_file else ""
    yield "step", f"{format_seconds(plan.step_s)}, predicted"
    if plan.lower_bound_s:
        yield "bound", f"{format_seconds(plan.lower_bound_s)} for any {plan.bound_of}, gap {plan.gap:.1%}{claim}"
    if plan.found_by:
        yield "found by", f"{plan.found_by}{claim}"
    used, limit = plan.fullest_bytes
    of = "" if limit == float("inf") else f" of {format_bytes(limit)}{unfit(used, limit)}"
    yield "memory per device", f"{format_bytes(used)}{of}"
    if isinstance(plan, StagedPlan):
        yield "schedule", f"{plan.schedule}, bubble {plan.timeline.bubble:.1%}"
    yield "more", "print(plan.explain()), or autopar explain --html FILE"


def _compared(plan: Plan | StagedPlan) -> str:
    if not plan.hand:
        return ""
    here = HandCosts(plan.step_s, max(plan.memory_bytes))
    fastest = sorted(plan.hand.items(), key=lambda item: item[1].step_s)[:_MOST_COMPARED]
    rows = []
    for name, costs in (("this plan", here), *fastest):
        memory = format_bytes(costs.memory_bytes) + unfit(costs.memory_bytes, plan.memory_limit_bytes)
        cells = name, format_seconds(costs.step_s), memory
        rows.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><tr><th>plan</th><th>step</th><th>memory</th></tr>{''.join(rows)}</table>"


def _text(text: str) -> str:
    return escape(printable(text))
