"""Checkpoints of torch.distributed.checkpoint, optimizer state included, move between plans, meshes, stages and one
device.
"""

import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from tests.fused_projections import case_of, plan_in_sections
from tests.runtime import training
from tests.runtime.staged import loss_of, plan_of_sample, sample, under
from tests.runtime.training import (
    LEARNING_RATE,
    adamw,
    forward_backward,
    num_uneven,
    plan_called,
    sharded,
    state_of,
    traced,
    worst,
)
from tests.runtime.uneven_model import odd_case
from tests.workers import Ranks, device_mesh
from tests.zoo import build

pytestmark = pytest.mark.multirank

GPT2: dict[str, Any] = {"name": "gpt2", "has_loss_fn": True}


class Run(NamedTuple):
    """`backward()` makes the gradients of a step."""

    model: nn.Module
    backward: Callable[[], Any]


def called(name: str, plan: tuple[tuple[int, ...], str] | None) -> Run:
    """A model that is called and whose loss goes back, under a kind of plan on a mesh or on one device."""
    case = build(name)
    if plan is not None:
        case, model = sharded(name, *plan)
        case = case._replace(model=model)
        model(*case.args, **case.kwargs)
    return Run(case.model, lambda: forward_backward(case))


def stepped(options: dict[str, Any], plan: Plan | StagedPlan | None) -> Run:
    """A model that train_step runs, and the same on one device."""
    case = sample(**options)
    if plan is None:
        return Run(case.model, lambda: loss_of(case).backward())
    model = under(plan, case)
    return Run(model, lambda: model.train_step(*case.args, **case.kwargs))


def uneven(sizes: dict[str, int], plan: tuple[tuple[int, ...], str] | None) -> Run:
    """A model of sizes that the ranks do not divide, under a kind of plan on a mesh or on one device."""
    case = odd_case(**sizes)
    if plan is not None:
        shape, kind = plan
        mesh = Mesh(shape, ("dp", "tp")[: len(shape)])
        chosen = plan_called(kind, traced(case), mesh)
        assert num_uneven(chosen) > 0
        case = training.under(chosen, case, device_mesh(shape, mesh.axis_names))
        case.model(*case.args, **case.kwargs)
    return Run(case.model, lambda: forward_backward(case))


def fused(block: dict[str, str], plan: tuple[tuple[int, ...], bool] | None) -> Run:
    """A model of this fused projection, computed in sections on all axes of a mesh or the last; or on one device."""
    case = case_of(**block)
    if plan is not None:
        shape, is_on_all = plan
        mesh = Mesh(shape, ("dp", "tp")[: len(shape)])
        chosen = plan_in_sections(traced(case), mesh, is_on_all=is_on_all, is_stored_alike=False)
        case = training.under(chosen, case, device_mesh(shape, mesh.axis_names))
        case.model(*case.args, **case.kwargs)
    return Run(case.model, lambda: forward_backward(case))


# a stage holds a part of the state, whose groups of parameters have no like on one device: it is saved by name
SAVED = {
    called: StateDictOptions(),
    uneven: StateDictOptions(),
    fused: StateDictOptions(),
    stepped: StateDictOptions(flatten_optimizer_state_dict=True),
}


def checkpoint_moves(make: Callable[[Any, Any], Run], options: Any, first: Any, second: Any) -> dict[str, float]:
    """Train a step under one plan, save, load under another and on one device, train on: all must agree with one
    device.
    """
    truth, run = make(options, None), make(options, first)
    optimizers = [adamw(each.model) for each in (truth, run)]
    for each, optimizer in zip((truth, run), optimizers):
        _step(each, optimizer)
    folder, found, saved = _folder(), {}, SAVED[make]
    checkpoint.save(_content(run.model, optimizers[1], saved), checkpoint_id=folder)
    for kind, plan in (("sharded", second), ("plain", None)):
        loaded = make(options, plan)
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                parameter.add_(0.5)
        optimizer = adamw(loaded.model)
        _load(loaded.model, optimizer, folder, saved)
        found[kind] = loaded, optimizer, _distance(loaded.model, truth.model)
    _step(truth, optimizers[0])
    distances = {kind: distance for kind, (_, _, distance) in found.items()}
    for kind, (loaded, optimizer, _) in found.items():
        _step(loaded, optimizer)
        distances[f"{kind}, trained on"] = _distance(loaded.model, truth.model)
    return distances


def _step(run: Run, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    run.backward()
    optimizer.step()


def _folder() -> str:
    """One new folder that all ranks share."""
    box = [tempfile.mkdtemp(prefix="autopar-checkpoint-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def _content(model: nn.Module, optimizer: torch.optim.Optimizer, saved: StateDictOptions) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=saved),
    }


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, saved: StateDictOptions) -> None:
    content = _content(model, optimizer, saved)
    checkpoint.load(content, checkpoint_id=folder)
    set_model_state_dict(model, content["model"])
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=saved)


def _distance(model: nn.Module, truth: nn.Module) -> float:
    found, expected = state_of(model), truth.state_dict()
    return worst(found, {name: expected[name] for name in found}, LEARNING_RATE)[0]


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_to_another_plan_and_mesh_and_to_one_device(ranks4: Ranks, name: str) -> None:
    for found in ranks4.run(checkpoint_moves, called, name, ((2, 2), "megatron"), ((4,), "zero3")):
        assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("is_from_stages", [True, False])
def test_between_stages_no_stages_and_one_device(ranks4: Ranks, is_from_stages: bool) -> None:
    plans = [
        plan_of_sample(sample(**GPT2), "pp=2,tp=2", 2, "interleaved"),
        plan_of_sample(sample(**GPT2), "dp=2,tp=2", 1),
    ]
    assert isinstance(plans[0], StagedPlan) and isinstance(plans[1], Plan)
    for found in ranks4.run(checkpoint_moves, stepped, GPT2, *(plans if is_from_stages else plans[::-1])):
        assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("plans", [(((4,), "zero3"), ((2, 2), "random:0")), (((2, 2), "random:1"), ((4,), "zero3"))])
def test_of_parts_that_differ(ranks4: Ranks, plans: tuple[Any, Any]) -> None:
    """51 tokens, 5 heads of 4: some ranks store smaller parts of a parameter and of its optimizer state, or none."""
    for found in ranks4.run(checkpoint_moves, uneven, {}, *plans):
        assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("block", ["Conv1D", "Sliced"])
def test_of_fused_projections(ranks4: Ranks, block: str) -> None:
    for found in ranks4.run(checkpoint_moves, fused, {"block": block}, ((2, 2), False), ((4,), True)):
        assert max(found.values()) < 1e-9, found
