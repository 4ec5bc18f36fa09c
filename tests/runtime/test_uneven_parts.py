"""Models of sizes that the ranks do not divide train like on one device: vocabulary, heads, features and batch."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import autopar
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner.layouts.search_meshes import plan_of
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import format_layout
from tests.runtime.training import plan_called, traced
from tests.runtime.uneven_model import odd_case, train_odd
from tests.workers import Ranks, device_mesh

KINDS = ("searched", "random:0", "random:1", "ddp", "zero3")


def _check(reports: list[list[dict[str, Any]]], least_uneven: int = 1, largest: int = 0) -> None:
    for rank, of_rank in enumerate(reports):
        assert sum(report["uneven"] >= least_uneven for report in of_rank) >= len(of_rank) - 1
        for report in of_rank:
            where = f"{report['kind']} on rank {rank}"
            for when in ("first", "last"):
                difference, tensor = report[when]
                assert difference < 1e-9, f"{where}: {tensor} differs by {difference:.2e}"
            if rank == largest:  # no rank has larger parts, and others send as many tensors
                assert report["issued"] == report["predicted"], where
            assert sum(report["issued"].values()) == sum(report["predicted"].values()) > 0, where


@pytest.mark.multirank
def test_on_four_ranks(ranks4: Ranks) -> None:
    """51 tokens, 7 samples, 5 heads of 4: on some ranks no head."""
    _check(ranks4.run(train_odd, (4,), ("random:0", "zero3"), {}))


@pytest.mark.multirank
def test_on_any_mesh_of_four(ranks4: Ranks) -> None:
    _check(ranks4.run(train_odd, (4,), KINDS, {"vocab": 50, "heads": 6, "batch": 10}))
    _check(ranks4.run(train_odd, (2, 2), KINDS, {}))


@pytest.mark.multirank
def test_on_three_ranks() -> None:
    ranks = Ranks(3)
    try:
        _check(ranks.run(train_odd, (3,), KINDS, {}))
    finally:
        ranks.stop()


def epoch(batches: tuple[int, ...]) -> tuple[list[float], list[float], list[str]]:
    """Losses of an epoch on ranks and on one device, and how arguments lie."""
    case, other = odd_case(vocab=48, heads=4, batch=8), odd_case(vocab=48, heads=4, batch=8)
    mesh = device_mesh((4,), ("dp",))
    plan = plan_called("ddp", traced(case), Mesh((4,), ("dp",)))
    model = autopar.compile(case.model, mesh, args=case.args, plan=plan)
    losses: tuple[list[float], list[float]] = [], []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other.model)]
    for batch in batches:
        args = odd_case(vocab=48, heads=4, batch=batch).args
        for found, each, optimizer in zip(losses, (model, other.model), optimizers):
            optimizer.zero_grad()
            loss = each(*args)
            loss.backward()
            optimizer.step()
            found.append(float(loss))
    inputs = [one for program in model._autopar.loaded.values() for one in program.program.inputs]
    layouts = [str(layout) for item, layout in inputs if item.kind == "argument"]
    return *losses, layouts


@pytest.mark.multirank
def test_the_last_batch_of_an_epoch_is_split_unevenly(ranks4: Ranks) -> None:
    for found, expected, layouts in ranks4.run(epoch, (8, 8, 7, 5)):
        assert found == pytest.approx(expected, rel=1e-12)
        assert len(layouts) >= 2 * 3 and set(layouts) == {"(S(0),)"}


class WithLogits(torch.nn.Module):
    """The loss of a model, and the logits that it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 51, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.inner(x).relu())
        return torch.nn.functional.cross_entropy(logits, labels), logits


def leave_in_each_layout(shape: tuple[int, ...], outputs: str) -> list[str]:
    """Compare loss, logits and gradients of a loss of both with one device, the logits in each layout that is offered;
    these layouts.
    """
    torch.manual_seed(0)
    model, x, labels = WithLogits().double(), torch.randn(7, 16).double(), torch.randint(51, (7,))
    mesh, graph = Mesh(shape, ("dp", "tp")[: len(shape)]), trace(skeleton(model), (x, labels), {})
    plan, logits_of = plan_called("ddp", graph, mesh), graph.outputs[1].name
    expected, layouts = scored(copy.deepcopy(model), x, labels), list[str]()
    for layout in annotate(graph, mesh, fold(graph)).outputs[logits_of]:
        own = replace(plan.assignment, outputs={**plan.assignment.outputs, logits_of: layout})
        sharded = autopar.compile(
            copy.deepcopy(model),
            device_mesh(shape, mesh.axis_names),
            args=(x, labels),
            plan=plan_of(graph, own, mesh, plan.cluster),
            outputs=outputs,
        )
        torch.testing.assert_close(scored(sharded, x, labels), expected)
        layouts.append(format_layout(layout))
    return layouts


def scored(model: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    loss, logits = model(x, labels)
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    (loss + whole.square().mean()).backward()
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [loss.detach(), whole.detach(), *gradients]


@pytest.mark.multirank
@pytest.mark.parametrize("outputs", ["whole", "sharded"])
def test_outputs_lie_unevenly(ranks4: Ranks, outputs: str) -> None:
    assert {"B", "S(0)", "S(1)"} <= set(ranks4.run(leave_in_each_layout, (4,), outputs)[0])
    assert {"S(0)S(0)", "S(1)S(0)", "S(0)S(1)"} <= set(ranks4.run(leave_in_each_layout, (2, 2), outputs)[0])
