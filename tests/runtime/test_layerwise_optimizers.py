"""Optimizers that scale each weight's update by norms of whole tensors (LAMB: You et al., 2020), as on one device."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.mesh import parse_mesh
from tests.workers import Ranks, device_mesh

STEPS = 5


class Lamb(torch.optim.Optimizer):
    """LAMB without decay and scaling of biases (Jia et al., 2018, section 3.2)."""

    def __init__(self, parameters: Any, lr: float = 0.01, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"mean": torch.zeros_like(p), "square": torch.zeros_like(p), "step": 0}
                state["step"] += 1
                state["mean"].lerp_(p.grad, 0.1), state["square"].lerp_(p.grad.square(), 0.001)
                mean = state["mean"] / (1 - 0.9 ** state["step"])
                square = state["square"] / (1 - 0.999 ** state["step"])
                update, trust = mean / (square.sqrt() + 1e-6), 1.0
                if p.ndim > 1:
                    update = update + group["decay"] * p
                    trust = p.norm() / update.norm()
                p.sub_(group["lr"] * trust * update)


class Words(nn.Module):
    """Weights of 11, 10 and 6 rows, which four ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(11, 8), nn.Linear(8, 10), nn.Linear(10, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.words(ids)))).square().mean()


def trained(mesh: str, options: dict[str, Any]) -> dict[str, tuple[bool, torch.Tensor]]:
    """FQN of each parameter of this rank -> whether it is split, and what it is after some steps."""
    own, model, ids = parse_mesh(mesh), built(), torch.arange(16) % 11
    model = autopar.compile(model, device_mesh(own.shape, own.axis_names), args=(ids,), cluster="free-links", **options)
    optimizer = Lamb(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.train_step(ids)
        optimizer.step()
    here = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {name: (any(x.is_shard() for x in p.placements), p.full_tensor().detach()) for name, p in here.items()}


def built() -> Words:
    torch.manual_seed(0)
    return Words().double()


ROWS = {"words.weight": "S(0)", "up.weight": "S(0)", "down.weight": "S(0)"}


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=4", {"pins": ROWS}), ("dp=2,tp=2", {}), ("pp=2,dp=2", {"num_microbatches": 2})],
    ids=["uneven rows", "two axes", "stages"],
)
def test_lamb_takes_norms_of_whole_tensors(ranks4: Ranks, mesh: str, options: dict[str, Any]) -> None:
    model, ids = built(), torch.arange(16) % 11
    optimizer = Lamb(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
    found = {name: x for report in ranks4.run(trained, mesh, options) for name, x in report.items()}
    assert found.keys() == dict(model.named_parameters()).keys() and any(split for split, _ in found.values())
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name][1], p.detach(), rtol=1e-9, atol=1e-12)
