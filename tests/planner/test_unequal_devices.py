"""Plans on groups of devices that differ: the slowest rank's price, the best shares, and a bound that holds."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.costmodel.cluster.device_groups import joined, seen_by
from autopar.costmodel.cluster.load_cluster import Cluster, load_cluster
from autopar.costmodel.work_bound import floor_s, speeds_floor_s
from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner import unequal_devices
from autopar.planner.budget import Budget
from autopar.planner.choose import choose_plan
from autopar.planner.choose_devices import choose_devices
from autopar.planner.handwritten.named_plan import named_plan
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.problem import Setting
from autopar.planner.request import PlanRequest
from autopar.plans import staged_plan
from autopar.plans.plan import Plan, plan_of
from autopar.plans.seen_rank import in_shares, seen_by_all, view_of
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.search.table import cost_of
from tests.runtime.training import plan_called, random_assignment

SLOW = replace(
    load_cluster("free-links"), name="slow", flops_per_s={"float32": 2.5e8}, memory_bandwidth_bytes_per_s=2.5e8
)
# Products are 4 times slower, memory is twice as fast.
ODD = replace(SLOW, name="odd", memory_bandwidth_bytes_per_s=2e9)


def stack(rows: int) -> Graph:
    model = nn.Sequential(
        *(nn.Linear(64, 64, device="meta") for _ in range(3)), nn.GELU(), nn.Linear(64, 8, device="meta")
    )
    return trace(model, (torch.randn(rows, 64, device="meta"),), {})


def two(slow: Cluster = SLOW, counts: tuple[int, int] = (2, 2)) -> Cluster:
    return joined([(counts[0], load_cluster("free-links")), (counts[1], slow)])


def test_a_rank_takes_what_it_takes_where_all_have_its_rows() -> None:
    cluster, sizes = two(), (14, 10, 6, 2)
    mesh = Mesh((4,), ("dp",), ((0, sizes),))
    ddp = plan_called("ddp", stack(32), mesh).assignment
    for view, rows, name in zip(
        seen_by_all(stack(32), ddp, mesh, cluster, PlanRequest().training), (14, 6), ("free-links", 0)
    ):
        alone = load_cluster(name) if name else SLOW
        graph = stack(4 * rows)
        equal = plan_of(graph, plan_called("ddp", graph, Mesh((4,), ("dp",))).assignment, Mesh((4,), ("dp",)), alone)
        assert view.costs.compute_forward_s == pytest.approx(equal.costs.compute_forward_s, rel=1e-12)
        assert view.costs.compute_backward_s == pytest.approx(equal.costs.compute_backward_s, rel=1e-12)
        assert view.costs.memory_bytes["activations"] == equal.costs.memory_bytes["activations"]


def test_a_search_prices_each_group_as_it_is_evaluated() -> None:
    cluster, mesh = two(ODD), Mesh((2, 2), ("dp", "tp"), ((0, (11, 5)),))
    graph, budget = stack(16), Budget.of(60)
    for group, kind in itertools.product(range(2), ("ddp", "zero3", "random:0", "random:1")):
        own, there = view_of(mesh, cluster, group), seen_by(cluster, group)
        setting = Setting(graph, own, there, PlanRequest().on(there), budget)
        problem = setting.problem(fold(graph))
        assignment = plan_called(kind, graph, own).assignment
        choice = problem.encode(assignment)
        assert choice is not None
        assert cost_of(problem.priced.table, choice) == pytest.approx(setting.costs(assignment).step_s, rel=1e-9)


def test_groups_of_the_same_devices_are_planned_like_one() -> None:
    graph, one = stack(32), load_cluster("v100-25g")
    same = joined([(4, one), (4, one)])
    mesh = Mesh((8,), ("dp",))
    found, known = choose_plan(graph, mesh, same), make_plan(graph, mesh, one)
    assert found.costs.compute_forward_s == known.costs.compute_forward_s
    assert tuple(found.mesh.shares[0][1]) == (4,) * 8
    assert speeds_floor_s(graph, same.groups) == pytest.approx(floor_s(graph, mesh, one))


@pytest.mark.parametrize("slow", [SLOW, ODD], ids=lambda one: one.name)
def test_no_plan_in_any_shares_takes_less_than_the_sum_of_the_speeds(slow: Cluster) -> None:
    cluster, draw, least = two(slow), random.Random(0), float("inf")
    graph = stack(24)
    bound = speeds_floor_s(graph, cluster.groups)
    for number in range(30):
        cuts = sorted(draw.sample(range(1, 24), 3))
        sizes = tuple(b - a for a, b in itertools.pairwise((0, *cuts, 24)))
        mesh = Mesh((4,), ("dp",), ((0, sizes),))
        folded = fold(graph)
        kinds = {"ddp": plan_called("ddp", graph, mesh).assignment} if number % 2 else {}
        kinds["random"] = random_assignment(graph, folded, annotate(graph, mesh, folded), mesh, draw)
        least = min(least, *(plan_of(graph, one, mesh, cluster).step_s for one in kinds.values()))
    assert bound <= least
    best = choose_plan(graph, Mesh((4,), ("dp",)), cluster)
    assert bound == best.lower_bound_s <= best.step_s <= least


@pytest.mark.parametrize("slow", [SLOW, ODD], ids=lambda one: one.name)
def test_the_best_shares_are_those_of_brute_force(slow: Cluster) -> None:
    """Of all shares in which the ranks of a group have equally many rows, each with its own best plan."""
    cluster, graph = two(slow), stack(24)
    best_s = float("inf")
    for rows in range(1, 12):
        mesh = Mesh((4,), ("dp",), ((0, (12 - rows, 12 - rows, rows, rows)),))
        for group in range(2):
            found = make_plan(graph, view_of(mesh, cluster, group), seen_by(cluster, group))
            plan = plan_of(graph, in_shares(found.assignment, dict(mesh.shares)), mesh, cluster)
            best_s = min(best_s, plan.step_s)
    assert choose_plan(graph, Mesh((4,), ("dp",)), cluster).step_s <= best_s * 1.002


def test_shares_of_devices_that_differ_in_speed_alone_are_near_the_bound() -> None:
    graph = stack(4000)
    plan = choose_plan(graph, Mesh((4,), ("dp",)), two())
    assert plan.step_s <= 1.05 * plan.lower_bound_s
    assert plan.hand["this plan in equal shares"].step_s == pytest.approx(2.5 * plan.step_s, rel=0.05)
    fast, slow = plan.mesh.shares[0][1][0], plan.mesh.shares[0][1][3]
    assert fast == pytest.approx(4 * slow, rel=0.05)


def test_what_the_slowest_group_takes_needs_no_search_or_peak_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted, searched = list[Plan](), list[int]()

    def counted(graph: Graph, mesh: Mesh, cluster: Cluster, *args: Any, **options: Any) -> Plan:
        assert cluster.groups is not None
        searched.append(cluster.groups.seen)
        return make_plan(graph, mesh, cluster, *args, **options)

    def peaks(plan: Plan) -> tuple[int, ...]:
        predicted.append(plan)
        return (sum(plan.memory_bytes),)

    monkeypatch.setattr(unequal_devices, "make_plan", counted)
    request = PlanRequest(shares=(("dp", (8, 8, 8, 8)),))
    plan = choose_plan(stack(32), Mesh((4,), ("dp",)), two(), request, predict=peaks)
    assert searched == [1], "the slow group"
    assert [one.mesh for one in predicted] == [plan.mesh]


@pytest.mark.parametrize("rows", [16, 4096])
@pytest.mark.parametrize("above", [{}, {8}, {4}, {8, 4}], ids=["none", "all", "some", "any"])
def test_some_devices_are_planned_before_a_peak_of_all_is_predicted(rows: int, above: set[int]) -> None:
    """Whatever the peaks are, the plan is the fastest of those of the sets, each planned by itself to its end.

    `above`: on so many devices the peak of a first plan is above the memory limit.
    """
    net = nn.Sequential(nn.Linear(4096, 4096, device="meta"), nn.ReLU(), nn.Linear(4096, 64, device="meta"))
    cluster, predicted = load_cluster("4 h100 + 4 p100"), list[Plan]()
    graph = trace(net, (torch.randn(rows, 4096, device="meta"),), {})

    def peaks_of() -> Any:
        first: dict[tuple[str, int], Assignment] = {}

        def peaks(plan: Plan) -> tuple[int, ...]:
            predicted.append(plan)
            key = plan.cluster.name, plan.cluster.groups.seen if plan.cluster.groups else -1
            is_first = first.setdefault(key, plan.assignment) == plan.assignment and plan.mesh.num_devices in above
            return (int(1.1 * plan.memory_limit_bytes) if is_first else sum(plan.memory_bytes),)

        return peaks

    def step_s(count: int, kind: str) -> float:
        try:
            return choose_plan(graph, Mesh((count,), ("dp",)), load_cluster(kind), predict=peaks_of()).step_s
        except InfeasibleError:
            return float("inf")

    alone_s = [step_s(8, "4 h100 + 4 p100"), step_s(4, "h100"), step_s(4, "p100")]
    num_alone = len(predicted)
    if min(alone_s) == float("inf"):
        with pytest.raises(InfeasibleError, match="no plan found fits"):
            choose_devices(graph, Mesh((8,), ("dp",)), cluster, predict=peaks_of())
        return
    plan = choose_devices(graph, Mesh((8,), ("dp",)), cluster, predict=peaks_of())
    assert plan.step_s == min(alone_s)
    assert plan.mesh.num_devices == (8 if alone_s[0] == min(alone_s) else 4)
    if not above and rows == 16:
        assert [one.mesh.num_devices for one in predicted[num_alone:]] == [plan.mesh.num_devices]


def test_slow_devices_are_left_out_where_that_is_faster() -> None:
    graph = trace(nn.Linear(4096, 4096, device="meta"), (torch.randn(16, 4096, device="meta"),), {})
    cluster = load_cluster("4 h100 + 4 p100")
    plan = choose_devices(graph, Mesh((8,), ("dp",)), cluster)
    assert plan.mesh.num_devices == 4 and plan.cluster == load_cluster("h100")
    assert "on 4 h100 of 4 h100 + 4 p100" in plan.found_by
    assert plan.hand["on 4 h100 + 4 p100"].step_s > plan.step_s >= plan.lower_bound_s > 0
    assert choose_plan(graph, Mesh((8,), ("dp",)), cluster).mesh.num_devices == 8
    assert choose_devices(stack(4000), Mesh((4,), ("dp",)), two()).mesh.num_devices == 4


def test_a_tensor_axis_lies_within_the_groups() -> None:
    graph, cluster = stack(32), two(counts=(4, 2))
    plan = choose_plan(graph, Mesh((3, 2), ("dp", "tp")), cluster)
    fast, _, slow = plan.mesh.shares[0][1]
    assert fast > slow and plan.mesh.shares[0][0] == 0
    with pytest.raises(AutoparError, match="no whole number of ranks for each of the groups of 4 and 2"):
        choose_plan(graph, Mesh((2, 3), ("dp", "tp")), cluster)


def test_memory_of_each_group_binds_its_own_rows() -> None:
    graph = stack(400)
    free = choose_plan(graph, Mesh((4,), ("dp",)), two())
    fast = next(seen_by_all(graph, free.assignment, _plain(free.mesh), two(), free.training)).costs.total_memory_bytes
    small = replace(load_cluster("free-links"), memory_bytes=int(fast / 0.9 * 0.8))
    cluster = joined([(2, small), (2, SLOW)])
    found = choose_plan(graph, Mesh((4,), ("dp",)), cluster)
    views = list(seen_by_all(graph, found.assignment, _plain(found.mesh), cluster, found.training))
    assert views[0].costs.total_memory_bytes <= 0.9 * small.memory_bytes
    assert found.mesh.shares[0][1][0] < free.mesh.shares[0][1][0] and found.step_s > free.step_s
    tiny = joined([(2, replace(small, memory_bytes=2**14)), (2, SLOW)])
    with pytest.raises(InfeasibleError, match=r"group 1 \(2 free-links\)"):
        choose_plan(graph, Mesh((4,), ("dp",)), tiny)


def _plain(mesh: Mesh) -> Mesh:
    return replace(mesh, shares=tuple((axis, tuple(rows)) for axis, rows in mesh.shares))


def test_a_plan_on_groups_has_the_largest_peak_of_its_ranks() -> None:
    graph, cluster = stack(4000), two(ODD)
    plan = choose_plan(graph, Mesh((4,), ("dp",)), cluster, predict=lambda plan: (sum(plan.memory_bytes),))
    views = seen_by_all(graph, plan.assignment, _plain(plan.mesh), cluster, plan.training)
    own, other = sorted(view.costs.total_memory_bytes for view in views)
    assert plan.peak_bytes == (other,) and own < other


def test_a_batch_too_small_for_shares_is_priced_as_the_slowest() -> None:
    graph = stack(3)
    plan = choose_plan(graph, Mesh((4,), ("dp",)), two())
    assert plan.mesh.shares == () and plan.cluster.groups.seen == 1


def test_a_plan_on_groups_survives_its_file_and_tells_of_them() -> None:
    graph, cluster = stack(32), two()
    plan = choose_plan(graph, Mesh((4,), ("dp",)), cluster)
    again = Plan.loads(plan.dumps(), graph, Mesh((4,), ("dp",)), is_own=True)
    assert (again.mesh, again.cluster, again.assignment) == (plan.mesh, plan.cluster, plan.assignment)
    assert again.costs.step_s == plan.step_s and again.lower_bound_s == plan.lower_bound_s
    text = plan.explain()
    for words in ("Groups of devices", "2 slow", "2 free-links", "shares by peak flop/s (Whale)", "joined by inf GB/s"):
        assert words in text, words
    assert "no plan on these devices or some of them takes less than" in text


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ("dp=8", {}, "has 4 devices, the mesh is dp=8"),
        ("nodes=2,devices=2", {}, "nodes as they are"),
        ("dp=4", {"shares": (8, 8, 8, 7)}, "31 rows, the batch has 32"),
        ("dp=4", {"shares": (16, 16, 0, 0)}, "leave a rank that gets none out"),
        ("a=2,b=2", {"shares": {"b": (20, 12)}}, "along the first axis of mesh a=2,b=2, found shares on axis b"),
    ],
)
def test_what_is_not_planned_on_groups_is_refused(mesh: str, options: dict, message: str) -> None:
    model = nn.Linear(8, 8, device="meta")
    with pytest.raises(AutoparError, match=message):
        autopar.plan(model, mesh, cluster=two(), args=(torch.randn(32, 8, device="meta"),), **options)


def test_shares_that_are_asked_for_are_kept() -> None:
    model, args = nn.Linear(8, 8, device="meta"), (torch.randn(32, 8, device="meta"),)
    plan = autopar.plan(model, "dp=4", cluster=two(), args=args, shares=(10, 10, 6, 6))
    assert tuple(plan.mesh.shares[0][1]) == (10, 10, 6, 6)


def test_a_hand_plan_on_groups_has_equal_parts_at_the_price_of_the_slowest() -> None:
    model, graph, mesh = nn.Linear(8, 8), stack(32), Mesh((4,), ("dp",))
    plan = named_plan("ddp", model, graph, mesh, two(), PlanRequest())
    assert plan.mesh.shares == () and plan.cluster == seen_by(two(), 1)
    assert (
        plan.costs.compute_forward_s
        == named_plan("ddp", model, graph, mesh, SLOW, PlanRequest()).costs.compute_forward_s
    )


class Deep(nn.Module):
    """Many activations beside few parameters; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(64, 64), nn.GELU())))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(x), y)


