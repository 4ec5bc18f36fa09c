"""Which parameters and buffers each rank of a pipeline holds."""

import math
from collections.abc import Iterator

from autopar.ir.graph import Graph, Input
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.dtensor_state import stateful
from autopar.sbp.placement import Layout


def trained(graph: Graph) -> Iterator[Input]:
    """The parameters that get a gradient."""
    return (item for item in graph.of_kind("parameter") if item.value.needs_grad)


def held_by(plan: StagedPlan, rank: int) -> tuple[tuple[Input, ...], dict[str, Layout]]:
    """The parameters and buffers that `rank` of the pipeline holds, and the layout of each by the name of its value:
    those of its stages, and the `guest` of a rank without any to train.
    """
    own = {number: plan.stages[number] for number in plan.schedule.stages_of(rank)}
    if (found := guest(plan)) is not None and rank in holders(plan)[found[1].fqn]:
        own.setdefault(found[0], plan.stages[found[0]])
    held: dict[str, Input] = {}
    layouts: dict[str, Layout] = {}
    for number, stage in own.items():
        is_own = plan.schedule.rank_of(number) == rank
        for item in stateful(stage.graph):
            if is_own or (found is not None and item.fqn == found[1].fqn):
                held[item.fqn] = item
                layouts[item.value.name] = stage.assignment.layouts[item.value.name]
    return tuple(held.values()), layouts


def guest(plan: StagedPlan) -> tuple[int, Input] | None:
    """The smallest parameter that is trained, and the number of its stage; None if nothing is.

    Ranks whose stages are frozen hold it too and add nothing to its gradient: an optimizer of no parameters is an error
    of torch's, on that rank alone.
    """
    items = ((number, item) for number, stage in enumerate(plan.stages) for item in trained(stage.graph))
    return min(items, key=lambda found: (math.prod(found[1].value.shape), found[1].fqn, found[0]), default=None)


def holders(plan: StagedPlan) -> dict[str, tuple[int, ...]]:
    """FQN of each trained parameter -> the ranks of the pipeline that hold it."""
    held_on: dict[str, set[int]] = {}
    for number, stage in enumerate(plan.stages):
        for item in trained(stage.graph):
            held_on.setdefault(item.fqn, set()).add(plan.schedule.rank_of(number))
    if (shared := guest(plan)) is not None:
        held_on[shared[1].fqn] |= set(range(plan.schedule.num_ranks)) - set().union(*held_on.values())
    return {fqn: tuple(sorted(ranks)) for fqn, ranks in held_on.items()}
