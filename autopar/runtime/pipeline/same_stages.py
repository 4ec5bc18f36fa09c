"""The plan of a call under the stages on which parameters lie already."""

from collections.abc import Sequence

from autopar.errors import AutoparError, PlanError
from autopar.ir.graph import Graph
from autopar.plans.other_batch import of_other_batch
from autopar.plans.staged_plan import StagedPlan


def same_stages(plan: StagedPlan, graph: Graph, num_held: int, changed: Sequence[str], *, trains: bool) -> StagedPlan:
    """`plan` for another graph of the model.

    `num_held`: stages on this rank. `changed`: what of the module changed since the plan was made. AutoparError if
    the graph is not run by `train_step`.
    """
    if not trains:
        raise AutoparError(
            f"the plan has {plan.schedule.num_stages} stages, of which this rank holds {num_held}:"
            " model(...) cannot run alone; call model.train_step(...), under torch.no_grad() for the loss alone,"
            " or compile for a mesh without a pipeline axis"
        )
    try:
        return of_other_batch(plan, graph)
    except (AutoparError, ValueError) as error:
        if not changed and type(error) is not PlanError:
            raise
        if not changed:
            raise PlanError(
                "the call makes other ops than those that were cut into stages, as it does under a torch.autocast that"
                " the model was not compiled in, or with other numbers and flags: expected a call as that by which it"
                f" was planned. Compile it in the state that it is trained in ({error})"
            ) from error
        raise PlanError(
            f"{', '.join(changed[:3])} changed after the model was cut into stages, whose ops it no"
            " longer has; change it before autopar.compile, or compile for a mesh without a pipeline axis"
        ) from error
