"""A tiny model on four ranks, under the plan that splits most, beside the same model on one device."""

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

import autopar
from autopar.plans.plan import Plan
from tests.models.of_libraries import build_of_library
from tests.models.tiny import build
from tests.models.written.models import PREFIX, build_written
from tests.workers import ANSWER_S, Ranks, device_mesh

# Some models compute in float32 whatever their parameters are.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 2e-3}


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model, in float64 if it can be run so, and the keywords of a call: in eval mode if it draws random numbers,
    which ranks draw otherwise. ValueError if it does so even then, and without a finite loss.
    """
    model, kwargs = _build(name)
    double = tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, kwargs)
    try:
        truth = step(copy.deepcopy(model).double(), double)
        model = model.double()
    except (RuntimeError, ValueError):
        truth, double = step(copy.deepcopy(model), kwargs), kwargs
    if not truth[""].isfinite():
        raise ValueError("on one device the loss is not a number for these inputs")
    if _is_random(model, double) and _is_random(model.eval(), double):
        raise ValueError("the model draws random numbers in eval mode too, which ranks draw otherwise")
    return model, double


def _build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    if name.startswith(PREFIX):
        return build_written(name)
    return build_of_library(name) if ":" in name else build(name)


def _is_random(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    first, second = (step(copy.deepcopy(model), kwargs, seed)[""] for seed in (5, 6))
    return not first.equal(second)


def tolerance_of(model: nn.Module) -> float:
    """The largest relative difference that counts as equal."""
    return TOLERANCES[next(model.parameters()).dtype]


def plan_for(name: str) -> Plan:
    """The plan on dp=2, tp=2 for which communication costs nothing."""
    model, kwargs = built(name)
    plan = autopar.plan(model, "dp=2,tp=2", cluster="free-links", kwargs=kwargs, time_limit_s=3)
    assert isinstance(plan, Plan)
    return plan


def loss_of(output: Any) -> torch.Tensor:
    """The model's loss, or a sum of all that it returns with a gradient, each entry weighted."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss.sum()
    terms = []
    for number, x in enumerate(tree_leaves(output)):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(number)).to(x.dtype)
            terms.append((x * weights).mean())
    return sum(terms[1:], terms[0])


def step(model: nn.Module, kwargs: dict[str, Any], seed: int = 5) -> dict[str, torch.Tensor]:
    """The loss, the gradient of each parameter that has one, and what the buffers are then."""
    torch.manual_seed(seed)
    loss = loss_of(model(**kwargs))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.numel()}
    buffers = {f"buffer {name}": x.clone() for name, x in model.named_buffers() if x.is_floating_point()}
    found = {"": loss.detach()} | gradients | buffers
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def difference(name: str, plan: Plan) -> float:
    """On every rank: the largest difference of a gradient, a buffer or the loss, relative to its largest entry and to
    what is allowed; of models written by hand, on another batch too.
    """
    model, kwargs = built(name)
    single = copy.deepcopy(model)
    parallel = autopar.compile(model, device_mesh((2, 2), ("dp", "tp")), kwargs=kwargs, plan=plan)
    return max(_apart(single, parallel, batch) for batch in (kwargs, *_other_batches(name, kwargs)))


def _other_batches(name: str, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    if not name.startswith(PREFIX):
        return []
    other = build_written(name, seed=7)[1]
    return [{key: x.to(kwargs[key].dtype) for key, x in other.items()}]


def _apart(single: nn.Module, parallel: nn.Module, batch: dict[str, Any]) -> float:
    for model in (single, parallel):
        model.zero_grad()
    truth, found = step(single, batch), step(parallel, batch)
    found = {key: x for key, x in found.items() if key in truth or not key.startswith("buffer ")}
    assert found.keys() == truth.keys(), f"gradients of {sorted(found.keys() ^ truth.keys())} on one side only"
    least = 1e-4 * max(float(x.abs().max()) for x in truth.values() if x.numel())
    apart = (
        float((found[key] - x).abs().max()) / max(float(x.abs().max()), least) for key, x in truth.items() if x.numel()
    )
    return max(math.inf if math.isnan(each) else each for each in apart) / tolerance_of(single)


def worst_of(ranks: Ranks, name: str, plan: Plan, timeout_s: float = ANSWER_S) -> float:
    """The largest difference on any rank, over that allowed."""
    return max(ranks.run(difference, name, plan, timeout_s=timeout_s))
