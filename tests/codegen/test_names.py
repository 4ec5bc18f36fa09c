"""Models and meshes whose names mean something to Python train like any other."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.verify.count_collectives import count_collectives
from tests.workers import Ranks, device_mesh

MODULES = ("a\nraise SystemExit", "class", "print", "None", "a-b", "a_b", "axis_dp", "x1@2", "\x1b[2J")
PARAMETERS = (
    "lambda",
    "self",
    "torch",
    "match",
    "_",
    "inf",
    "I",
    "weight",
    "weight__1",
    "weight__2",
    "ﬁ",
    "fi",
    "x²",
    "x'#",
    "named_x",
)
BUFFERS = ("seed", "def", "region_1", "offload_1", "\ud800")


class Odd(nn.Module):
    """A sum over what its parts make; every part has a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({name: nn.Linear(8, 8) for name in MODULES})
        self.add_module("lambda x", nn.Linear(8, 8))
        for name in PARAMETERS:
            self.register_parameter(name, nn.Parameter(torch.randn(8)))
        for name in BUFFERS:
            self.register_buffer(name, torch.randn(8))

    def forward(self, x: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        x = x + kwargs["print"]
        for linear in (*self.inner.values(), self._modules["lambda x"]):
            x = x + linear(x).tanh()
        for name in PARAMETERS:
            x = (x * self._parameters[name]).tanh()
        for name in BUFFERS:
            x = x + self._buffers[name]
        return x.square().mean()


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def train_odd(axis_names: tuple[str, str], pins: dict[str, str]) -> tuple[float, int]:
    """On every rank: the largest difference from one device, and how many collectives made it."""
    torch.manual_seed(0)
    model, x, y = Odd().double(), torch.randn(8, 8).double(), torch.randn(8, 8).double()
    truth = copy.deepcopy(model)
    truth(x, print=y).backward()
    mesh = device_mesh((2, 2), axis_names)
    found = autopar.compile(model, mesh, args=(x,), kwargs={"print": y}, cluster="free-links", pins=pins)
    assert found.plan.mesh.axis_names == axis_names
    with count_collectives(mesh) as issued:
        found(x, print=y).backward()
    expected = {name: p.grad for name, p in truth.named_parameters()}
    assert expected.keys() == {name for name, _ in found.named_parameters()}
    return max(float((whole(p.grad) - expected[name]).abs().max()) for name, p in found.named_parameters()), len(issued)


@pytest.mark.multirank
@pytest.mark.parametrize("names", [("dp-shard", "dp.shard"), ("class", "größe'; 2d #")], ids=ascii)
def test_a_model_and_a_mesh_with_odd_names_train_like_one_device(ranks4: Ranks, names: tuple[str, str]) -> None:
    split = dict.fromkeys(PARAMETERS, "S(0)S(0)") | {f"inner.{name}.weight": f"{names[1]}:S(0)" for name in MODULES}
    for difference, num_issued in ranks4.run(train_odd, names, split):
        assert difference < 1e-12 and num_issued > len(PARAMETERS)


def test_odd_names_are_explained_on_lines_of_their_own() -> None:
    plan = autopar.plan(
        Odd(),
        "dp-shard=2,class=2",
        cluster="free-links",
        args=(torch.randn(8, 8),),
        kwargs={"print": torch.randn(8, 8)},
    )
    text = plan.explain()
    assert all(char.isprintable() or char == "\n" for char in text)
    assert not any(line.startswith("raise SystemExit") for line in text.splitlines())
    assert any("a\\nraise SystemExit.weight" in line for line in text.splitlines())
