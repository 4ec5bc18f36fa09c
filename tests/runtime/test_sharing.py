"""Layers that share parameters: one set of them is stored, converted and trained, with the gradients of all uses
summed.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.folding.fold import fold
from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.verify.check_placements import check
from tests.runtime.training import (
    LEAST,
    device_mesh,
    issued,
    plan_called,
    planned,
    split_parameters,
    traced,
    train,
    under,
    worst,
)
from tests.workers import Ranks
from tests.zoo import BATCH, HIDDEN, SEQUENCE, VOCABULARY, Case

NUM_USES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, 2 * HIDDEN),
            nn.Linear(2 * HIDDEN, HIDDEN),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Called(nn.Module):
    """One module, called again and again."""

    def __init__(self, num_uses: int) -> None:
        super().__init__()
        self.first, self.block, self.head, self.num_uses = (
            nn.Linear(HIDDEN, HIDDEN),
            Block(),
            nn.Linear(HIDDEN, HIDDEN),
            num_uses,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.num_uses):
            x = self.block(x)
        return self.head(x)


class Tied(nn.Module):
    """Modules of their own whose matrices are one parameter; biases and norms are not shared."""

    def __init__(self, num_uses: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(num_uses))
        for block in self.blocks[1:]:
            block.up.weight, block.down.weight = self.blocks[0].up.weight, self.blocks[0].down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(name: str, num_uses: int = NUM_USES) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "albert":
            return _albert(num_uses)
        model = {"called": Called, "tied": Tied}[name](num_uses)
        return Case(model.double(), (torch.randn(BATCH, HIDDEN).double(),), {}, lambda y: y.square().mean())


def _albert(num_uses: int) -> Case:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=16,
        hidden_size=HIDDEN,
        num_hidden_layers=num_uses,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    model = AlbertForMaskedLM(config).double().train()
    return Case(model, (), {"input_ids": tokens, "labels": tokens.flip(0)}, lambda output: output.loss)


def train_shared(name: str, plans: dict[str, Plan]) -> list[dict[str, Any]]:
    """On every rank, beside one device: as `training.train_under`."""
    truth = train(build(name), 3)
    reports = []
    for kind, plan in plans.items():
        mesh = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
        case = under(plan, build(name), mesh)
        found = train(case, 3)
        report = {
            "kind": kind,
            "predicted": Counter(planned(plan)),
            "issued": issued(case, mesh),
            "split": split_parameters(plan),
        }
        reports.append(report | {when: worst(found[when], truth[when], least) for when, least in LEAST.items()})
        check(case.model._autopar.current().program, mesh)
    return reports


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "shape"), [("called", (2, 2)), ("tied", (4,)), ("tied", (2, 2)), ("albert", (2, 2))], ids=str
)
def test_layers_that_share_train_like_one_device(ranks4: Ranks, name: str, shape: tuple[int, ...]) -> None:
    graph, mesh = traced(build(name)), Mesh(shape, ("dp", "tp")[: len(shape)])
    plans = {kind: plan_called(kind, graph, mesh) for kind in ("searched", "ddp", "zero3", "megatron", "random:0")}
    tolerance = 1e-5 if name == "albert" else 1e-9
    for of_rank in ranks4.run(train_shared, name, plans):
        for report in of_rank:
            assert max(report["first"], report["last"])[0] <= tolerance, report
            assert report["issued"] == report["predicted"], report["kind"]
            assert report["kind"] == "ddp" or report["split"] > 0, report["kind"]


@pytest.mark.parametrize("kind", ["ddp", "zero3"])
@pytest.mark.parametrize("name", ["called", "albert"])
def test_more_uses_move_no_more_parameters(name: str, kind: str) -> None:
    """One reduction of the summed gradient and one gather a step, however often the parameters are used; memory for one
    set.
    """
    found = []
    for num_uses in (3, 6):
        graph = traced(build(name, num_uses))
        plan = plan_called(kind, graph, Mesh((4,), ("dp",)))
        names = {item.value.name for item in graph.of_kind("parameter")}
        moved = Counter(one.collective for one in plan.costs.collectives if one.where in names)
        found.append((moved, plan.costs.memory_bytes["parameters"], plan.costs.memory_bytes["optimizer"]))
        assert max(repeat.count for repeat in fold(graph).repeats) >= num_uses - 1
    assert found[0] == found[1] and found[0][0]
