"""`in_stages`: a plan in stages as a pipeline of torch's, with stages that start where modules do."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.plain_torch.module_calls import ExampleRun
from autopar.plain_torch.module_stages import ModuleStages, stages_by_module
from autopar.plain_torch.write_stages import stages_text
from autopar.plans.staged_plan import StagedPlan, stage_graphs
from autopar.sbp.analysis.sequence_dim import batch_arguments
from autopar.units import format_bytes


@dataclass(frozen=True)
class TorchStages:
    """`text`: `stages_text` of the pipeline; `plan`: the plan cut as it is, with the layouts of the plan's own cut."""

    text: str
    plan: StagedPlan
    remarks: tuple[str, ...]


def in_stages(plan: StagedPlan, example: ExampleRun) -> TorchStages:
    """The pipeline nearest to the plan's; PlanError if torch's pipelines cannot have the model's stages or batch."""
    schedule = plan.schedule
    if schedule.num_stages == 1:
        raise PlanError(
            f"a plan in {schedule.num_microbatches} microbatches without stages cannot be exported: torch has no"
            " schedule for it; export a plan of one microbatch, and call backward for each of several in your loop"
        )
    micro, _ = stage_graphs(plan.graph, plan.starts, schedule.num_microbatches)
    made = stages_by_module(micro.graph, plan.starts, schedule.num_microbatches, example)
    names = list(_positional(example))
    _check_split(plan, example)
    stages = tuple(replace(old, graph=new.graph) for old, new in zip(plan.stages, made.stages))
    return TorchStages(
        stages_text(made, schedule, plan.mesh.axis_names, names),
        replace(plan, starts=made.starts, stages=stages),
        tuple(_remarks(plan, made, example.model)),
    )


def _positional(example: ExampleRun) -> Iterator[str]:
    """The names of the model's positional arguments: stages are called by names."""
    known = inspect.signature(example.model.forward).parameters.values()
    for parameter in list(known)[: len(example.args)]:
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise PlanError(
                f"the model takes {parameter.name!r} by position alone, and stages of torch's pipelines take what is"
                " not sent to them by name; give the forward of the model names"
            )
        yield parameter.name


def _check_split(plan: StagedPlan, example: ExampleRun) -> None:
    """PlanError if a tensor of the batch has no rows: torch cuts each in microbatches."""
    rows = batch_arguments(plan.graph)[0].value.shape[0]
    given: list[Any] = [*example.args, *example.kwargs.values()]
    other = next((x for x in given if isinstance(x, torch.Tensor) and (not x.shape or x.shape[0] != rows)), None)
    if other is not None:
        raise PlanError(
            f"an argument of the model has shape {list(other.shape)}, and torch's pipelines cut each tensor of a batch"
            f" of {rows} rows in {plan.schedule.num_microbatches} microbatches; leave it out, or make it in the model"
        )


def _remarks(plan: StagedPlan, made: ModuleStages, model: nn.Module) -> Iterator[str]:
    for number, (before, after) in enumerate(zip(plan.starts, made.starts), 1):
        if before != after:
            yield f"Stage {number} starts at {made.first[number]}, in the plan at the op {before}."
    for stage in sorted({stage for stage, _ in made.frozen}):
        names = [name for one, name in made.frozen if one == stage]
        size = sum(p.numel() * p.element_size() for p in map(model.get_parameter, names))
        yield (
            f"Stage {stage} has {format_bytes(size)} of parameters that others train, {names[0]} first: code outside of"
            " their modules reads them. Take theirs for checkpoints."
        )
