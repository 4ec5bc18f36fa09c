"""`--html`: a page of a plan with its hand plans beside it, or of a sweep."""

from collections.abc import Callable, Iterator

from torch import nn

from autopar.errors import PlanError
from autopar.page.page_data import plan_page
from autopar.page.plan_view import PlanView, plan_view
from autopar.page.write_page import write_page
from autopar.planner.handwritten.hand_plan import parse_hand_plan
from autopar.planner.handwritten.named_plan import named_plans
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan

Tell = Callable[[str], None]


def write_plan_page(
    path: str, title: str, plans: dict[str, Plan | StagedPlan], model: nn.Module, request: PlanRequest, tell: Tell
) -> None:
    """Write the page of the first of `plans`, by the names that it gives them, beside the others and the hand plans
    that it was compared with.
    """
    tell("page")
    views = [plan_view(name, plan) for name, plan in plans.items()]
    found = next(iter(plans.values()))
    views += _by_hand(found, model, request, tell)
    write_page(path, plan_page(title, views, found.hand))


def _by_hand(plan: Plan | StagedPlan, model: nn.Module, request: PlanRequest, tell: Tell) -> Iterator[PlanView]:
    """The views of the hand plans that a plan without stages was compared with."""
    if isinstance(plan, StagedPlan):
        return
    names = [name for name in plan.hand if _is_name(name, plan)]
    made = named_plans(names, model, plan.graph, plan.mesh, plan.cluster, request)
    for number, name in enumerate(names):
        tell(f"page: hand plan {number + 1} of {len(names)}")
        yield plan_view(name, next(made))


def _is_name(name: str, plan: Plan) -> bool:
    """Whether the name, which a plan's file may have changed, is that of a hand plan on the plan's mesh."""
    try:
        return bool(parse_hand_plan(name, plan.mesh))
    except PlanError:
        return False
