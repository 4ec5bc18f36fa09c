"""Offloaded regions: the same numbers to the bit, and what backward needs of them waits on the host."""

import gc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.costmodel.activations.recomputable import recomputable
from autopar.ir.folding.fold import fold
from autopar.mesh import Mesh
from autopar.plans.plan import Plan, plan_of
from autopar.runtime.saved_tensors.offload_saved import Offload
from tests.runtime.training import AXES, finish, forward_backward, issued, plan_called, planned, traced, under
from tests.workers import Ranks, device_mesh
from tests.zoo import Case, build


class _Made(TorchDispatchMode):
    """Notes every storage that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if type(x) is torch.Tensor:
                ref = StorageWeakRef(x.untyped_storage())
                self.storages.setdefault(ref.cdata, (ref, x.untyped_storage().nbytes()))
        return out

    def alive_bytes(self) -> int:
        return sum(num_bytes for ref, num_bytes in self.storages.values() if not ref.expired())


def kept_bytes(case: Case) -> tuple[int, int]:
    """What of one forward's tensors is alive before backward, (on the device, on the host)."""
    on_host: dict[int, int] = {}
    to_host = Offload._to_host

    def noted(self: Offload, x: torch.Tensor) -> torch.Tensor:
        host = to_host(self, x)
        on_host[StorageWeakRef(host.untyped_storage()).cdata] = host.numel()
        return host

    Offload._to_host = noted
    try:
        with _Made() as made:
            out = case.model(*case.args, **case.kwargs)
    finally:
        Offload._to_host = to_host
    gc.collect()
    host = sum(on_host.values())
    assert case.loss(out).requires_grad
    return made.alive_bytes() - host, host


def plans_of(name: str, shape: tuple[int, ...], kind: str, dropout: float) -> dict[str, Plan]:
    """A plan that keeps everything, one that offloads every block, and one that also recomputes them."""
    graph = traced(build(name, dropout=dropout))
    plan = plan_called(kind, graph, Mesh(shape, AXES[: len(shape)]))
    regions = recomputable(fold(graph), graph)
    assert len(regions) >= 2
    changes: dict[str, Any] = {"kept": {}, "offloaded": {"offloaded": regions}}
    changes["both"] = {"offloaded": regions, "recomputed": (regions[0], regions[1][:9])}
    return {
        key: plan_of(graph, replace(plan.assignment, **change), plan.mesh, plan.cluster)
        for key, change in changes.items()
    }


def train_each(name: str, plans: dict[str, Plan], dropout: float) -> dict[str, dict[str, Any]]:
    reports = {}
    for key, plan in plans.items():
        mesh = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
        case = under(plan, build(name, dropout=dropout), mesh)
        torch.manual_seed(3)
        first = {key: x.clone() for key, x in forward_backward(case).items()}
        last = finish(case, 3)
        case.model.zero_grad()
        reports[key] = {
            "first": first,
            "last": last,
            "issued": issued(case, mesh),
            "bytes": kept_bytes(case),
            "code": case.model.code,
        }
    return reports


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "shape", "kind", "dropout"),
    [("llama", (4,), "zero3", 0.0), ("gpt2", (2, 2), "megatron:dp=2,tp=2,sp", 0.1)],
    ids=str,
)
def test_same_numbers_less_memory(ranks4: Ranks, name: str, shape: tuple[int, ...], kind: str, dropout: float) -> None:
    plans = plans_of(name, shape, kind, dropout)
    for reports in ranks4.run(train_each, name, plans, dropout):
        for key, plan in plans.items():
            found, truth = reports[key], reports["kept"]
            for when in ("first", "last"):
                assert found[when].keys() == truth[when].keys()
                assert all(torch.equal(found[when][x], truth[when][x]) for x in truth[when])
            assert found["issued"] == Counter(planned(plan))
        (kept, none), (left, moved), (least, few) = (reports[key]["bytes"] for key in plans)
        assert none == 0 and left + moved == kept and moved > kept / 2
        assert few < moved and least + few < kept
        assert (moved, few) == tuple(
            pytest.approx(plans[key].costs.moved_bytes, rel=0.1) for key in ("offloaded", "both")
        )


def saved_by(function, *inputs: torch.Tensor, stay: tuple[torch.Tensor, ...] = ()) -> tuple[torch.Tensor, Offload]:
    offload = Offload(None, *stay)
    with offload:
        return function(*inputs), offload


def test_each_storage_is_copied_once_and_what_stays_never():
    torch.manual_seed(0)
    x, weight, other = (torch.randn(6, 6, requires_grad=True) for _ in range(3))
    truth = torch.autograd.grad(((x * 2).t() @ weight.t()).exp().sum(), (x, weight))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return ((y.t() @ weight.t()).exp() + 0 * (y[1:] * y[:-1]).sum() * other[0]).sum()

    loss, first = saved_by(function, x, stay=(weight, other))
    assert [copy.host.numel() for copy in first.copies].count(6 * 6 * 4) == 2  # y and the exponential
    second = Offload(first)
    with second:
        loss = loss + 0 * saved_by(torch.sin, x)[0].sum()
    assert not second.copies
    for _ in range(2):  # backward may come twice
        found = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        assert all(map(torch.equal, found, truth))


def test_a_storage_that_changes_is_copied_again():
    """As in recurrent cells: the gates are activated in place, one after the other, in one tensor."""

    def gates(x: torch.Tensor) -> torch.Tensor:
        a, b = (x * 1).unsafe_chunk(2)
        return (a.sigmoid_() * b.tanh_()).sum()

    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    (truth,) = torch.autograd.grad(gates(x), x)
    assert torch.equal(torch.autograd.grad(saved_by(gates, x)[0], x)[0], truth)


def test_copies_go_with_the_graph():
    x = torch.randn(4, requires_grad=True)
    gc.disable()
    try:
        loss, offload = saved_by(lambda: (x * 2).exp().sum())
        host = StorageWeakRef(offload.copies[0].host.untyped_storage())
        del offload
        assert not host.expired()
        loss.backward()
        assert host.expired()
    finally:
        gc.enable()


def test_what_an_earlier_region_copied_is_not_copied_again():
    x = torch.randn(4, requires_grad=True)
    y, first = x * 2, Offload(None)
    with first:
        a = y.sin()
    second = Offload(first)
    with second:
        b = y.cos() * y
    assert len(first.copies) == 1 and all(copy.storage.cdata != first.copies[0].storage.cdata for copy in second.copies)
    (a + b).sum().backward()
    z = x.detach().requires_grad_()
    ((2 * z).sin() + (2 * z).cos() * (2 * z)).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)


@pytest.mark.gpu
def test_on_a_gpu_the_device_is_free_until_backward():
    x = torch.randn(2**24, device="cuda", requires_grad=True)
    before, offload, y = torch.cuda.memory_allocated(), None, x
    for _ in range(4):
        offload = Offload(offload, x)
        with offload:
            y = y.sin().exp()
    del offload
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 2 * x.nbytes
    y.sum().backward()
    z = x.detach().requires_grad_()
    w = z
    for _ in range(4):
        w = w.sin().exp()
    w.sum().backward()
    assert torch.equal(x.grad, z.grad)
