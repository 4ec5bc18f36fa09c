"""Optimizer state on the host: the least of it that makes a plan fit, and the best plan that has some, against every
possibility.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product

import pytest

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.state_offload import hostable
from autopar.costmodel.training import Training
from autopar.errors import InfeasibleError, PlanError
from autopar.explain.memory_savings import costs_without
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.layouts.optimizer_offload import AssignedGraph, Solution, fill, host_search, s_per_byte
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.problem import Problem, Setting
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.sbp.assignment import NO_CHOICES
from tests.costmodel.build import layer_stack, unfolded
from tests.planner.cases import CPU, MESH, by_hand, hand_made, traced

TRAINING = Training()


def subsets(graph: Graph) -> Iterator[frozenset[str]]:
    names = [item.value.name for item in hostable(graph)]
    return map(frozenset, chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)))


@pytest.mark.parametrize("kind", ["ddp", "zero3", "megatron"])
def test_no_subset_makes_it_fit_with_less(kind: str) -> None:
    graph, assignment = traced("mlp"), by_hand("mlp", kind)
    every = [evaluate(graph, replace(assignment, state_on_host=names), MESH, CPU) for names in subsets(graph)]
    most, least = (pick(costs.total_memory_bytes for costs in every) for pick in (max, min))
    part = AssignedGraph(graph, assignment, TRAINING)
    assert fill([part], MESH, CPU, least - 1) is None
    unknown = replace(CPU, host_bandwidth_bytes_per_s=0.0)
    for share in (0.0, 0.1, 0.35, 0.6, 0.8, 1.0):
        limit = most - share * (most - least)
        (found,) = fill([part], MESH, CPU, limit)
        costs = evaluate(graph, found.assignment, MESH, CPU)
        assert costs.total_memory_bytes <= limit and found.costs == costs
        assert costs.state_on_host_bytes == min(
            one.state_on_host_bytes for one in every if one.total_memory_bytes <= limit
        )
        assert (fill([part], MESH, unknown, limit) is None) == (share > 0)


def test_stages_of_a_device_share_its_memory() -> None:
    """One of them may have all of the state that goes."""
    graph, kinds = traced("mlp"), ("ddp", "zero3")
    parts = [AssignedGraph(graph, by_hand("mlp", kind), TRAINING) for kind in kinds]
    every = [
        [evaluate(graph, replace(part.assignment, state_on_host=names), MESH, CPU) for names in subsets(graph)]
        for part in parts
    ]
    pairs = list(product(*every))
    sizes = [
        tuple(sum(getattr(one, what) for one in pair) for what in ("total_memory_bytes", "state_on_host_bytes"))
        for pair in pairs
    ]
    most, least = max(sizes)[0], min(sizes)[0]
    for share in (0.2, 0.5, 0.9):
        limit = most - share * (most - least)
        found = fill(parts, MESH, CPU, limit)
        costs = [evaluate(graph, part.assignment, MESH, CPU) for part in found]
        assert sum(one.total_memory_bytes for one in costs) <= limit and [part.costs for part in found] == costs
        moved, best = (
            sum(one.state_on_host_bytes for one in costs),
            min(moved for size, moved in sizes if size <= limit),
        )
        brought = sum(one.memory_bytes.get("fetched", 0) for one in costs)
        assert best <= moved <= best + brought
    assert fill(parts, MESH, CPU, least - 1) is None


@pytest.mark.parametrize("host_bandwidth", [1e6, 1e9, 1e12])
def test_no_set_of_parameters_gives_a_faster_plan(host_bandwidth: float) -> None:
    """Each set by itself is a table, which is searched to the end."""
    graph, mesh = layer_stack(3, hidden=64), Mesh((4,), ("a",))
    cluster = replace(CPU, host_bandwidth_bytes_per_s=host_bandwidth)

    def setting(limit: float, names: frozenset[str] = frozenset()) -> Setting:
        request = PlanRequest(
            memory_limit_bytes=limit, training=TRAINING, given=replace(NO_CHOICES, state_on_host=names)
        )
        return Setting(graph, mesh, cluster, request, Budget.of(60.0))

    problem = setting(math.inf).problem(unfolded(graph))
    fastest = setting(math.inf).search(problem, [])
    num_chosen = 0
    for share in (0.95, 0.75, 0.6, 0.5, 0.4):
        limit = share * fastest.memory_bytes
        each = [_best(setting(limit, names), problem) for names in subsets(graph)]
        if min(each) == math.inf:
            with pytest.raises(InfeasibleError, match="state on the host"):
                _on_host(setting(limit), problem)
            continue
        found = _on_host(setting(limit), problem)
        assert evaluate(graph, found.assignment, mesh, cluster).total_memory_bytes <= limit
        brought_s = s_per_byte(cluster) * 2 * 64 * 64 * 4
        num_chosen += bool(found.assignment.state_on_host)
        assert found.lower_bound_s <= min(each) * (1 + 1e-9)
        # what the fastest without any is worth is known besides; ties and what is brought back for the update are not
        # looked at
        assert min(found.step_s, each[0]) <= (min(each) + brought_s) * 1.005
    assert bool(num_chosen) == (host_bandwidth > 1e6)


def _on_host(setting: Setting, problem: Problem) -> Solution:
    search = host_search(setting, setting.repriced(problem))
    return search.solved(search.setting.search(search.problem, []))


def _best(setting: Setting, problem: Problem) -> float:
    try:
        return setting.search(setting.repriced(problem), []).cost_s
    except InfeasibleError:
        return math.inf


@pytest.mark.parametrize("host_bandwidth", [0.0, 1e5, 1e12])
def test_a_plan_has_state_on_the_host_where_nothing_else_fits_or_costs_less(host_bandwidth: float) -> None:
    graph, cluster = traced("mlp"), replace(load_cluster("free-links"), host_bandwidth_bytes_per_s=host_bandwidth)
    free = make_plan(graph, MESH, cluster, PlanRequest(memory_limit_bytes=math.inf))
    least = _least(graph, replace(cluster, host_bandwidth_bytes_per_s=0.0))
    assert not free.assignment.state_on_host
    if not host_bandwidth:
        with pytest.raises(InfeasibleError, match="the least that would do"):
            make_plan(graph, MESH, cluster, PlanRequest(memory_limit_bytes=0.99 * least))
        return
    tight = make_plan(graph, MESH, cluster, PlanRequest(memory_limit_bytes=0.99 * least))
    assert tight.assignment.state_on_host and tight.costs.total_memory_bytes <= 0.99 * least
    assert tight.costs.waiting_s["update"] == pytest.approx(2 * tight.costs.state_on_host_bytes / host_bandwidth)
    assert 0 < tight.lower_bound_s <= tight.step_s
    with pytest.raises(InfeasibleError, match="with all of the optimizer's state on the host"):
        make_plan(graph, MESH, cluster, PlanRequest(memory_limit_bytes=0.3 * least))


def test_on_four_axes_too() -> None:
    graph, mesh, cluster = traced("mlp"), Mesh((2, 2, 2, 2), ("a", "b", "c", "d")), load_cluster("free-links")
    with pytest.raises(InfeasibleError):
        make_plan(graph, mesh, replace(cluster, host_bandwidth_bytes_per_s=0.0), PlanRequest(memory_limit_bytes=27_000))
    plan = make_plan(graph, mesh, cluster, PlanRequest(memory_limit_bytes=27_000))
    assert plan.assignment.state_on_host and plan.costs.total_memory_bytes <= 27_000


def _least(graph: Graph, cluster: Cluster) -> float:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(graph, MESH, cluster, PlanRequest(memory_limit_bytes=1.0))
    return float(str(caught.value).split("would do is ")[1].split(" bytes")[0])


def with_state_on_host(*names: str) -> Plan:
    plan = hand_made("mlp")
    assignment = replace(plan.assignment, state_on_host=frozenset(names))
    return replace(plan, assignment=assignment)


def test_it_is_written_read_and_explained() -> None:
    graph = traced("mlp")
    chosen = hostable(graph)[:2]
    plan = Plan.loads(with_state_on_host(*(item.value.name for item in chosen)).dumps(), graph, MESH)
    assert plan.assignment.state_on_host == {item.value.name for item in chosen}
    text = plan.explain()
    assert "Optimizer state of 2 parameters" in text and "autopar.offload_optimizer(optimizer, model)" in text
    assert text.count("state on host") >= 1 and "exposed host transfers, update" in text
    without = dict(costs_without(plan))["optimizer offload"]
    assert without.step_s < plan.step_s and without.total_memory_bytes > plan.costs.total_memory_bytes


@pytest.mark.parametrize("name", ["stranger", "x"])
def test_what_has_no_state_is_refused(name: str) -> None:
    graph = traced("mlp")
    name = next(item.value.name for item in graph.of_kind("argument")) if name == "x" else name
    with pytest.raises(PlanError, match=f"optimizer state of '{name}' on the host"):
        Plan.loads(with_state_on_host(name).dumps(), graph, MESH)
