"""`write_hf`: the Python file of a `TorchLayout` as transformers' `DistributedConfig`, of transformers 5.23."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from autopar.errors import PlanError
from autopar.ir.print_graph import printable
from autopar.plain_torch.block_stacks import wrapped
from autopar.plain_torch.module_calls import ExampleRun
from autopar.plain_torch.run_layout import fitted
from autopar.plain_torch.torch_layout import COLUMNS, GATHERED, ROWS, TABLE, TorchLayout
from autopar.plain_torch.write_torch import WIDTH
from autopar.planner.handwritten.hf_tp_plan import generic
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan

_STYLES = {COLUMNS: "colwise", GATHERED: "colwise_gather_output", ROWS: "rowwise", TABLE: "embedding_rowwise"}
# What a plan of the model's own is overridden with: a dictionary in DistributedConfig is merged with that, key by key.
_WHOLE = "replicate"
_SUMMED = "replicated_with_grad_allreduce"
_FREED, _KEPT = "free_full_weight", "keep_full_weight"


def check_hf(plan: Plan | StagedPlan, model: nn.Module) -> None:
    """PlanError if `model` is none of transformers, or the plan one that transformers cannot train."""
    classes = {(each.__module__, each.__name__) for each in type(model).__mro__}
    if ("transformers.modeling_utils", "PreTrainedModel") not in classes:
        raise PlanError(
            f"--to hf: {type(model).__name__} is no model of transformers (PreTrainedModel), which alone reads such a"
            " plan; take --to torch"
        )
    if isinstance(plan, StagedPlan):
        raise PlanError(
            f"--to hf: this plan has {plan.schedule.num_stages} stages and {plan.schedule.num_microbatches}"
            " microbatches; transformers' pipelines generate text alone: layers are split evenly whatever pp_plan says,"
            " and no gradient is sent back; take --to torch, or a plan without stages and microbatches"
        )


def fitted_hf(layout: TorchLayout, example: ExampleRun) -> tuple[TorchLayout, str]:
    """(the layout as transformers has it, what differs); PlanError if it has none that is near."""
    first = layout.tensor_axes[0] if layout.tensor_axes else len(layout.mesh.shape)
    if layout.tensor_axes and any(axis > first for axis in layout.data_axes):
        raise PlanError(
            f"transformers splits tensors between neighbouring ranks, and {', '.join(layout.names(layout.tensor_axes))}"
            f" is not the last axis of mesh {layout.mesh}; change the order of the axes"
        )
    layout, reason = fitted(layout, example, may_divide=False)
    reasons = [reason] if reason else []
    blocks = [name for stack in layout.stacks for name in stack.names()]
    kept, again = set(blocks) & layout.kept, set(layout.recomputed)
    is_kept, is_again = 2 * len(kept) > len(blocks), 2 * len(again) > len(blocks)
    if layout.data_axes and kept and kept != set(blocks):
        reasons.append("all blocks are gathered again for backward or none is: transformers has one rule for all")
    if again and again != set(blocks):
        reasons.append("all blocks compute their activations again or none does: transformers has one switch for all")
    outside = layout.kept & {""}
    layout = replace(
        layout, kept=frozenset(blocks if is_kept else ()) | outside, recomputed=tuple(blocks) if is_again else ()
    )
    _by_pattern(_all_styles(layout, example.model), example.model)
    return layout, "; ".join(reasons)


def write_hf(layout: TorchLayout, model: nn.Module, notes: Iterable[str]) -> str:
    """The text of a file with `distributed_config()`; `notes`: paragraphs at its beginning, as comments."""
    styles = _by_pattern(_all_styles(layout, model), model)
    own = getattr(model, "_tp_plan", None) or {}
    plan = styles | _held(layout) | {name: _WHOLE for name in own if name not in styles}
    sizes, tables = [], []
    if layout.tensor_axes:
        sizes += [f"tp_size={layout.num_tensor}", "tp_plan=TP_PLAN"]
        tables.append("\n".join(_table("TP_PLAN", plan, {name: own.get(name) for name in plan})))
    if layout.data_axes:
        copies = tuple(axis for axis in layout.data_axes if axis not in layout.shard_axes)
        for name, axes in (("dp_replicate_size", copies), ("fsdp_size", layout.shard_axes)):
            sizes.append(f"{name}={math.prod(layout.mesh.shape[axis] for axis in axes)}")
        sizes.append("fsdp_plan=FSDP_PLAN")
        tables.append("\n".join(_table("FSDP_PLAN", _fsdp_plan(layout, model), {})))
    notes = [*notes, *_told(layout)]
    head = "\n".join(f"# {line}".rstrip() for note in notes for line in wrapped(printable(note), WIDTH))
    function = (
        "def distributed_config() -> DistributedConfig:\n"
        '    """For `from_pretrained(..., distributed_config=distributed_config())` on each of'
        f' {layout.mesh.num_devices} ranks."""\n'
        f"    return DistributedConfig({', '.join(sizes)})"
    )
    parts = ["from transformers.distributed import DistributedConfig", *tables]
    return f"{head}\n\n" + "\n\n".join(parts) + f"\n\n\n{function}\n"


