"""Dropout on ranks: the right share is dropped, parts are dropped independently, what is whole is dropped alike on
every rank.
"""

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.codegen.emit import emit
from autopar.codegen.lower import lower
from autopar.mesh import Mesh
from autopar.runtime.seeded_rng import draw_seed, peek_seed
from autopar.runtime.sharded_module import ShardedModule, shard_module
from tests.runtime.training import forward_backward, plan_called, sharded, traced, whole, worst
from tests.workers import Ranks, device_mesh
from tests.zoo import Case, build

pytestmark = pytest.mark.multirank

AXES = ("dp", "tp")
BATCH, WIDTH, DROPPED = 32, 64, 0.25


class Drops(nn.Module):
    """Two products, each with dropout; every entry before it is positive, so that a zero was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        for parameter in self.parameters():
            parameter.data.fill_(1 / WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.dropout(self.up(x), DROPPED, self.training)
        return h, F.dropout(self.down(h), DROPPED, self.training)


def _drops(kind: str, shape: tuple[int, ...]) -> tuple[ShardedModule, torch.Tensor]:
    x = torch.ones(BATCH, WIDTH, dtype=torch.float64)
    model = Drops().double()
    axes = AXES[: len(shape)]
    plan = plan_called(kind, traced(Case(model, (x,), {}, lambda outputs: outputs[1].sum())), Mesh(shape, axes))
    torch.manual_seed(0)
    return shard_module(model, device_mesh(shape, axes), lambda *_: plan), x


def _gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def with_joined_masks(kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """How far the sharded run is from one device that drops what all ranks together dropped; and what was dropped."""
    model, x = _drops(kind, shape)
    outputs = model(x)
    found = [whole(output) for output in outputs]
    masks = [(output != 0).double() / (1 - DROPPED) for output in found]
    gradients = _gradients(model, (found[1] ** 2).sum())
    truth = Drops().double()
    h = truth.up(x) * masks[0]
    y = truth.down(h) * masks[1]
    expected = _gradients(truth, (y**2).sum())
    difference = max(
        worst(gradients, expected, 1e-6)[0], worst(dict(enumerate(found)), dict(enumerate((h, y))), 1e-6)[0]
    )
    return {
        "difference": difference,
        "dropped": [float((mask == 0).double().mean()) for mask in masks],
        "mean": float((found[0] / truth.up(x)).mean()),
        "parts": [(_coordinate(output), (_local(output) != 0).tolist()) for output in outputs],
    }


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _coordinate(x: torch.Tensor) -> tuple[int, ...]:
    """Which part of `x` this rank has: equal on ranks that have the same."""
    if not isinstance(x, DTensor):
        return ()
    return tuple(
        index if placement.is_shard() else -1 for index, placement in zip(x.device_mesh.get_coordinate(), x.placements)
    )


def _near(found: float, expected: float, deviation: float) -> bool:
    return abs(found - expected) < 5 * deviation


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["searched", "ddp", "megatron", *(f"random:{seed}" for seed in range(4))])
def test_dropout_is_that_of_one_device_with_the_joined_masks(ranks4: Ranks, kind: str, shape: tuple[int, ...]) -> None:
    reports = ranks4.run(with_joined_masks, kind, shape)
    deviation = math.sqrt(DROPPED * (1 - DROPPED) / (BATCH * WIDTH))
    for report in reports:
        assert report["difference"] <= 1e-12
        assert all(_near(dropped, DROPPED, deviation) for dropped in report["dropped"]), report["dropped"]
        assert _near(report["mean"], 1, deviation / (1 - DROPPED))
    for index in range(2):
        by_part: dict[Any, Any] = {}
        for report in reports:
            part, mask = report["parts"][index]
            assert by_part.setdefault(part, mask) == mask, (
                f"ranks that hold the same part {part} dropped different entries"
            )
        masks = list(by_part.values())
        assert all(a != b for i, a in enumerate(masks) for b in masks[:i]), "two parts dropped the same entries"


def runs() -> None:
    x, losses = torch.ones(BATCH, WIDTH, dtype=torch.float64), []
    model = autopar.compile(Drops().double(), device_mesh((2, 2), AXES), cluster="free-links")
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        losses.append([float(whole(model(x)[1]).sum()) for _ in range(3)])
    assert losses[0] == losses[1] != losses[2], losses
    assert len(set(losses[0])) == 3, "every call draws anew"
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model.eval()
    model(x)
    assert torch.equal(state, torch.get_rng_state()), "nothing is drawn where nothing is random"


def test_runs_repeat_with_their_seed(ranks4: Ranks) -> None:
    ranks4.run(runs)


def loss_with_dropout(name: str, kind: str) -> tuple[float, float, bool]:
    """Mean loss over some draws, the loss without dropout, and whether all gradients are finite."""
    case, model = sharded(name, (2, 2), kind, dropout=0.1)
    case = case._replace(model=model)
    torch.manual_seed(0)
    results = [forward_backward(case) for _ in range(4)]
    is_finite = all(bool(torch.isfinite(x).all()) for result in results for x in result.values())
    losses = [float(result["loss"]) for result in results]
    assert len(set(losses)) == 4 and dist.get_world_size() == 4
    truth = build(name)
    return sum(losses) / 4, float(forward_backward(truth)["loss"]), is_finite


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "megatron"), ("bert", "searched"), ("vgg13", "ddp")])
def test_loss_with_dropout_is_near_the_loss_without(ranks4: Ranks, name: str, kind: str) -> None:
    reports = ranks4.run(loss_with_dropout, name, kind)
    assert len(set(reports)) == 1, "the loss is the same on every rank"
    loss, truth, is_finite = reports[0]
    assert is_finite and abs(loss - truth) < 0.25, (loss, truth)


def test_dropout_inside_attention_differs_between_parts_of_the_batch() -> None:
    graph, mesh = traced(build("gpt2", dropout=0.1)), Mesh((2,), ("dp",))
    source = emit(lower(graph, mesh, plan_called("ddp", graph, mesh).assignment))
    calls = [line for line in source.splitlines() if "aten.scaled_dot_product_attention.default(" in line]
    assert len(calls) == 2
    assert all(re.match(r" *with seeded\(seed, \d+, axis_dp\): ", call) for call in calls)


def test_a_seed_is_drawn_on_the_host_whatever_the_default_device() -> None:
    torch.manual_seed(3)
    expected = draw_seed()
    torch.manual_seed(3)
    with torch.device("meta"):
        assert peek_seed() == expected
        assert draw_seed() == expected
