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


class Stored(nn.Module):
    """A linear layer whose weight is stored in float8, with a scale of each row."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((100 * torch.randn(outputs, inputs)).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", torch.full((outputs, 1), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(-1, keepdim=True) / 448
        rows = (x / largest).to(torch.float8_e4m3fn)
        return torch._scaled_mm(rows, self.weight.t(), largest, self.scale.t(), out_dtype=torch.float32)


def called_with_stored(pins: dict[str, str]) -> tuple[float, str, bool]:
    """How far a call is from that on one device, its code, and whether whole state is given out."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Stored(64, 128), nn.GELU(), Stored(128, 64)), torch.randn(64, 64)
    mesh = device_mesh((2, 2), ("dp", "tp"))
    with torch.no_grad():
        whole, weights = model(x), {name: p.clone() for name, p in model.state_dict().items()}
        model = autopar.compile(model, mesh, args=(x,), cluster=SLOW, pins=pins, trains=False)
        distance = float((model(x) - whole).norm() / whole.norm())
    state = model.full_state_dict()
    return distance, model.code, all(torch.equal(state[name].float(), weights[name].float()) for name in weights)


def test_weights_in_float8_are_gathered_and_exchanged_as_bytes(ranks4: Ranks) -> None:
    for distance, code, is_same in ranks4.run(called_with_stored, {"0.weight": "BS(0)", "2.weight": "S(0)S(1)"}):
        assert distance < 1e-6 and is_same
        assert "_2_weight__1 = move(_2_weight, axis_dp" in code and "all_to_all" in code
