"""`--html`: a page of a plan with its hand plans beside it, or of a sweep."""

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from autopar.errors import PlanError
from autopar.page.page_data import MOST_BYTES, MOST_JSON_BYTES, num_bytes, plan_page
from autopar.page.plan_view import PlanView, plan_view
from autopar.page.write_page import write_page
from autopar.planner.handwritten.hand_plan import parse_hand_plan
from autopar.planner.handwritten.named_plan import named_plans
from autopar.planner.request import PlanRequest
from autopar.planner.stages_by_hand import plans_of_points
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
    others = plans_of_points(found) if isinstance(found, StagedPlan) else _by_hand(found, model, request)
    views += _with_room(views, others, tell)
    write_page(path, plan_page(title, views, found.hand))


def _with_room(
    views: Sequence[PlanView], plans: Iterator[tuple[str, Plan | StagedPlan]], tell: Tell
) -> Iterator[PlanView]:
    """The views of hand plans, the first of them, for which a page of `views` has room."""
    packed, parsed = num_bytes(views)
    for number, (name, plan) in enumerate(plans):
        tell(f"page: hand plan {number + 1}")
        view = plan_view(name, plan)
        more = num_bytes([view])
        packed, parsed = packed + more[0], parsed + more[1]
        if packed > MOST_BYTES or parsed > MOST_JSON_BYTES:
            return
        yield view


def _by_hand(plan: Plan, model: nn.Module, request: PlanRequest) -> Iterator[tuple[str, Plan]]:
    """The hand plans that a plan without stages was compared with."""
    names = [name for name in plan.hand if _is_name(name, plan)]
    yield from zip(names, named_plans(names, model, plan.graph, plan.mesh, plan.cluster, request))


def _is_name(name: str, plan: Plan) -> bool:
    """Whether the name, which a plan's file may have changed, is that of a hand plan on the plan's mesh."""
    try:
        return bool(parse_hand_plan(name, plan.mesh))
    except PlanError:
        return False
