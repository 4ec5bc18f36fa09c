"""The generated programs of a plan, as text."""

from autopar.codegen.emit import emit
from autopar.codegen.lower import lower
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan


def source_of(plan: Plan | StagedPlan) -> str:
    """The source of what each rank runs; of a plan in stages, one program after the other."""
    if isinstance(plan, Plan):
        return emit(lower(plan.graph, plan.mesh, plan.assignment))
    how = {"is_split": True, "is_halved": plan.schedule.is_halved}
    texts = (emit(lower(stage.graph, stage.mesh, stage.assignment, **how)) for stage in plan.stages)
    return "\n".join(f"# stage {number}\n{text}" for number, text in enumerate(texts))
