"""Models whose products are in float8 train on ranks as on one device: scales are taken over all ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.costmodel.cluster.hardware import LinkLevel
from autopar.costmodel.cluster.load_cluster import load_cluster
from tests.float8 import ROWWISE, TENSORWISE, in_float8
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank

# of computing that takes long, so that a small model is split
SLOW = replace(
    load_cluster("cpu"),
    levels=(LinkLevel(0, 1e-9, 1e12),),
    flops_per_s={"float32": 1e8},
    memory_bandwidth_bytes_per_s=1e8,
)
COLUMNS, ROWS = ("q", "up"), ("o", "down")


class Layer(nn.Module):
    """A gated residual layer of four products."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.o(self.q(self.norm(x)).tanh())
        return y + self.down(nn.functional.gelu(self.up(self.norm(y))))


class Regression(nn.Module):
    """Layers and a mean of squares."""

    def __init__(self, scaling: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = in_float8(nn.Sequential(Layer(), Layer()), scaling)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - wanted).square().mean()


def gradients_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    loss = model(*batch)
    loss.backward()
    found = {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in model.named_parameters()
    }
    return found | {"loss": loss.detach()}


def distances(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest distance of a gradient, or of the loss, relative to its size."""
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


def compared(scaling: str, is_tensor_parallel: bool) -> dict[str, Any]:
    """How far gradients are from one device's, and how far those of one device move by rounding its weights."""
    torch.manual_seed(1)
    batch = torch.randn(16, 8, 64), torch.randn(16, 8, 64)
    truth = gradients_of(Regression(scaling), batch)
    moved = []
    for seed in range(4):
        other = Regression(scaling)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
        moved.append(distances(gradients_of(other, batch), truth))
    pins = {
        f"layers.{i}.{n}.weight": f"BS({dim})"
        for i in range(2)
        for dim, names in enumerate((COLUMNS, ROWS))
        for n in names
    }
    mesh = device_mesh((2, 2), ("dp", "tp"))
    model = autopar.compile(
        Regression(scaling), mesh, args=batch, cluster=SLOW, pins=pins if is_tensor_parallel else None
    )
    found = gradients_of(model, batch)
    return {
        "distance": distances(found, truth),
        "rounding": max(moved),
        "loss": float(found["loss"] - truth["loss"]),
        "code": model.code,
    }


@pytest.mark.parametrize("is_tensor_parallel", [False, True])
@pytest.mark.parametrize("scaling", [TENSORWISE, ROWWISE])
def test_gradients_are_those_of_one_device(ranks4: Ranks, scaling: str, is_tensor_parallel: bool) -> None:
    """No further than by a change of the last bit of the weights: it moves numbers to the next one of float8."""
    for found in ranks4.run(compared, scaling, is_tensor_parallel):
        assert found["distance"] <= 3 * found["rounding"] and abs(found["loss"]) < 1e-4, found
        assert "local.custom_function" in found["code"]
