"""Parameters gathered ahead and gradients reduced while backward goes on: all are complete when somebody sees them."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner.handwritten.hand_plan import hand_plans
from autopar.plans.plan import plan_of
from autopar.runtime.saved_tensors import gather_bucket
from autopar.sbp import in_flight
from autopar.sbp.analysis.parameter_buckets import parameter_buckets
from autopar.sbp.axis import Axis
from autopar.sbp.candidates import annotate
from tests.workers import RankError, Ranks, device_mesh

pytestmark = pytest.mark.multirank

DEPTH = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(DEPTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def data_parallel(model: nn.Module, x: torch.Tensor, way: str) -> nn.Module:
    """The model with the batch split, stored whole, split (zero2) or split and gathered again in backward (zero3).

    Each layer is in a bucket of its own.
    """
    graph, mesh, cluster = trace(skeleton(model), (x,), {}), Mesh((4,), ("dp",)), load_cluster("free-links")
    folded = fold(graph)
    by_hand = hand_plans(graph, folded, annotate(graph, mesh, folded), mesh)["ddp" if way == "ddp" else "zero3"]
    again = by_hand.regathered if way == "zero3" else frozenset()
    assert bool(again) == (way == "zero3")
    places = parameter_buckets(graph, folded, 9 * 8 * 8, is_prefetched=True)
    assert len({place.num_bytes for place in places.values()}) < len(places)
    plan = plan_of(graph, replace(by_hand, parameter_buckets=places, regathered=again), mesh, cluster)
    return autopar.compile(model, device_mesh((4,), ("dp",)), args=(x,), plan=plan)


def on_ranks(use: Callable[[nn.Module, torch.Tensor], list[torch.Tensor]], way: str) -> None:
    """`use` of a model gives the same tensors sharded as on one device."""
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    model = Net().double()
    alone = Net().double()
    alone.load_state_dict(model.state_dict())
    expected = use(alone, x)
    started: list[str] = []
    all_reduce, landed = dist.all_reduce, in_flight.InFlight.landed

    def noted(*args: Any, **kwargs: Any) -> Any:
        started.append("start" if kwargs.get("async_op") else "in turn")
        return all_reduce(*args, **kwargs)

    def noted_landing(one: in_flight.InFlight) -> torch.Tensor:
        started.append("landing")
        return landed(one)

    sharded = data_parallel(model, x, way)
    dist.all_reduce, in_flight.InFlight.landed = noted, noted_landing  # type: ignore[method-assign]
    try:
        made = use(sharded, x)
    finally:
        dist.all_reduce, in_flight.InFlight.landed = all_reduce, landed  # type: ignore[method-assign]
    for one, other in zip(made, expected, strict=True):
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        torch.testing.assert_close(whole, other)
    if use is once and way == "ddp":
        first = started.index("landing")
        assert started[:first].count("start") == started.count("start") >= 1


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def once(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).backward()
    return gradients(model)


def accumulated(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).backward()
    model(2 * x).backward()
    return gradients(model)


def twice_through(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def of_some(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    some = list(model.parameters())[2:5]
    return list(torch.autograd.grad(model(x), some))


def of_gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    found = torch.autograd.grad(model(x), list(model.parameters()), create_graph=True)
    sum(one.square().sum() for one in found).backward()
    return gradients(model)


def seen_by_hooks(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda gradient, name=name: seen.update({name: gradient.clone()}))
    model(x).backward()
    return [seen[name] for name, _ in model.named_parameters()] + gradients(model)


def after_a_failure(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    def fails(_: torch.Tensor) -> None:
        raise ValueError("in backward")

    handle = next(model.parameters()).register_hook(fails)
    with pytest.raises(ValueError, match="in backward"):
        model(x).backward()
    handle.remove()
    model.zero_grad()
    model(x).backward()
    return gradients(model)


USES = (once, accumulated, twice_through, of_some, of_gradients, seen_by_hooks, after_a_failure)


@pytest.mark.parametrize("way", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_same_gradients_as_on_one_device(ranks4: Ranks, use: Callable, way: str) -> None:
    ranks4.run(on_ranks, use, way)


def order_of_collectives() -> list[str]:
    """What happens to the collectives of buckets in a step, in order."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(8, 8, dtype=torch.float64)
    sharded, begin, happened = data_parallel(model, x, "zero3"), gather_bucket.begin_together, list[str]()

    def noted(axis: Axis, sources: Any, *rest: Any, is_async: bool, **how: Any) -> gather_bucket.Landing:
        assert is_async
        what = "gather" if sources[0].is_split else "reduction"
        landing = begin(axis, sources, *rest, is_async=is_async, **how)
        happened.append(f"{what} starts")

        def noted_landing() -> tuple[torch.Tensor, ...]:
            happened.append(f"{what} lands")
            return landing()

        return noted_landing

    gather_bucket.begin_together = noted
    try:
        loss = sharded(x)
        happened.append("backward")
        loss.backward()
    finally:
        gather_bucket.begin_together = begin
    return happened


