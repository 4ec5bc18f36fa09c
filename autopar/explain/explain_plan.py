"""A plan of either kind as text, as JSON and as a trace."""

import json
from typing import Any

from autopar.explain.memory_over_time import memory_over_time
from autopar.explain.report import report
from autopar.explain.short_html import short_html
from autopar.explain.staged_text import format_staged, staged_json
from autopar.explain.step_events import step_events
from autopar.explain.text import format_report
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.schedule.timeline import trace_json


def explain(plan: Plan | StagedPlan) -> str:
    """The plan as text: every choice with its cost, and the alternatives."""
    return format_staged(plan) if isinstance(plan, StagedPlan) else format_report(report(plan))


def plan_json(plan: Plan | StagedPlan) -> dict[str, Any]:
    """The content of `explain` as plain dicts, lists, strings and numbers."""
    return staged_json(plan) if isinstance(plan, StagedPlan) else report(plan).as_json()


def plan_html(plan: Plan | StagedPlan) -> str:
    """The plan in short as HTML, for notebooks."""
    return short_html(plan)


def plan_trace(plan: Plan | StagedPlan) -> str:
    """A trace file of the planned step: of the ranks of a pipeline, or without stages of what a device does on compute
    and on each link level.
    """
    if isinstance(plan, StagedPlan):
        over_time = {rank: memory_over_time(plan, rank) for rank in range(plan.schedule.num_ranks)}
        memory = {rank: [(x.start_s, x.bytes_by_kind) for x in row] for rank, row in over_time.items()}
        return trace_json({"planned": plan.timeline}, memory, plan.once_s)
    return json.dumps({"traceEvents": list(step_events(plan)), "displayTimeUnit": "ms"}, indent=1)
