"""A ledger's terms add up, know what ran, and correct the cluster."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.costmodel.cluster.load_cluster import LinkLevel, load_cluster
from autopar.errors import AutoparError
from autopar.plans.plan import plan_of
from autopar.verify.ledger import STAGE_WAIT, UPDATE, WAITING, Account, Entry, predicted_terms
from tests.workers import device_mesh

# so that it pays to split so small a model
FAST = replace(load_cluster("cpu"), levels=(LinkLevel(0, 1e-7, 1e11),), flops_per_s={"float32": 1e9})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def compiled() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    return autopar.compile(Net(), device_mesh((4,), ("dp",)), args=(x,), cluster=FAST), x


def measured(slow_rank: int) -> dict[str, tuple[float, float]]:
    model, x = compiled()
    optimizer = torch.optim.AdamW(model.parameters())
    ledger = model.measure(steps=7)
    for _ in ledger:
        if torch.distributed.get_rank() == slow_rank:
            time.sleep(0.05)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    account = ledger.account
    predicted = predicted_terms(model.plan, model._autopar.mesh)
    assert sum(predicted.values()) == pytest.approx(model.plan.step_s, rel=1e-9)
    assert sum(entry.measured_s for entry in account.terms) == pytest.approx(account.timed_s, rel=0.2)
    assert "Most off: " in str(account) and account.worst in account.terms
    corrected = autopar.calibrate_from(model)
    again = autopar.Cluster.to_json(corrected)
    assert "corrected by steps of a model" in again
    return {entry.term: (entry.predicted_s, entry.measured_s) for entry in (*account.terms, account.step)}


@pytest.mark.multirank
def test_all_ranks_have_one_account_and_waiting_is_a_term(ranks4):
    first, *others = ranks4.run(measured, 2)
    assert all(other == first for other in others)
    assert {"products, forward", "products, backward", "other ops, backward", UPDATE, "step"} <= set(first)
    issued = [name for name, (predicted_s, measured_s) in first.items() if " on dp" in name and predicted_s]
    assert issued and all(first[name][1] > 0 for name in issued)
    # three of four ranks wait for the slow one, which sleeps 50 ms
    assert first[WAITING][1] > 0.02 and first["step"][1] > 0.05


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def measured_in_stages(slow_rank: int) -> dict[str, tuple[float, float]]:
    torch.manual_seed(0)
    mesh, x = device_mesh((2, 2), ("pp", "dp")), torch.randn(64, 64)
    options = {"num_microbatches": 4, "schedule": "1f1b", "cluster": FAST}
    model = autopar.compile(Deep(), mesh, args=(x,), **options)
    optimizer = torch.optim.AdamW(model.parameters())
    ledger = model.measure(steps=7)
    for _ in ledger:
        if torch.distributed.get_rank() == slow_rank:
            time.sleep(0.05)
        model.train_step(x)
        optimizer.step()
        optimizer.zero_grad()
    account = ledger.account
    for rank in (0, 1):
        own = [entry for entry in account.terms if entry.term.startswith(f"rank {rank} of the pipeline: ")]
        assert sum(entry.predicted_s for entry in own) == pytest.approx(model.plan.step_s, rel=1e-9)
        assert sum(entry.measured_s for entry in own) == pytest.approx(account.timed_s, rel=0.3)
    assert "corrected by steps of a model" in autopar.calibrate_from(model).source
    return {entry.term: (entry.predicted_s, entry.measured_s) for entry in (*account.terms, account.step)}


@pytest.mark.multirank
def test_each_rank_of_a_pipeline_has_terms_and_waits_for_the_slow_one(ranks4):
    first, *others = ranks4.run(measured_in_stages, 0)  # of the first stage
    assert all(other == first for other in others)
    for rank in (0, 1):
        kinds = ("products, forward", "products, backward", "other ops, backward", UPDATE, STAGE_WAIT)
        assert all(min(first[f"rank {rank} of the pipeline: {kind}"]) > 0 for kind in kinds)
    assert first[f"rank 1 of the pipeline: {STAGE_WAIT}"][1] > 0.02 and first["step"][1] > 0.05


def refusals() -> list[str]:
    model, _ = compiled()
    texts = []
    for wrong in (
        lambda: model.measure(steps=2),
        lambda: model.measure().account,
        lambda: autopar.calibrate_from(model),
    ):
        with pytest.raises(AutoparError) as error:
            wrong()
        texts.append(str(error.value))
    return texts


@pytest.mark.multirank
def test_what_was_not_measured_is_refused_by_name(ranks4):
    few, early, unmeasured = ranks4.run(refusals)[0]
    assert "expected steps=3 or more" in few and "no steps were measured" in early and "was not measured" in unmeasured


def corrected(path: str) -> list[float]:
    """Predicted seconds over those measured, of each kind of term, once the cluster is corrected by an account."""
    model, _ = compiled()
    mesh, times = model._autopar.mesh, {"products": 2.0, "other ops": 3.0, "update": 5.0, "all_": 7.0, "reduce_": 11.0}
    before = predicted_terms(model.plan, mesh)
    off = {name: next(factor for start, factor in times.items() if name.startswith(start)) for name in before}
    terms = tuple(Entry(name, seconds, off[name] * seconds) for name, seconds in before.items())
    model.__dict__["_autopar_account"] = Account(Entry("step", 1.0, 1.0), terms, 1.0)
    autopar.calibrate_from(model, path if torch.distributed.get_rank() == 0 else None)
    torch.distributed.barrier()
    plan = plan_of(model.plan.graph, model.plan.assignment, model.plan.mesh, load_cluster(path))
    after = predicted_terms(plan, mesh)
    return [after[name] / (off[name] * seconds) for name, seconds in before.items() if seconds]


@pytest.mark.multirank
def test_a_corrected_cluster_predicts_what_was_measured(ranks4, tmp_path):
    (ratios, *_) = ranks4.run(corrected, str(tmp_path / "cluster.json"))
    assert len(ratios) >= 5 and ratios == pytest.approx([1.0] * len(ratios), rel=1e-6)
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.json"]
