"""Plans that fit only with optimizer state on the host, run: the same numbers to the bit, what is planned moved, the
memory predicted.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from autopar.costmodel.activations.count_storages import count_storages
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import AutoparError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.mesh import as_mesh
from autopar.peak_memory.predict import Peak, predict_peak, predict_peaks
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime import offload_optimizer as home
from autopar.runtime.offload_optimizer import offload_optimizer
from autopar.runtime.pipeline.parameter_elsewhere import ParameterElsewhere
from autopar.runtime.pipeline.trainer import Trainer
from bench.memory import TOLERANCE
from bench.memory import sample_of as sample
from tests.runtime.staged import under
from tests.runtime.test_offload_optimizer import counted
from tests.workers import Ranks

NUM_STEPS = 3
# The wide network of bench.memory: bytes of a device for which the fastest plan that fits has some state on the host.
LIMITS = {"dp=2,tp=2": 8.8e6, "pp=2,dp=2": 5.55e6}


def plan_on(mesh: str) -> Plan | StagedPlan:
    case = sample("mlp")
    graph = trace(skeleton(case.model), case.args, case.kwargs)
    cluster = replace(load_cluster("free-links"), host_bandwidth_bytes_per_s=1e12)
    num = 4 if "pp" in mesh else 1
    return choose_plan(
        graph,
        as_mesh(mesh),
        cluster,
        PlanRequest(memory_limit_bytes=LIMITS[mesh], num_microbatches=num, time_limit_s=10.0),
    )


def own_stages(plan: Plan | StagedPlan, rank: int) -> list[Plan]:
    return [plan.stages[number] for number in plan.schedule.stages_of(rank)] if isinstance(plan, StagedPlan) else [plan]


def trained(plan: Plan | StagedPlan, prepare: Callable[[Any, Any], None]) -> tuple[dict[str, torch.Tensor], int]:
    """What the parameters are after some steps, and the bytes of state brought to the device."""
    case = sample("mlp")
    model = under(plan, case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepare(optimizer, model)
    with counted() as found:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            model.train_step(*case.args, **case.kwargs)
            optimizer.step()
    return {name: x.to_local().clone() for name, x in model.named_parameters()}, found.num_bytes


@contextmanager
def the_host_is_elsewhere() -> Iterator[None]:
    """Copies in its memory are not counted."""
    to_host = home.to_host

    def uncounted(x: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            return to_host(x)

    home.to_host = uncounted
    try:
        yield
    finally:
        home.to_host = to_host


def most_bytes(plan: Plan | StagedPlan) -> dict[str, int]:
    """Of the passes and of the update, in the step in which it is least."""
    case, found = sample("mlp"), {"passes": [], "update": []}
    model = under(plan, case)
    optimizer = offload_optimizer(torch.optim.AdamW(model.parameters(), foreach=False), model)
    last, away = model._autopar.last, model._autopar.offloaded
    loadeds = [part.loaded for part in last.parts] if isinstance(last, Trainer) else [last]
    model.train_step(*case.args, **case.kwargs)
    optimizer.step()
    optimizer.zero_grad()
    state = [x for name, p in model.named_parameters() if name not in away for x in optimizer.state[p].values()]
    batch = [x for x in tree_leaves((case.args, case.kwargs)) if isinstance(x, torch.Tensor)]
    constants = [x for loaded in loadeds for x in loaded.constants.values()]
    own = [p for p in model.parameters() if not isinstance(p, ParameterElsewhere)]
    held = [*own, *model.buffers(), *constants, *state, *batch]
    with count_storages(held) as storages, the_host_is_elsewhere():
        for _ in range(NUM_STEPS):
            storages.restart()
            model.train_step(*case.args, **case.kwargs)
            found["passes"].append(storages.restart())
            optimizer.step()
            found["update"].append(storages.restart())
            optimizer.zero_grad()
    return {phase: min(sizes) for phase, sizes in found.items()}


def on_rank(plan: Plan | StagedPlan) -> dict[str, Any]:
    plain, nothing = trained(plan, lambda *_: None)
    moved, num_bytes = trained(plan, offload_optimizer)
    return {
        "same": all(torch.equal(plain[name], moved[name]) for name in plain),
        "bytes": (nothing, num_bytes),
        "most": most_bytes(plan),
    }


@pytest.mark.multirank
@pytest.mark.parametrize("mesh", LIMITS)
@pytest.mark.filterwarnings("ignore:the plan counts on")
def test_a_tight_plan_runs_as_planned(ranks4: Ranks, mesh: str) -> None:
    plan = plan_on(mesh)
    peaks = (
        predict_peaks(plan) if isinstance(plan, StagedPlan) else (predict_peak(plan.graph, plan.mesh, plan.assignment),)
    )
    for number, found in enumerate(ranks4.run(on_rank, plan)):
        rank = number * len(peaks) // 4
        stages, peak = own_stages(plan, rank), peaks[rank]
        moved = sum(stage.costs.state_on_host_bytes for stage in stages)
        assert found["same"] and moved > 0
        assert all(
            sum(stage.costs.total_memory_bytes for stage in own_stages(plan, r)) <= LIMITS[mesh]
            for r in range(len(peaks))
        )
        assert found["bytes"] == (0, (NUM_STEPS - 1) * moved)  # there is none in the first step
        assert max(found["most"].values()) == pytest.approx(peak.total_bytes, rel=TOLERANCE)
        assert found["most"]["update"] == pytest.approx(dict(peak.phases)["update"], rel=TOLERANCE)
        assert peak.total_bytes < without_host(plan, rank) - moved / 2


def without_host(plan: Plan | StagedPlan, rank: int) -> int:
    """The predicted peak, were all state on the device."""

    def bare(stage: Plan) -> Plan:
        return replace(stage, assignment=replace(stage.assignment, state_on_host=frozenset()))

    if isinstance(plan, StagedPlan):
        return predict_peaks(replace(plan, stages=tuple(map(bare, plan.stages))))[rank].total_bytes
    return predict_peak(plan.graph, plan.mesh, bare(plan).assignment).total_bytes


def reminded(plan: Plan) -> list[Any]:
    """What is said in three steps without the state on the host, and with; what is moved for names that are given; a
    second call.
    """
    found: list[Any] = []
    for prepare in (lambda *_: None, offload_optimizer):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trained(plan, prepare)
        found.append([str(one.message) for one in said if "offload_optimizer" in str(one.message)])
    found.append(trained(plan, lambda optimizer, model: offload_optimizer(optimizer, model, ["head.bias"]))[1])
    try:
        trained(plan, lambda optimizer, model: offload_optimizer(offload_optimizer(optimizer, model), model))
    except AutoparError as error:
        found.append(str(error))
    return found


@pytest.mark.multirank
def test_who_forgets_is_told_once(ranks4: Ranks) -> None:
    plan = plan_on("dp=2,tp=2")
    for without, with_it, head_bytes, again in ranks4.run(reminded, plan):
        assert len(without) == 1 and f"{len(plan.assignment.state_on_host)} parameters" in without[0] and not with_it
        name = next(item.value.name for item in plan.graph.of_kind("parameter") if item.fqn == "head.bias")
        parts = 4 // (4 if any(p.is_split for p in plan.assignment.layouts[name]) else 1)
        assert 0 < head_bytes <= 2 * 2 * 4 * 1024 * parts and "already" in again


def test_the_update_by_hand():
    """Two buckets of one parameter each, of which the larger is brought back; what stays has its copies too."""
    plan = plan_on("dp=2,tp=2")
    peak: Peak = predict_peak(plan.graph, plan.mesh, plan.assignment)
    memory = plan.costs.memory_bytes
    largest = max(memory["fetched"] // 2, 1)  # AdamW has twice as much state
    assert dict(peak.phases)["update"] == peak.stored_bytes + memory["gradients"] + memory["fetched"] + 2 * largest
