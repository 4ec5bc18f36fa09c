"""The batch in shares, in microbatches and stages: a step's numbers are those of one device."""

import random
from typing import Any

import pytest
import torch

import autopar
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace_with_loss import traced
from autopar.mesh import as_mesh
from autopar.plans import staged_plan
from autopar.plans.resplit import resplit_stages
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.balance.balance_shares import share_anew
from tests.runtime.shares_model import differ, two_groups
from tests.runtime.staged import (
    compared,
    gradients,
    one_device,
    plan_of_sample,
    sample,
    train_under,
    under,
    with_any_layouts,
)
from tests.workers import Ranks, device_mesh

Job = tuple[dict[str, Any], StagedPlan]
# mesh by number of ranks; "gpt2" with a loss function computes in float64 throughout
MESHES = {2: ("dp=2",), 3: ("dp=3",), 4: ("pp=2,dp=2", "dp=2,tp=2", "dp=4", "dp=2,pp=2"), 5: ("dp=5",)}
MODELS, SCHEDULES = ("odd", "gpt2", "vit", "batch norm"), ("1f1b", "interleaved", "zero-bubble")


def job(name: str, mesh: str, num_microbatches: int, shares: tuple[int, ...], schedule: str | None = None) -> Job:
    options = {"name": name, "blocks": 5, "batch": sum(shares), "has_loss_fn": name == "gpt2"}
    asked = {"shares": (("dp", shares),)}
    plan = plan_of_sample(sample(**options), mesh, num_microbatches, schedule, **asked)
    assert isinstance(plan, StagedPlan) and plan.mesh.shares[0][1] == shares
    return options, plan


def drawn(seed: int, num_ranks: int) -> Job:
    """Any model, mesh, number of microbatches, schedule and shares; every second one in any layouts."""
    draw = random.Random(seed)
    name, mesh = draw.choice(MODELS), draw.choice(MESHES[num_ranks])
    if name == "batch norm" and "pp" not in mesh:  # it has no microbatches, and without these or stages no `StagedPlan`
        name = "odd"
    schedule = "gpipe" if name == "batch norm" else draw.choice(SCHEDULES) if "pp" in mesh else None
    count = {"gpipe": 1, "interleaved": 4}.get(schedule or "", draw.choice((2, 3, 4)))
    size = dict(zip(as_mesh(mesh).axis_names, as_mesh(mesh).shape))["dp"]
    shares = tuple(count * draw.choice((1, 1, 2, 3, 5)) for _ in range(size))
    options, plan = job(name, mesh, count, shares, schedule)
    return options, with_any_layouts(plan, seed) if seed % 2 else plan


def check(ranks: Ranks, jobs: list[Job]) -> None:
    results = ranks.run(train_under, jobs)
    for number, (options, plan) in enumerate(jobs):
        ((axis, sizes),) = plan.mesh.shares
        inner = plan.mesh.num_devices // plan.mesh.shape[0] if axis == 0 else 1
        for rank, result in enumerate(results):
            report, where = result[number], (options, plan.mesh, plan.mesh.shares, plan.schedule, rank)
            assert max(report["first"], report["last"])[0] < 1e-8, (where, report["first"], report["last"])
            assert sum(report["issued"].values()) == sum(report["planned"].values()), where
            if sizes[rank // inner % len(sizes)] == max(sizes):  # what is priced
                assert report["issued"] == report["planned"], where


@pytest.mark.multirank
def test_stages_and_microbatches_in_shares(ranks4: Ranks) -> None:
    stages = job("odd", "pp=2,dp=2", 2, (6, 2), "1f1b")
    assert {str(layout) for layout in stages[1].stages[0].assignment.outputs.values()} == {"(S(0:6+2),)"}
    check(ranks4, [stages])


@pytest.mark.multirank
def test_drawn_on_four_ranks(ranks4: Ranks) -> None:
    check(ranks4, [drawn(seed, 4) for seed in range(16)])


@pytest.mark.multirank
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_drawn_on_other_numbers_of_ranks(num_ranks: int) -> None:
    ranks = Ranks(num_ranks)
    try:
        check(ranks, [drawn(seed, num_ranks) for seed in range(4)])
    finally:
        ranks.stop()


def test_a_plan_in_stages_keeps_its_shares_in_its_file() -> None:
    options, plan = job("odd", "pp=2,dp=2", 2, (6, 2), "1f1b")
    case = sample(**options)
    graph = traced(skeleton(case.model), case.loss_fn, case.args, case.kwargs)
    again = staged_plan.loads(plan.dumps(), graph, as_mesh("pp=2,dp=2"))
    assert isinstance(again, StagedPlan) and again.mesh.shares == ((1, (6, 2)),)
    assert [one.assignment for one in again.stages] == [one.assignment for one in plan.stages]
    assert again.step_s == plan.step_s and resplit_stages(again, (2, 6)).step_s == pytest.approx(plan.step_s)
    assert "S(0:6+2)" in plan.explain()


def test_what_crosses_a_cut_flattened_is_in_shares_of_rows() -> None:
    """A stage whose arguments are rows times tokens is told what the batch is."""

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.flatten(0, 1)
            for block in self.blocks:
                y = block(y).tanh()
            return y.unflatten(0, x.shape[:2]).square().mean()

    asked: dict[str, Any] = {"num_microbatches": 2, "schedule": "1f1b", "shares": {"dp": (12, 4)}}
    plan = autopar.plan(Flat(), "pp=2,dp=2", cluster="free-links", args=(torch.randn(16, 3, 8),), **asked)
    assert isinstance(plan, StagedPlan)
    assert [str(layout) for layout in plan.stages[0].assignment.outputs.values()] == ["(S(0/3:12+4),)"]


def changed_between_steps(mesh: str, sizes: tuple[tuple[int, ...], ...], num_microbatches: int) -> float:
    """On every rank: a step in each of these shares, under one plan, against one device."""
    options, plan = job("odd", mesh, num_microbatches, sizes[0], "1f1b" if "pp" in mesh else None)
    model, alone = under(plan, sample(**options)), sample(**options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone.model)]
    found, expected = [], []
    for one in sizes:
        share_anew(model._autopar, plan.mesh.shares[0][0], one)
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert alone.loss_fn is not None, "the case has one"
        loss = alone.loss_fn(alone.model(*alone.args[:-1]), alone.args[-1])
        loss.backward()
        expected.append(loss.detach())
        found.append(model.train_step(*alone.args))
        for optimizer in optimizers:
            optimizer.step()
        assert model.plan.mesh.shares == ((plan.mesh.shares[0][0], one),)
    own = compared(sample(**options), under(plan, sample(**options)), plan, one_device(sample(**options), 2))
    assert own["first"][0] < 1e-8, "another model in the shares that were planned"
    return differ(found, expected)


