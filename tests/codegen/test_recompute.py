"""Recomputed blocks: the same numbers to the bit, their collectives once more in backward, and only what enters them is kept."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.costmodel.recomputable import recomputable
from autopar.ir.fold import fold
from autopar.mesh import Mesh
from autopar.plan.plan import Plan, plan_of
from tests.codegen.split import load_program, logits_case, microbatch, step
from tests.codegen.training import AXES, finish, forward_backward, issued, plan_called, planned, traced, under
from tests.workers import Ranks, device_mesh
from tests.zoo import Case, build


def twice(case: Case, shape: tuple[int, ...], kind: str) -> tuple[Plan, Plan]:
    """A plan, and the same with every block recomputed."""
    graph = traced(case)
    plan = plan_called(kind, graph, Mesh(shape, AXES[: len(shape)]))
    regions = recomputable(fold(graph), graph)
    assert len(regions) >= 2
    return plan, plan_of(graph, replace(plan.assignment, recomputed=regions), plan.mesh, plan.cluster)


def saved_bytes(case: Case) -> int:
    """Bytes of the distinct storages that autograd keeps of one forward, besides parameters."""
    stored = {p.to_local().untyped_storage().data_ptr() for p in case.model.parameters()}
    saved: dict[int, torch.Tensor] = {}
    with saved_tensors_hooks(lambda x: saved.setdefault(x.untyped_storage().data_ptr(), x) is None or x, lambda x: x):
        out = case.model(*case.args, **case.kwargs)
    del out
    return sum(x.untyped_storage().nbytes() for pointer, x in saved.items() if pointer not in stored)


def train_both(name: str, plans: tuple[Plan, Plan], dropout: float) -> list[dict[str, Any]]:
    reports = []
    for plan in plans:
        mesh = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
        case = under(plan, build(name, dropout=dropout), mesh)
        torch.manual_seed(3)
        first = {key: x.clone() for key, x in forward_backward(case).items()}
        last = finish(case, 3)
        reports.append({"first": first, "last": last, "issued": issued(case, mesh), "saved": saved_bytes(case), "code": case.model.code})
    return reports


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "shape", "kind", "dropout"),
    [
        ("llama", (4,), "zero3", 0.0),
        ("gpt2", (2, 2), "megatron:dp=2,tp=2,sp", 0.1),
        ("bert", (2, 2), "random:5", 0.1),
    ],
    ids=str,
)
def test_same_numbers_less_memory(ranks4: Ranks, name: str, shape: tuple[int, ...], kind: str, dropout: float) -> None:
    plans = twice(build(name, dropout=dropout), shape, kind)
    for kept, again in ranks4.run(train_both, name, plans, dropout, timeout_s=240):
        for when in ("first", "last"):
            assert kept[when].keys() == again[when].keys()
            assert all(torch.equal(kept[when][key], again[when][key]) for key in kept[when])
        for found, plan in zip((kept, again), plans):
            assert found["issued"] == Counter(planned(plan))
        assert again["saved"] < kept["saved"] / 2
        assert "recomputed(region_1" in again["code"] and "recomputed" not in kept["code"]
    more = Counter(planned(plans[1])) - Counter(planned(plans[0]))
    assert all(c.phase == "backward" for c in more) and (more or kind == "zero3")
    if kind == "zero3":
        assert plans[1].assignment.regathered and "regathered(" in kept["code"]


def accumulate_both(name: str, plans: tuple[Plan, Plan], count: int) -> list[dict[str, torch.Tensor]]:
    reports = []
    for plan in plans:
        case, mesh = logits_case(name), device_mesh(plan.mesh.shape, plan.mesh.axis_names)
        loaded = load_program(plan, case.model, mesh, is_split=True)
        loss = step(loaded, case, count)
        reports.append({"loss": torch.tensor(loss)} | {key: p.grad.to_local() for key, p in case.model.named_parameters()})
    return reports


@pytest.mark.multirank
@pytest.mark.parametrize("kind", ["zero3", "megatron:dp=2,tp=2,zero2"])
def test_in_each_microbatch(ranks4: Ranks, kind: str) -> None:
    plans = twice(microbatch(logits_case("gpt2"), 0, 2), (2, 2), kind)
    for kept, again in ranks4.run(accumulate_both, "gpt2", plans, 2, timeout_s=240):
        assert kept.keys() == again.keys() and all(torch.equal(kept[key], again[key]) for key in kept)
