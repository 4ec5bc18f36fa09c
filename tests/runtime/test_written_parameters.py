"""Parameters that the forward writes (a momentum encoder, rows that are kept short) go on as on one device."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.trace import trace
from tests.ir.compare import assert_same_as_model
from tests.runtime.training import whole
from tests.workers import Ranks, device_mesh


class Momentum(nn.Module):
    """BYOL: an encoder that follows the one that is trained, `how` it is written."""

    def __init__(self, how: str = "in place") -> None:
        super().__init__()
        self.how = how
        self.query = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for p, k in zip(self.query.parameters(), self.key.parameters()):
            if self.how == "in place":
                k.mul_(0.9).add_(p, alpha=0.1)
            elif self.how == "data in place":
                k.data.mul_(0.9).add_(p.data, alpha=0.1)
            else:
                k.data = k.data * 0.9 + p.data * 0.1

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if self.training:
            self.follow()
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            k = F.normalize(self.key(b), dim=1)
        return (q - k).square().sum(1).mean()


class Limited(nn.Module):
    """EEGNet: a layer whose rows are kept short, `how` it is written."""

    def __init__(self, how: str = "in place") -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        weight = self.first.weight
        if self.how == "data":
            weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.5)
        elif self.how == "data in place":
            weight.data.clamp_(-0.1, 0.1)
        else:
            with torch.no_grad():
                weight.copy_(F.normalize(weight, dim=1))
        return (self.last(F.linear(a, weight, self.first.bias).relu()) - b).square().mean() + weight.abs().sum()


def _batch(seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 8, dtype=torch.float64, generator=draws) for _ in range(2))


def _model(how: str, kind: type[nn.Module] = Momentum) -> nn.Module:
    torch.manual_seed(0)
    return kind(how).double()


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Losses and all parameters of three steps, the last with another number of rows, and of an evaluation."""
    optimizer, found = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5), {}
    for number, rows in enumerate((8, 8, 12)):
        optimizer.zero_grad()
        found[f"loss {number}"] = model(*_batch(number, rows))
        found[f"loss {number}"].backward()
        optimizer.step()
    found["evaluated"] = model.eval()(*_batch(9))
    return {name: whole(x.detach()) for name, x in (found | dict(model.named_parameters())).items()}


def _apart(how: str, kind: type[nn.Module]) -> float:
    model = autopar.compile(_model(how, kind), device_mesh((2, 2), ("dp", "tp")), cluster="free-links", args=_batch(0))
    truth, found = _trained(_model(how, kind)), _trained(model)
    assert truth.keys() == found.keys()
    return max(float((truth[name] - found[name]).abs().max()) for name in truth)


@pytest.mark.multirank
@pytest.mark.parametrize("kind", [Momentum, Limited])
@pytest.mark.parametrize("how", ["in place", "data in place", "data"])
def test_what_is_written_is_as_on_one_device(ranks4: Ranks, how: str, kind: type[nn.Module]) -> None:
    assert max(ranks4.run(_apart, how, kind)) < 1e-12


class Targets(Momentum):
    """Deep Q-learning: the targets follow behind their use, in the second of two stages."""

    def __init__(self, how: str = "in place") -> None:
        super().__init__(how)
        self.first = nn.Linear(8, 8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        q = self.query(self.first(a).tanh())
        with torch.no_grad():
            k = self.key(b)
        self.follow()
        return (q - k).square().sum(1).mean()


def _apart_in_stages() -> float:
    truth, mesh = _model("in place", Targets), device_mesh((2, 2), ("pp", "dp"))
    model = autopar.compile(_model("in place", Targets), mesh, cluster="free-links", args=_batch(0), num_microbatches=1)
    optimizers, apart = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (truth, model)], 0.0
    for number in range(3):
        for one in optimizers:
            one.zero_grad()
        loss = truth(*_batch(number))
        loss.backward()
        apart = max(apart, abs(float(model.train_step(*_batch(number))) - float(loss)))
        for one in optimizers:
            one.step()
    return apart


@pytest.mark.multirank
def test_what_is_written_in_a_stage_is_as_on_one_device(ranks4: Ranks) -> None:
    assert max(ranks4.run(_apart_in_stages)) < 1e-12


class ReadBefore(Limited):
    """One that is written after it was read, by an op whose backward does not keep it."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(a, self.first.weight).sum() + super().forward(a, b)


class KeptBefore(Limited):
    """One that is written after it was read by an op whose backward keeps it, and sees what is written."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.first.weight.square().sum() + super().forward(a, b)


@pytest.mark.parametrize(
    ("how", "kind"),
    [("in place", Limited), ("data in place", Limited), ("data", Limited), ("data in place", ReadBefore)],
)
def test_gradients_pass_a_write_to_a_parameter_that_is_trained(how: str, kind: type[Momentum]) -> None:
    model = _model(how, kind)
    graph = trace(model, _batch(0), {})
    assert [fqn for fqn, _ in graph.mutations] == ["first.weight"]
    assert_same_as_model(graph, model, _batch(0), {})


def test_the_graph_writes_it_back() -> None:
    model = _model("in place")
    graph = trace(model, _batch(0), {})
    assert [fqn for fqn, _ in graph.mutations] == [f"key.{n}.{name}" for n in (0, 2) for name in ("weight", "bias")]
    assert_same_as_model(graph, model, _batch(0), {})


def _plan(model: nn.Module, **options: Any) -> None:
    autopar.plan(model, "dp=2", cluster="cpu", args=_batch(0), **options)


def test_where_it_cannot_be_written_is_refused() -> None:
    with pytest.raises(AutoparError, match=r"the forward writes parameter key.0.weight, in bf16 by param_dtype="):
        _plan(_model("in place"), param_dtype=torch.bfloat16)
    with pytest.raises(AutoparError, match=r"the forward writes parameters .*use one microbatch"):
        _plan(_model("in place"), num_microbatches=2)
    with pytest.raises(AutoparError, match=r"changes parameter first.weight in place after %square read it"):
        _plan(_model("data in place", KeptBefore))
