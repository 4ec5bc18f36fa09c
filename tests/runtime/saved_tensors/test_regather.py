"""Parameters gathered again for backward: the same numbers to the bit, the collectives that were priced, and less
memory in between.
"""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from autopar.costmodel.activations.autograd_footprint import regatherable
from autopar.ir.folding.fold import fold
from autopar.plans.plan import Plan, plan_of
from autopar.runtime.saved_tensors import gather_bucket
from autopar.runtime.saved_tensors.gather_bucket import Landing
from autopar.runtime.saved_tensors.regather import regathered
from autopar.sbp import convert
from autopar.sbp.analysis.parameter_buckets import parameter_buckets
from autopar.sbp.assignment import conversions, only_gathers
from autopar.sbp.axis import Axis
from autopar.sbp.placement import R, S
from tests.runtime.training import finish, forward_backward, issued, planned, plans_for, under
from tests.workers import Ranks, device_mesh
from tests.zoo import Case, build


def twice(name: str, shape: tuple[int, ...], how: str) -> tuple[Plan, Plan]:
    """A plan that stores parameters split and keeps what it gathers of them, and the one that gathers again whatever it
    can: by themselves, in buckets, or in buckets that are prefetched.
    """
    plan = plans_for(name, shape, ("zero3",))["zero3"]
    graph, layouts = plan.graph, plan.assignment.layouts
    again = regatherable(graph, {name: name for name in (*layouts, *plan.assignment.strategies)})
    again = frozenset(name for name in again if any(p.is_split for p in layouts[name]))
    assert again
    gathered = {n: c[0] for n, c in conversions(graph, plan.assignment).items() if only_gathers(c[0].src, c[0].dst)}
    places = parameter_buckets(graph, fold(graph), 1e9, is_prefetched=how == "prefetched") if how != "alone" else {}
    places = {name: place for name, place in places.items() if name in gathered}
    assert bool(places) == (how != "alone")
    given = replace(plan.assignment, parameter_buckets=places)
    assignments = (replace(given, regathered=found) for found in (frozenset(), again))
    return tuple(plan_of(graph, assignment, plan.mesh, plan.cluster) for assignment in assignments)


def gathered_bytes_after_forward(case: Case) -> int:
    """Bytes that backward keeps of what forward gathered."""
    made: list[tuple[StorageWeakRef, int]] = []
    gather, gather_together, begin = convert.all_gather, convert.move_together, gather_bucket.begin_together

    def note(*outs: torch.Tensor) -> None:
        made.extend((StorageWeakRef(out.untyped_storage()), out.untyped_storage().nbytes()) for out in outs)

    def noted(*args: Any) -> torch.Tensor:
        out = gather(*args)
        note(out)
        return out

    def noted_together(axis: Axis, sources: Any, *rest: Any, **how: Any) -> tuple[torch.Tensor, ...]:
        outs = gather_together(axis, sources, *rest, **how)
        note(*(outs if sources[0].is_split else ()))
        return outs

    def noted_landing(axis: Axis, sources: Any, *rest: Any, **how: Any) -> Landing:
        landing = begin(axis, sources, *rest, **how)

        def noted() -> tuple[torch.Tensor, ...]:
            outs = landing()
            note(*outs)
            return outs

        return noted

    convert.all_gather, convert.move_together, gather_bucket.begin_together = noted, noted_together, noted_landing
    try:
        outputs = case.model(*case.args, **case.kwargs)
    finally:
        convert.all_gather, convert.move_together, gather_bucket.begin_together = gather, gather_together, begin
    assert any(x.requires_grad for x in tree_leaves(outputs) if isinstance(x, torch.Tensor))
    dist.barrier()  # gloo's own thread lets go of the last tensor a moment after the call returns
    for _ in range(100):
        alive = sum(num_bytes for storage, num_bytes in made if not storage.expired())
        time.sleep(0.001)
    return alive


def train_both(name: str, plans: tuple[Plan, Plan]) -> list[dict[str, Any]]:
    reports = []
    for plan in plans:
        mesh = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
        case = under(plan, build(name), mesh)
        first = forward_backward(case)
        kept = gathered_bytes_after_forward(case)
        found = {
            "first": {name: tensor.clone() for name, tensor in first.items()},
            "issued": issued(case, mesh),
            "kept": kept,
        }
        reports.append(found | {"code": case.model.code, "last": finish(under(plan, build(name), mesh), 3)})
    return reports


def _bytes_of(plan: Plan) -> Counter[tuple[str, str]]:
    """(kind, phase) -> bytes of all such collectives; buckets have others where some members are gathered again."""
    num_bytes: Counter[tuple[str, str]] = Counter()
    for collective in planned(plan):
        num_bytes[collective.kind, collective.phase] += collective.num_bytes
    return num_bytes


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "shape"), [("mlp", (4,)), ("llama", (4,)), ("gpt2", (2, 2)), ("resnet", (4,))], ids=str
)
@pytest.mark.parametrize("how", ["alone", "bucket", "prefetched"])
def test_same_numbers_less_memory(ranks4: Ranks, name: str, shape: tuple[int, ...], how: str) -> None:
    plans = twice(name, shape, how)
    for kept, again in ranks4.run(train_both, name, plans):
        for when in ("first", "last"):
            assert kept[when].keys() == again[when].keys()
            assert all(torch.equal(kept[when][key], again[when][key]) for key in kept[when])
        for found, plan in zip((kept, again), plans):
            assert found["issued"] == Counter(planned(plan))
        saved = plans[0].costs.total_memory_bytes - plans[1].costs.total_memory_bytes
        assert kept["kept"] - again["kept"] == saved > 0
        assert (".started(" in again["code"]) == (how == "prefetched")
        assert name not in ("llama", "gpt2") or (".started(bucket_" in again["code"]) == (how == "prefetched")
        assert "regathered(" in again["code"] and "regathered(" not in kept["code"]
    more = _bytes_of(plans[1])
    more.subtract(_bytes_of(plans[0]))
    assert {kind for kind, num_bytes in more.items() if num_bytes} == {("all_gather", "backward")}


def test_a_parameter_changed_before_backward_is_refused():
    axis, stored = Axis("a", 1, 0, None), torch.ones(2, 2, requires_grad=True)
    whole, x = stored * 1, torch.ones(2, 2, requires_grad=True)
    with regathered((whole, stored, (axis, S(0), R))):
        loss = (x @ whole.t()).sum()
    with torch.no_grad():
        stored.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_views_are_made_again_once(dtype):
    """Whatever view of the tensor an op saves comes back, and all of them from one gathering."""
    torch.manual_seed(0)
    stored, x = torch.randn(4, 6, dtype=dtype), torch.randn(3, 4, dtype=dtype, requires_grad=True)
    whole, calls = stored.clone().requires_grad_(), []
    truth = torch.autograd.grad((x @ whole[:, 1:].conj() * (x @ whole[:, :5])).sum().abs(), (x, whole))

    class Counted(Axis):
        @property
        def size(self) -> int:
            calls.append(1)
            return 1

    axis = object.__new__(Counted)
    with regathered((whole, stored, (axis, S(0), R))):
        loss = (x @ whole[:, 1:].conj() * (x @ whole[:, :5])).sum().abs()
    assert all(map(torch.equal, torch.autograd.grad(loss, (x, whole)), truth))
    assert calls == [1]