@pytest.mark.parametrize(("mesh", "shares", "count"), [("dp=4", (10, 10, 6, 6), 2), ("pp=2,dp=2", (20, 12), 4)])
def test_shares_that_are_asked_for_are_those_of_the_batch(mesh: str, shares: tuple[int, ...], count: int) -> None:
    with torch.device("meta"):
        model, example = Deep(), (torch.randn(32, 64), torch.randn(32, 64))
    plan = autopar.plan(model, mesh, cluster=two(), args=example, shares={"dp": shares}, num_microbatches=count)
    ((axis, rows),) = plan.mesh.shares
    assert plan.mesh.axis_names[axis] == "dp" and tuple(rows) == shares


def test_where_memory_caps_a_groups_rows_more_microbatches_give_it_those_that_its_speed_asks_for() -> None:
    with torch.device("meta"):
        model, example = Deep(), (torch.randn(1024, 64), torch.randn(1024, 64))
    asked = {"cluster": two(), "args": example, "memory_limit_bytes": 3_780_000}
    whole = autopar.plan(model, "dp=4", num_microbatches=1, **asked)
    found = autopar.plan(model, "dp=4", **asked)
    assert isinstance(found, StagedPlan) and found.schedule.num_microbatches == 2
    assert found.step_s < 0.7 * whole.step_s and found.step_s < 1.02 * found.lower_bound_s
    ((_, (fast, _, slow, _)),) = found.mesh.shares
    ((_, (capped, *_)),) = whole.mesh.shares
    assert fast > capped and 3.5 < fast / slow < 4.5 and fast % 2 == slow % 2 == 0
    assert max(found.peak_bytes) <= 3_780_000
    graph = trace(skeleton(model), example, {})
    again = staged_plan.loads(found.dumps(), graph, Mesh((4,), ("dp",)))
    assert again.mesh.shares == found.mesh.shares and again.step_s == found.step_s
    assert autopar.plan(model, "dp=4", **asked | {"num_microbatches": 4}).mesh.shares[0][1][0] % 4 == 0


