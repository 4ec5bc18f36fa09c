"""A module in stages as its user handles it: loading, copies, clipping, other batches, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, InfeasibleError, MicrobatchError
from autopar.plans.staged_plan import StagedPlan
from tests.runtime.staged import Sample, gradients, loss_of, plan_of_sample, sample, under
from tests.runtime.training import LEARNING_RATE, adamw, state_of, whole, worst
from tests.workers import Ranks, device_mesh
from tests.zoo import build

GPT2: dict[str, Any] = {"name": "gpt2", "has_loss_fn": True}


def _distance(model: nn.Module, truth: nn.Module) -> float:
    found, expected = state_of(model), truth.state_dict()
    return worst(found, {name: expected[name] for name in found}, LEARNING_RATE)[0]


def handled(options: dict[str, Any], plan: StagedPlan) -> dict[str, Any]:
    """Loading whole tensors, copies, clipping and calls of the module."""
    truth, case = sample(**options), sample(**options)
    model = under(plan, case)
    whole_state = {name: x + 0.1 for name, x in truth.model.state_dict().items()}
    assert not model.load_state_dict(whole_state).missing_keys
    truth.model.load_state_dict(whole_state)
    found: dict[str, Any] = {"loaded": _distance(model, truth.model), "keys": set(model.state_dict())}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*nothing.weight"):
        model.load_state_dict(whole_state | {"nothing.weight": torch.ones(1)})
    average = copy.deepcopy(model)
    assert not {id(p) for p in average.parameters()} & {id(p) for p in model.parameters()}
    loss = loss_of(truth)
    loss.backward()
    found["loss"] = abs(float(model.train_step(*case.args, **case.kwargs)) - float(loss))
    assert all(p.grad is None for p in average.parameters())
    limit = 0.3 * float(nn.utils.get_total_norm([p.grad for p in truth.model.parameters()]))
    norms = float(nn.utils.clip_grad_norm_(truth.model.parameters(), limit)), float(model.clip_grad_norm_(limit))
    found["norm"] = abs(norms[0] - norms[1]) / norms[0]
    found["clipped"] = _gradient_distance(model, truth.model)
    assert float(model.clip_grad_norm_(1e9)) == pytest.approx(limit, rel=1e-3)
    found["not clipped"] = _gradient_distance(model, truth.model)
    with torch.no_grad():
        found["loss alone"] = abs(float(model.eval().train_step(*case.args, **case.kwargs)) - float(loss))
    model.train()
    adamw(model).step()
    found["copy"] = abs(float(average.train_step(*case.args, **case.kwargs)) - float(loss))
    found["refused"] = _refusal(model, case) if plan.schedule.num_ranks > 1 else ""
    return found


def _gradient_distance(model: nn.Module, truth: nn.Module) -> float:
    found, expected = gradients(model), gradients(truth)
    return worst(found, {name: expected[name] for name in found}, 1e-6)[0]


def _refusal(model: nn.Module, case: Sample) -> str:
    with pytest.raises(AutoparError) as error:
        model(*case.args[: len(case.args) - (case.loss_fn is not None)], **case.kwargs)
    model.train_step(*case.args, **case.kwargs)  # goes on
    return str(error.value)


@pytest.mark.multirank
def test_loads_copies_clips_and_refuses(ranks4: Ranks) -> None:
    tied = {"name": "t5"}
    for options, mesh, num, schedule, limit in (
        (GPT2, "pp=2,dp=2", 2, "1f1b", 1e-9),
        (tied, "pp=2,tp=2", 4, "interleaved", 1e-5),
    ):
        plan = plan_of_sample(sample(**options), mesh, num, schedule)
        results = ranks4.run(handled, options, plan)
        for found in results:
            assert max(x for x in found.values() if isinstance(x, float)) < limit, found
            assert "train_step" in found["refused"] and "stages" in found["refused"]
        everything = set(sample(**options).model.state_dict())
        assert set.union(*(found["keys"] for found in results)) == everything
        assert all(found["keys"] < everything for found in results)


def accumulated(options: dict[str, Any]) -> dict[str, float]:
    """One stage and several microbatches: model(...) works beside train_step, and batches of other sizes."""
    truth, case = sample(**options), sample(**options)
    compiled = {"cluster": "free-links", "num_microbatches": 4, "loss_fn": case.loss_fn}
    model = autopar.compile(case.model, device_mesh((2, 2), ("dp", "tp")), args=case.args, **compiled)
    found = _next_step(model, truth, case)
    logits = model(case.args[0]).logits
    found["logits"] = worst({"": whole(logits).detach()}, {"": truth.model(case.args[0]).logits.detach()}, 1e-6)[0]
    found["norm"] = abs(
        float(nn.utils.clip_grad_norm_(truth.model.parameters(), 0.1)) - float(model.clip_grad_norm_(0.1))
    )
    found["clipped"] = _gradient_distance(model, truth.model)
    return found | {f"{key}, 16 samples": x for key, x in _next_step(model, truth, sample(batch=16, **options)).items()}


def in_stages(options: dict[str, Any]) -> dict[str, float]:
    truth, case = sample(**options), sample(**options)
    compiled = {"cluster": "free-links", "num_microbatches": 4, "schedule": "1f1b", "loss_fn": case.loss_fn}
    model = autopar.compile(case.model, device_mesh((2, 2), ("pp", "dp")), args=case.args, **compiled)
    with pytest.raises(AutoparError, match="was the target left out"):
        model.train_step(case.args[0])
    found = _next_step(model, truth, case)
    for size in (16, 6, 1):
        steps = _next_step(model, truth, sample(batch=size, **options))
        found |= {f"{key}, {size} samples": x for key, x in steps.items()}
    return found


def first_called_with_data(options: dict[str, Any]) -> dict[str, float]:
    """Nothing is planned before the first step; the optimizer is older than the plan."""
    truth, case = sample(**options), sample(**options)
    compiled = {"cluster": "free-links", "num_microbatches": 2, "schedule": "interleaved", "loss_fn": case.loss_fn}
    model = autopar.compile(case.model, device_mesh((2, 2), ("pp", "tp")), **compiled)
    optimizer, true_optimizer = adamw(model), adamw(truth.model)
    found = _next_step(model, truth, case)
    optimizer.step()
    true_optimizer.step()
    return found | {"state": _distance(model, truth.model)}


def few_samples(options: dict[str, Any]) -> dict[str, float]:
    """One sample, and three, for two ranks that would each take some: they split something else, or do the same."""
    found = {}
    for batch in (1, 3):
        truth, case = (sample(batch=batch, **options) for _ in range(2))
        compiled = {"cluster": "free-links", "loss_fn": case.loss_fn}
        model = autopar.compile(case.model, device_mesh((2, 2), ("pp", "dp")), args=case.args, **compiled)
        found |= {f"{key}, {batch} samples": x for key, x in _next_step(model, truth, case).items()}
    return found


def _next_step(model: nn.Module, truth: Sample, batch: Sample) -> dict[str, float]:
    model.zero_grad()
    truth.model.zero_grad()
    loss = loss_of(truth._replace(args=batch.args))
    loss.backward()
    found = float(model.train_step(*batch.args))
    with torch.no_grad():
        evaluated = float(model.train_step(*batch.args))
    gradients = _gradient_distance(model, truth.model)  # none were added
    return {"loss": abs(found - float(loss)), "loss alone": abs(evaluated - float(loss)), "gradients": gradients}


@pytest.mark.multirank
@pytest.mark.parametrize("run", [accumulated, in_stages, first_called_with_data, few_samples])
def test_batches_of_other_sizes_and_late_plans(ranks4: Ranks, run: Any) -> None:
    for found in ranks4.run(run, GPT2):
        assert max(found.values()) < 1e-9, found


def test_what_cannot_be_cut_so_is_refused_with_what_can() -> None:
    case = sample("gpt2", has_loss_fn=True)
    asked = {"cluster": "free-links", "args": case.args, "loss_fn": case.loss_fn}
    with pytest.raises(MicrobatchError, match=r"batch of 8 cannot be cut in 3 .*: 2, 4"):
        autopar.plan(case.model, "pp=2,dp=2", num_microbatches=3, **asked)
    with pytest.raises(InfeasibleError, match=r"blocks and a batch of 8 on pp=32 of .* fewer stages"):
        autopar.plan(case.model, "pp=32,dp=2", **asked)


def test_stages_may_lie_along_any_axis() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)))
    asked = {"cluster": "free-links", "args": (torch.zeros(8, 8),) * 2, "loss_fn": nn.functional.mse_loss}
    plans = [autopar.plan(model, mesh, **asked) for mesh in ("pp=2,dp=2", "dp=2,pp=2")]
    assert plans[0].dumps() == plans[1].dumps()


def with_stages_along_the_inner_axis(way: str) -> tuple[float, int]:
    """The largest difference from one device after a step of each rank's own rows, and the rank along dp."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
    model, x = nn.Sequential(*layers).double(), torch.randn(8, 8).double()
    loss = nn.functional.mse_loss(model(x), x)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    mesh = device_mesh((2, 2), ("dp", "pp"))
    number = mesh.get_local_rank("dp")
    own = x.chunk(2)[number]
    model.zero_grad()
    sharded = autopar.compile(
        model,
        mesh if way == "mesh" else "dp=2,pp=2",
        cluster="free-links",
        loss_fn=nn.functional.mse_loss,
        batch="local",
    )
    found = sharded.train_step(own, own)
    held = [(name, p) for name, p in model.named_parameters() if isinstance(p, DTensor)]
    gradients = [(p.grad.full_tensor() - expected[name]).abs().max() for name, p in held]
    return float(max(abs(found - loss.detach()), *gradients)), number


@pytest.mark.multirank
@pytest.mark.parametrize("way", ["mesh", "text"])
def test_ranks_keep_their_places_on_a_mesh_with_stages_along_the_inner_axis(ranks4: Ranks, way: str) -> None:
    found = ranks4.run(with_stages_along_the_inner_axis, way)
    assert max(difference for difference, _ in found) < 1e-12 and [number for _, number in found] == [0, 0, 1, 1]


def test_batch_norm_in_microbatches_is_refused() -> None:
    case = build("resnet")
    with pytest.raises(MicrobatchError, match=r"batch_norm .*stem.1 .*statistics"):
        args = *case.args, torch.zeros(8).long()
        autopar.plan(
            case.model, "dp=2", cluster="cpu", args=args, loss_fn=nn.functional.cross_entropy, num_microbatches=2
        )