def test_one_bucket_is_gathered_ahead_and_one_is_reduced_behind(ranks4: Ranks) -> None:
    """So the memory of what is on its way is bounded, and ranks issue all in the same order."""
    happened, *others = ranks4.run(order_of_collectives)
    assert all(other == happened for other in others)
    at = happened.index("backward")
    num_buckets = happened[:at].count("gather starts")
    assert num_buckets >= 3
    assert happened[:at] == ["gather starts", *["gather lands", "gather starts"] * (num_buckets - 1), "gather lands"]
    backward = happened[at + 1 :]
    assert backward.count("gather starts") >= 3 and backward.count("reduction starts") == num_buckets
    for what in ("gather", "reduction"):
        running = 0
        for one in backward:
            running += {f"{what} starts": 1, f"{what} lands": -1}.get(one, 0)
            assert 0 <= running <= 1
        assert running == 0
    # a gather is on its way while another layer is differentiated, and a reduction while the next one is
    assert [one for one in backward if "gather" in one][:3] == ["gather starts", "gather lands", "gather starts"]
    assert ("reduction starts", "gather lands") in pairwise(backward)


def die_with_a_sum_on_its_way(folder: str, way: str) -> None:
    """Rank 2 dies when it waits for the first sum or gather; the others write what they met and after how long."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(8, 8, dtype=torch.float64)
    sharded = data_parallel(model, x, way)
    sharded(x).backward()
    start, error = time.monotonic(), None
    if dist.get_rank() == 2:
        in_flight.InFlight.landed = lambda _: os._exit(1)  # type: ignore[method-assign]
        gather_bucket.begin_together = lambda *_, **__: lambda: os._exit(1)
    try:
        for _ in range(3):  # the sums of the first step may have ended without it
            sharded(x).backward()
    except Exception as met:
        error = met
    (Path(folder) / str(dist.get_rank())).write_text(f"{time.monotonic() - start}\n{type(error).__name__}")
    os._exit(0)


@pytest.mark.parametrize("way", ["ddp", "zero3"])
def test_a_rank_that_dies_before_its_sums_have_landed_ends_all(tmp_path: Path, way: str) -> None:
    ranks = Ranks(4)
    try:
        with pytest.raises(RankError, match="died"):
            ranks.run(die_with_a_sum_on_its_way, str(tmp_path), way)
        deadline = time.monotonic() + 20
        while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        ranks.stop()
    for rank in (0, 1, 3):
        seconds, error = (tmp_path / str(rank)).read_text().split("\n")
        assert float(seconds) < 10 and error == "PeerFailed"


def test_a_gradient_without_dims_keeps_what_others_add_to_it() -> None:
    landed = in_flight.InFlight(lambda: (torch.tensor(2.0),), 0, torch.float32)
    assert in_flight.arrived([landed], in_flight.placeholder(torch.tensor(1.0), ()) + 3.0) == 5.0
