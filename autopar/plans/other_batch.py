"""`of_other_batch`: a plan in stages for a batch of another size, as the last one of an epoch is.

Parameters stay where they are and as they are laid out. The number of microbatches that was planned may not divide the
batch, and the axes of the mesh may not divide a microbatch: then there are more or fewer, equally large, so that the
mean of their losses is that of the batch, and what does not divide is whole on each rank.
"""

from dataclasses import replace

from autopar.errors import AutoparError, MicrobatchError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.passes.keep_loss import loss_only
from autopar.ir.print_graph import fingerprint
from autopar.plans.fit_assignment import fit_assignment
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan, stage_graphs
from autopar.plans.validate import check_crossing
from autopar.sbp.assignment import Assignment
from autopar.sbp.microbatch.microbatch_graph import microbatch_counts
from autopar.sbp.microbatch.split_batch import num_samples
from autopar.schedule.orders import Schedule, can_run, num_in_flight, num_waiting

# How many numbers of microbatches are tried: those of microbatches that are not larger than planned, and larger ones.
_MOST_SMALLER, _MOST_LARGER = 3, 2


def of_other_batch(plan: StagedPlan, graph: Graph) -> StagedPlan:
    """The plan for a graph of the same model with other shapes: the same one if it divides them, else the fastest of
    some with other numbers of microbatches, of those that take no more memory than planned if there are any.

    MicrobatchError or PlanError if that is impossible.
    """
    try:
        return _made(plan, graph, plan.schedule, [stage.assignment for stage in plan.stages])
    except (MicrobatchError, PlanError, ValueError):  # the last: it has no such ops as the stages begin with
        if _shapes(graph) == _shapes(plan.graph):  # it is the model that is another
            raise
    made, reason = [], None
    for count in _counts(plan, graph):
        if (schedule := _schedule(plan.schedule, count)) is not None:
            try:
                made.append(_made(plan, graph, schedule))
            except (AutoparError, ValueError) as error:
                reason = error
    if not made:
        raise MicrobatchError(
            f"a batch of {num_samples(graph)} cannot run in the stages that were planned for {num_samples(plan.graph)}:"
            f" leave a short last batch out (drop_last=True of a DataLoader), or pad it; {reason}"
        ) from reason
    return min(made, key=lambda one: (not _takes_no_more(one, plan), one.step_s))


def goes_by(plan: StagedPlan, graph: Graph, *, trains: bool) -> bool:
    """Whether the `graph` goes by a plan that is in use: in its stages, or, of a step, because the number of
    microbatches, which may have been asked for, does not divide the batch. Otherwise it is planned anew.
    """
    schedule = plan.schedule
    if schedule.num_ranks > 1 or not trains:
        return schedule.num_ranks > 1
    return schedule.num_microbatches not in microbatch_counts(graph.once(loss_only))


def _shapes(graph: Graph) -> list[tuple[int, ...]]:
    return [item.value.shape for item in graph.of_kind("argument")]


def _counts(plan: StagedPlan, graph: Graph) -> list[int]:
    """The numbers of microbatches to try, first those whose microbatches are as large as planned or nearly so."""
    rows, planned = num_samples(graph), num_samples(plan.graph) / plan.schedule.num_microbatches
    possible = microbatch_counts(graph.once(loss_only)) or (1,)  # of no rows
    smaller = [count for count in possible if rows <= planned * count]
    larger = [count for count in reversed(possible) if rows > planned * count]
    return smaller[:_MOST_SMALLER] + larger[:_MOST_LARGER]


def _schedule(planned: Schedule, count: int) -> Schedule | None:
    """The planned schedule with `count` microbatches, or gpipe, which takes fewer; None if neither can run them."""
    names = (planned.name, "gpipe")
    runs = (name for name in names if can_run(name, planned.num_stages, planned.num_ranks, count))
    return next((replace(planned, name=name, num_microbatches=count) for name in runs), None)


def _made(
    plan: StagedPlan, graph: Graph, schedule: Schedule, assignments: list[Assignment] | None = None
) -> StagedPlan:
    """The plan of `graph` under `schedule`, with these assignments of its stages or those that fit the planned ones."""
    graph = plan.training.reduced(graph)
    _, parts = stage_graphs(graph, plan.starts, schedule.num_microbatches)
    stages = []
    for number, (stage, part) in enumerate(zip(plan.stages, parts)):
        _check_parameters(number, stage.graph, part.graph)
        counts = {"num_in_flight": num_in_flight(schedule, number), "num_waiting": num_waiting(schedule, number)}
        assignment = assignments[number] if assignments else fit_assignment(stage.assignment, part.graph, stage.mesh)
        saved = replace(
            stage,
            fingerprint=fingerprint(part.graph),
            assignment=assignment,
            training=replace(stage.training, num_microbatches=schedule.num_microbatches, **counts),
            lower_bound_s=0.0,
            peak_bytes=(),
        )
        stages.append(Plan.of_saved(saved, part.graph, stage.mesh, is_own=not stage.is_from_file))
    check_crossing(parts, [stage.assignment for stage in stages])
    training = replace(plan.training, num_microbatches=schedule.num_microbatches)
    changed = {"graph": graph, "schedule": schedule, "training": training, "stages": tuple(stages)}
    return replace(plan, **changed, lower_bound_s=0.0, peak_bytes=())


def _check_parameters(number: int, planned: Graph, cut: Graph) -> None:
    """PlanError unless the stage reads the parameters that it was planned with, which its rank holds."""
    was, now = ({item.fqn for item in graph.of_kind("parameter")} for graph in (planned, cut))
    if was != now:
        raise PlanError(
            f"stage {number} of the plan would read other parameters than planned ({min(was ^ now)!r} among them); give"
            " the model batches of one size, or compile for a mesh without a pipeline axis"
        )


def _takes_no_more(plan: StagedPlan, planned: StagedPlan) -> bool:
    """Whether no rank's estimate exceeds both the memory limit and what was planned."""
    ranks = zip(plan.memory_bytes, planned.memory_bytes, planned.rank_limits_bytes)
    return all(here <= max(there, limit) for here, there, limit in ranks)
