"""Recomputed blocks: the same numbers to the bit, their collectives once more in backward, and only what enters them is
kept.
"""

import gc
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from autopar.costmodel.activations.recomputable import recomputable
from autopar.ir.folding.fold import fold
from autopar.mesh import Mesh
from autopar.plans.plan import Plan, plan_of
from autopar.runtime.saved_tensors.recompute import recomputed
from tests.runtime.split import load_program, logits_case, microbatch, step
from tests.runtime.training import AXES, finish, forward_backward, issued, plan_called, planned, traced, under
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
        reports.append(
            {
                "first": first,
                "last": last,
                "issued": issued(case, mesh),
                "saved": saved_bytes(case),
                "code": case.model.code,
            }
        )
    return reports


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "shape", "kind", "dropout"),
    [("llama", (4,), "zero3", 0.0), ("gpt2", (2, 2), "megatron:dp=2,tp=2,sp", 0.1), ("bert", (2, 2), "random:5", 0.1)],
    ids=str,
)
def test_same_numbers_less_memory(ranks4: Ranks, name: str, shape: tuple[int, ...], kind: str, dropout: float) -> None:
    plans = twice(build(name, dropout=dropout), shape, kind)
    for kept, again in ranks4.run(train_both, name, plans, dropout):
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
        reports.append(
            {"loss": torch.tensor(loss)} | {key: p.grad.to_local() for key, p in case.model.named_parameters()}
        )
    return reports


@pytest.mark.multirank
@pytest.mark.parametrize("kind", ["zero3", "megatron:dp=2,tp=2,zero2"])
def test_in_each_microbatch(ranks4: Ranks, kind: str) -> None:
    plans = twice(microbatch(logits_case("gpt2"), 0, 2), (2, 2), kind)
    for kept, again in ranks4.run(accumulate_both, "gpt2", plans, 2):
        assert kept.keys() == again.keys() and all(torch.equal(kept[key], again[key]) for key in kept)


def chain(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return (x,)


def counted(calls: list[int], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    calls.append(1)
    return chain(*inputs)


def test_a_backward_in_parts_runs_a_region_again_once():
    """As zero-bubble schedules do: the gradient of the input, then those of the weights, one after the other."""
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    truth = torch.autograd.grad(chain(*inputs)[0].sum(), inputs)
    calls: list[int] = []
    loss = recomputed(partial(counted, calls), *inputs)[0].sum()
    found = [torch.autograd.grad(loss, x, retain_graph=True)[0] for x in inputs]
    assert all(map(torch.equal, found, truth)) and len(calls) == 2


def test_what_is_made_again_goes_with_what_backward_has_done():
    """Nothing waits for the garbage collector, nor for the whole of backward."""
    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    alive: list[int] = []
    made: list[StorageWeakRef] = []

    def region(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        y = (x @ weight).exp()
        made.append(StorageWeakRef(y.untyped_storage()))
        return (y.sin(),)

    y = x * 1
    y.register_hook(lambda _: alive.append(sum(not one.expired() for one in made)))
    gc.disable()
    try:
        loss = recomputed(region, y, weight)[0].sum()
        alive.append(sum(not one.expired() for one in made))
        loss.backward()
    finally:
        gc.enable()
    assert len(made) == 2 and set(alive) == {0}


def test_regions_within_what_torch_recomputes():
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    truth = torch.autograd.grad(chain(*inputs)[0].sum(), inputs)
    out = checkpoint(lambda *inputs: recomputed(chain, *inputs)[0] * 1, *inputs, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), inputs), truth))


def test_the_second_run_casts_as_the_first():
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, again = chain(*inputs)[0], recomputed(chain, *inputs)[0]
    found, truth = (torch.autograd.grad(out.sum(), inputs) for out in (again, plain))
    assert again.dtype == torch.bfloat16 and all(map(torch.equal, found, truth))