def _held(layout: TorchLayout) -> dict[str, str]:
    """Name of a parameter that a module without a style has for one with, which ties it -> that one's style."""
    ties = ((first.rpartition(".")[0], name) for first, name in layout.ties)
    return {
        generic(name): _STYLES[layout.styles[owner]]
        for owner, name in ties
        if name.rpartition(".")[0] not in layout.styles
    }


def _told(layout: TorchLayout) -> Iterator[str]:
    if layout.data_axes:
        yield (
            "Each data rank takes rows of its own of the batch, the ranks of tp the same; the mean of the ranks' losses"
            " is that of one device."
        )
    if layout.recomputed:
        yield "The plan computes activations of blocks again: call model.gradient_checkpointing_enable() after loading."
    if layout.summed:
        yield (
            f"{_SUMMED} (transformers 5.23) sums all that a gradient holds at each backward: call backward once a step."
        )


def _all_styles(layout: TorchLayout, model: nn.Module) -> dict[str, str]:
    """FQN of a module -> its style in transformers' words."""
    found = {name: _STYLES[style] for name, style in layout.styles.items()}
    for name, parameters in layout.summed.items():
        own = {key for key, x in model.get_submodule(name).named_parameters(recurse=False) if x.requires_grad}
        if not name or own - set(parameters):
            raise PlanError(
                f"{name or 'the model itself'} has parameters of which only {', '.join(parameters)} meet parts of"
                f" tensors, and transformers sums the gradients of all ({_SUMMED})"
            )
        found[name] = _SUMMED
    return found


def _by_pattern(styles: Mapping[str, str], model: nn.Module) -> dict[str, str]:
    """Name with "*" for layers -> style; PlanError where layers differ."""
    found: dict[str, str] = {}
    for name, _ in model.named_modules():
        pattern, style = generic(name), styles.get(name, "")
        if found.setdefault(pattern, style) != style:
            raise PlanError(f"layers differ in {pattern} ({found[pattern] or 'whole'}, {name} {style or 'whole'}), and"
                            " transformers has one rule for all")  # fmt: skip
    return {pattern: style for pattern, style in found.items() if style}


def _fsdp_plan(layout: TorchLayout, model: nn.Module) -> dict[str, str]:
    """Blocks by whether they are gathered again; of what the model's own plan has besides, all alike."""
    outside = _KEPT if "" in layout.kept else _FREED
    names = {generic(name) for name, _ in model.named_modules()}
    plan = {name: outside for name in getattr(model, "_fsdp_plan", None) or {} if name in names}
    for stack in layout.stacks:
        plan |= {generic(name): _KEPT if name in layout.kept else _FREED for name in stack.names()}
    return plan


def _table(name: str, plan: Mapping[str, str], own: Mapping[str, str | None]) -> Iterator[str]:
    yield f"{name} = {{"
    for key, style in plan.items():
        before = own.get(key, style)
        note = "" if before in (style, None) else f"  # the model's own: {printable(str(before))}"
        yield f"    {key!r}: {style!r},{note}"
    yield "}"