def test_the_choices_of_one_pass_are_priced_in_more_microbatches_before_others_are_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[Mesh] = []

    def counted(graph: Graph, mesh: Mesh, *args: Any, **options: Any) -> Plan:
        searched.append(mesh)
        return make_plan(graph, mesh, *args, **options)

    with torch.device("meta"):
        graph = trace(Deep(), (torch.randn(16, 64, 64), torch.randn(16, 64, 64)), {})
    slow = replace(SLOW, flops_per_s={"float32": 3e8}, memory_bandwidth_bytes_per_s=3e8)
    where = graph, Mesh((4,), ("dp",)), two(slow)
    request = PlanRequest(memory_limit_bytes=4_000_000)  # a fast device needs 1 % more in one pass
    monkeypatch.setattr(unequal_devices, "make_plan", counted)
    found = choose_plan(*where, request)
    assert len(searched) == 1 and isinstance(found, StagedPlan)
    monkeypatch.setattr(unequal_devices.OnMesh, "_try_in_more", lambda *_: None)
    known = choose_plan(*where, request)
    assert len(searched) > 2 and found.step_s < known.step_s * (1 + 1e-5) and _plain(found.mesh) == _plain(known.mesh)
    searched.clear()
    choose_plan(*where, replace(request, memory_limit_bytes=4_100_000))  # memory holds all that the speeds ask for
    assert len(searched) == 1