@pytest.mark.multirank
@pytest.mark.parametrize("mesh", ["pp=2,dp=2", "dp=2,tp=2"])
def test_shares_change_between_steps(ranks4: Ranks, mesh: str) -> None:
    assert max(ranks4.run(changed_between_steps, mesh, ((4, 4), (6, 2), (2, 6), (4, 4)), 2)) < 1e-11


def of_other_sizes(mesh: str, sizes: tuple[int, ...], shares: tuple[int, ...], batch: str) -> float:
    """On every rank: steps on batches of these sizes, the first in these shares, against one device."""
    placed = as_mesh(mesh)
    axis = placed.axis_names.index("dp")
    cases = [sample("odd", batch=rows) for rows in sizes]
    whole, torch_mesh = [case.args for case in cases], device_mesh(placed.shape, placed.axis_names)
    first = sum(shares[: torch_mesh.get_local_rank(axis)]) if batch == "local" else 0
    last = first + shares[torch_mesh.get_local_rank(axis)] if batch == "local" else None
    given = [tuple(x[first:last] for x in args) for args in whole]
    asked: dict[str, Any] = {"num_microbatches": 2, "shares": shares, "cluster": "free-links", "batch": batch}
    asked |= {"args": given[0], "loss_fn": cases[0].loss_fn}
    model = autopar.compile(sample("odd", batch=sizes[0]).model, torch_mesh, **asked)
    alone = sample("odd", batch=sizes[0]).model
    found, expected = [], []
    for own, args, case in zip(given, whole, cases):
        found.append(model.train_step(*own))
        assert case.loss_fn is not None, "the case has one"
        loss = case.loss_fn(alone(*args[:-1]), args[-1])
        loss.backward()
        expected.append(loss.detach())
    own, truth = gradients(model), gradients(alone)
    return max(differ(found, expected), differ([*own.values()], [truth[name] for name in own]))


@pytest.mark.multirank
@pytest.mark.parametrize("mesh", ["pp=2,dp=2", "dp=2,pp=2", "dp=2,tp=2"])
def test_batches_of_other_sizes_and_parts_of_ranks(ranks4: Ranks, mesh: str) -> None:
    assert max(ranks4.run(of_other_sizes, mesh, (8, 8, 12, 7, 1), (6, 2), "global")) < 1e-11
    assert max(ranks4.run(of_other_sizes, mesh, (8, 8), (6, 2), "local")) < 1e-11


def stepped_on_groups(mesh: str, counts: tuple[int, int], rows: int, shares: tuple[int, ...] | None) -> dict[str, Any]:
    """On every rank: a step in two microbatches on devices of two groups, of which the second is 3 times slower."""
    placed, case, alone = as_mesh(mesh), sample("odd", batch=rows), sample("odd", batch=rows)
    asked: dict[str, Any] = {"args": case.args, "loss_fn": case.loss_fn, "cluster": two_groups(counts, 3.0)}
    asked |= {"num_microbatches": 2, "shares": shares and {"dp": shares}}
    model = autopar.compile(case.model, device_mesh(placed.shape, placed.axis_names), **asked)
    assert alone.loss_fn is not None, "the case has one"
    found = model.train_step(*case.args)
    loss = alone.loss_fn(alone.model(*alone.args[:-1]), alone.args[-1])
    loss.backward()
    own, truth = gradients(model), gradients(alone.model)
    difference = differ([found, *own.values()], [loss.detach(), *(truth[name] for name in own)])
    return {"difference": difference, "shares": [tuple(sizes) for _, sizes in model.plan.mesh.shares]}


@pytest.mark.multirank
def test_groups_of_devices_accumulate(ranks4: Ranks) -> None:
    for found in ranks4.run(stepped_on_groups, "dp=4", (1, 3), 4000, None):
        ((fast, *slow),) = found["shares"]
        assert found["difference"] < 1e-11 and fast > 2 * max(slow) and sum((fast, *slow)) == 4000


@pytest.mark.multirank
@pytest.mark.parametrize(("mesh", "shares"), [("pp=2,dp=2", (6, 2)), ("dp=2,pp=2", (2, 4)), ("dp=4", (2, 6, 4, 2))])
def test_shares_that_are_asked_for_on_groups(ranks4: Ranks, mesh: str, shares: tuple[int, ...]) -> None:
    for found in ranks4.run(stepped_on_groups, mesh, (2, 2), sum(shares), shares):
        assert found["difference"] < 1e-11 and found["shares"] == [shares]
