"""`export`: a plan as a Python file that needs torch alone, read back and priced as hand-written functions are."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from autopar.answers.compare_plans import ChangedRow, compare
from autopar.costmodel.training import Training
from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.plain_torch.export_stages import TorchStages, in_stages
from autopar.plain_torch.module_calls import ExampleRun
from autopar.plain_torch.own_rows import check_own_rows, seeds_remark
from autopar.plain_torch.run_layout import fitted, namespace_of
from autopar.plain_torch.stage_values import check_stages
from autopar.plain_torch.torch_layout import TorchLayout, near
from autopar.plain_torch.write_hf import check_hf, fitted_hf, write_hf
from autopar.plain_torch.write_torch import write_torch
from autopar.planner.handwritten.function_plan import WrittenPlan, function_plan
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.serialise import write
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.analysis.sequence_dim import batch_arguments
from autopar.units import format_bytes, format_seconds

AnyPlan = Plan | StagedPlan
# Steps that differ by more are said to differ.
ALIKE = 0.03
_MOST_ROWS = 8


@dataclass(frozen=True)
class Exported:
    """A file's text, the plan that it is, priced as `plan` is, and `remarks` on what is other than in the plan."""

    text: str
    plan: AnyPlan
    priced: AnyPlan
    remarks: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The predicted steps of both, and whether they differ."""
        before, after = self.plan.step_s, self.priced.step_s
        share = after / before - 1
        return (
            f"Predicted step: of the plan {format_seconds(before)}, of this file {format_seconds(after)} ({share:+.1%})"
            + ("." if abs(share) <= ALIKE else ", for what differs below.")
        )

    @cached_property
    def differences(self) -> tuple[str, ...]:
        """The decisions of the plan that the file has otherwise, with what each costs a step, largest first."""
        return tuple(map(_told, self.rows))

    @cached_property
    def rows(self) -> Sequence[ChangedRow]:
        """The decisions that differ."""
        return compare(self.plan, self.priced).rows if self.plan.step_s else ()


def export(
    plan: AnyPlan,
    model: nn.Module,
    path: str | os.PathLike,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    to: str = "torch",
) -> Exported:
    """Write the file at `path`, with `parallelize(model, mesh)` in calls of torch alone, of a plan with stages with
    `pipeline(model, mesh, loss_fn)`; `to="hf"`: with `distributed_config()` for a model of transformers.

    `args`, `kwargs`: the batch for which `plan` was made. What the library cannot express is the nearest that it can,
    as comments in the file say, with prices. PlanError, without a file, if no plan of its calls is near.
    """
    if to not in ("torch", "hf"):
        raise ValueError(f"to={to!r}: expected 'torch' or 'hf'")
    if plan.training.param_dtype and to == "hf":
        raise PlanError(
            f"the plan computes in {plan.training.param_dtype} over parameters of another dtype (param_dtype), which"
            " transformers' distributed_config has no word for: export to torch, or a plan made without it"
        )
    exported = (export_hf if to == "hf" else export_torch)(plan, model, args, kwargs or {})
    write(path, exported.text)
    return exported


def export_torch(plan: AnyPlan, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exported:
    """The content of the file that `export` writes for torch."""
    plans = plan.stages if isinstance(plan, StagedPlan) else (plan,)
    bare = skeleton(model)
    trial = ExampleRun(bare, tuple(args), kwargs, [each.graph for each in plans])
    stages = in_stages(plan, trial) if isinstance(plan, StagedPlan) else None
    text = stages.text if stages else ""
    layouts = near(plans, bare, in_stages=stages is not None)
    if isinstance(plan, StagedPlan) and plan.schedule.is_halved:
        layouts = map(_never_freed, layouts)
    layouts = map(partial(_in_dtypes, plans[0].training), layouts)
    layout, made = _nearest(plan, stages, layouts, lambda layout: fitted(_check_dtypes(layout), trial), trial)
    made = replace(made, text=write_torch(layout, bare, _notes(made), text))
    if stages:
        check_stages(made.text, trial)
    return made


def _in_dtypes(training: Training, layout: TorchLayout) -> TorchLayout:
    """The layout whose fully_shard computes, and sums gradients, in the dtypes of a plan that computes in another."""
    both = {"param_dtype": training.param_dtype, "reduce_dtype": training.reduce_dtype}
    return replace(layout, dtypes={name: dtype for name, dtype in both.items() if dtype and training.param_dtype})


def _check_dtypes(layout: TorchLayout) -> TorchLayout:
    """The layout; PlanError if nothing in it computes in the plan's dtype."""
    if layout.dtypes and not layout.shard_axes:
        raise PlanError(
            f"whole parameters are not computed with in {layout.dtypes['param_dtype']}: of torch only fully_shard casts"
            " them, so export a plan that splits them (--hand zero2 or zero3)"
        )
    return layout


def _never_freed(layout: TorchLayout) -> TorchLayout:
    """The layout whose gathered parameters stay until the step ends. torch's zero-bubble schedules make gradients of
    weights after those of inputs, when fully_shard has summed what it knew of: with freed parameters they are lost
    (torch 2.13, seen in training).
    """
    return replace(layout, kept=frozenset(name for stack in layout.stacks for name in stack.names()) | {""})


def export_hf(plan: AnyPlan, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exported:
    """The content of the file that `export` writes for transformers, priced as the same plan in calls of torch."""
    check_hf(plan, model)
    bare = skeleton(model)
    trial = ExampleRun(bare, tuple(args), kwargs, [plan.graph])
    layouts = near([plan], bare, products=(nn.Linear,)) if isinstance(plan, Plan) else ()
    layout, made = _nearest(plan, None, layouts, lambda layout: fitted_hf(layout, trial), trial)
    return replace(made, text=write_hf(layout, model, _notes(made)))


def _nearest(
    plan: AnyPlan,
    stages: TorchStages | None,
    layouts: Iterable[TorchLayout],
    fit: Callable[[TorchLayout], tuple[TorchLayout, str]],
    example: ExampleRun,
) -> tuple[TorchLayout, Exported]:
    """The layout with most of the plan's decisions, and its price; `fit`: (a layout that runs, what differs)."""
    reasons: list[str] = []
    found: list[tuple[TorchLayout, AnyPlan, tuple[str, ...]]] = []
    for layout in layouts:
        try:
            told = _check_rows(layout, plan, example)
            layout, reason = fit(layout)
            text = write_torch(layout, example.model, stages=stages.text if stages else "")
            priced, remarks = read_back(text, stages.plan if stages else plan, example.model)
        except PlanError as error:
            where = ", ".join(layout.names(layout.tensor_axes)) or "no axis"
            reasons.append(f"Tensors split on {where} were tried: {error}")
            continue
        found.append((layout, priced, (*(f"{reason}." for _ in range(bool(reason))), *told, *remarks)))
    if not found:
        raise PlanError(
            f"no calls of torch's libraries are near this plan, whose step is {format_seconds(plan.step_s)}: "
            + "; ".join(reasons)
        )
    layout, priced, remarks = min(found, key=lambda one: _distance(plan, one[1]))
    remarks = (*(stages.remarks if stages else ()), *remarks, *_too_large(priced), *reasons)
    return layout, Exported("", plan, priced, remarks)


def read_back(text: str, plan: AnyPlan, model: nn.Module) -> tuple[AnyPlan, tuple[str, ...]]:
    """(the plan of the file's function, priced for the cluster of `plan`, sentences on what is not priced as it is)."""
    function = namespace_of(text)["parallelize"]

    def read(one: Plan) -> WrittenPlan:
        request = PlanRequest(training=one.training, memory_limit_bytes=plan.memory_limit_bytes)
        return function_plan(function, "parallelize.py", model, one.graph, one.mesh, one.cluster, request)

    if isinstance(plan, Plan):
        written = read(plan)
        return written.plan, written.remarks
    stages = [read(stage) for stage in plan.stages]
    whole = replace(plan, stages=tuple(stage.plan for stage in stages), lower_bound_s=0.0, hand={}, peak_bytes=())
    return whole, tuple(dict.fromkeys(remark for stage in stages for remark in stage.remarks))


def _distance(plan: AnyPlan, other: AnyPlan) -> tuple[bool, int, float]:
    """The order of layouts: those within the memory limit first, then those with the most decisions of `plan`."""
    return max(other.memory_bytes) > plan.memory_limit_bytes, -compare(plan, other).num_same, other.step_s


def _check_rows(layout: TorchLayout, plan: AnyPlan, example: ExampleRun) -> tuple[str, ...]:
    """`check_own_rows` of the ranks that split the batch, and the microbatches; PlanError if they do not divide it."""
    ranks = math.prod(layout.mesh.shape[axis] for axis in layout.data_axes)
    number = plan.schedule.num_microbatches if isinstance(plan, StagedPlan) else 1
    for item in batch_arguments(plan.graph):
        if item.value.shape[0] % (ranks * number):
            among = f" in {number} microbatches" if number > 1 else ""
            raise PlanError(f"{ranks} ranks do not divide the {item.value.shape[0]} rows of {item.fqn}{among}")
    return (*check_own_rows(plan.graph, ranks * number, example), *seeds_remark(plan.graph))


def _too_large(priced: AnyPlan) -> list[str]:
    need = max(priced.memory_bytes)
    if need <= priced.memory_limit_bytes:
        return []
    limit = format_bytes(priced.memory_limit_bytes)
    return [f"By its estimate this file takes {format_bytes(need)} of a device's memory, over the limit of {limit}."]


def _notes(exported: Exported) -> list[str]:
    plan = exported.plan
    notes = [
        f"For mesh {plan.mesh}, written by autopar, which it does not need.",
        f"Cluster {plan.cluster.name}, optimizer {plan.training.described}. {exported.summary}",
    ]
    notes += list(exported.remarks)
    if exported.differences:
        notes.append(
            "What differs from the plan, largest first (layouts by mesh axis: S(d) split, B whole, P pending sum):"
        )
        notes += [f"- {told}" for told in exported.differences[:_MOST_ROWS]]
        rest = exported.rows[_MOST_ROWS:]
        if rest:
            notes.append(f"- {len(rest)} more: {_signed(sum(row.change_s for row in rest))} together")
    return notes


def _told(row: ChangedRow) -> str:
    copies = f" x {len(row.copies)}" if len(row.copies) > 1 else ""
    return (
        f"{row.name}{copies}: {row.before or 'none'} in the plan, {row.after or 'none'} here, {_signed(row.change_s)}"
    )


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))} a step"
