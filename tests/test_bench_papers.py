"""The published comparisons: the formulas against counting, and every section once, small."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.evaluate import evaluate
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.planner.handwritten.hand_plan import HandPlan
from autopar.planner.handwritten.tune import Tried, tuned
from autopar.planner.layouts.search_meshes import make_plan
from autopar.plans.plan import Plan
from autopar.plans.serialise import HandCosts
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import I, P, R, S
from autopar.sbp.signature import Signature, Strategy
from bench import report
from bench.papers import PAPERS, TABLES, alpa, alpa_moe, autoddl, tap, whale
from bench.papers.alpa import SIZES, rate
from bench.papers.compare import compare, fastest, traced
from bench.papers.grid import Shape, bytes_by_layer, grid_of, linear_ops, sent_bytes, shape_of

M, K, N = 32, 48, 16
GRIDS = [(2, 4, 2), (4, 2, 1), (1, 2, 4), (8, 1, 1), (1, 1, 8), (2, 2, 2)]
# A link of 1 byte/s, and products so slow that none is worth doing twice.
BYTES_ONLY = Cluster("bytes", (LinkLevel(0, 0.0, 1.0),), {"float32": 1.0}, 1e30, 2**60, "made up")


class Product(nn.Module):
    """y = x w^T; x is a parameter, so that it may come in any layout and has a gradient, as inside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.weight = nn.Parameter(torch.zeros(M, K)), nn.Parameter(torch.zeros(N, K))

    def forward(self) -> torch.Tensor:
        return nn.functional.linear(self.x, self.weight)


def linear_graph() -> Graph:
    with torch.device("meta"):
        return traced(Product())


def on_grid(graph: Graph) -> Assignment:
    """Rows split on axis 0, outputs on axis 1, inputs on axis 2; gradients come back summed, and the product leaves
    summed.
    """
    (op,) = graph.ops
    x, weight, y = op.inputs[0].name, op.inputs[1].name, op.outputs[0].name
    signatures = (Signature((S(0), R), (S(0),)), Signature((R, S(0)), (S(1),)), Signature((S(1), S(1)), (P,)))
    return Assignment(
        {op.name: Strategy(signatures)}, {x: (S(0), I, S(1)), weight: (I, S(0), S(1))}, {}, {y: (S(0), S(1), I)}
    )


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_linear_layer_on_a_grid_is_counted_as_by_the_formula_to_the_byte(grid):
    graph, mesh = linear_graph(), Mesh(grid, ("batch", "out", "in"))
    costs = evaluate(graph, on_grid(graph), mesh, BYTES_ONLY)
    counted = sum(sent_bytes(planned.collective, mesh) for planned in costs.collectives)
    p1, p2, p3 = grid
    by_formula = (
        2
        * 4
        * ((p3 - 1) / p3 * M * N / (p1 * p2) + (p2 - 1) / p2 * M * K / (p1 * p3) + (p1 - 1) / p1 * K * N / (p2 * p3))
    )
    assert counted == by_formula == Shape(M, K, N, 4).moved_bytes(grid)
    # a ring at 1 byte/s
    assert costs.communication_s("forward") + costs.communication_s("backward") == pytest.approx(counted)
    (op,) = graph.ops
    assert grid_of(op, on_grid(graph).strategies[op.name], mesh) == grid and shape_of(op) == Shape(M, K, N, 4)


def test_best_grid_is_the_least_of_all_that_divide():
    for num_devices, shape in itertools.product(
        (4, 8, 12), (Shape(64, 24, 48, 2), Shape(8, 96, 96, 4), Shape(4096, 6, 6, 4))
    ):
        sides = [g for g in itertools.product(range(1, num_devices + 1), repeat=3) if math.prod(g) == num_devices]
        whole = [g for g in sides if shape.m % g[0] == shape.n % g[1] == shape.k % g[2] == 0]
        assert shape.moved_bytes(shape.best_grid(num_devices)) == min(map(shape.moved_bytes, whole))


def test_a_balanced_grid_is_six_bounds_less_what_stays():
    shape, p = Shape(128, 128, 128, 4), 64
    assert shape.moved_bytes((4, 4, 4)) == pytest.approx(6 * (1 - 1 / 4) * shape.order_bytes(p))


@pytest.mark.parametrize("num_devices", [4, 8])
def test_the_plan_found_for_a_layer_moves_what_its_best_grid_does(num_devices):
    best = make_plan(linear_graph(), Devices(num_devices), BYTES_ONLY)
    moved = sum(bytes_by_layer(best).values())
    assert moved == Shape(M, K, N, 4).moved_bytes(Shape(M, K, N, 4).best_grid(num_devices))
    (op,) = linear_ops(best.graph)
    assert math.prod(grid_of(op, best.assignment.strategies[op.name], best.mesh)) == num_devices


def two_layers() -> Plan:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        graph = traced(model, torch.zeros(32, 64))
    return make_plan(graph, Mesh((2, 2), ("a", "b")), BYTES_ONLY)


def test_bytes_by_layer_are_those_of_all_collectives():
    plan = two_layers()
    total = sum(sent_bytes(planned.collective, plan.mesh) for planned in plan.costs.collectives)
    found = bytes_by_layer(plan)
    assert total > 0 and sum(found.values()) == pytest.approx(total)
    assert set(found) <= {op.name for op in linear_ops(plan.graph)} | {""}


def test_what_is_compared_is_data_parallelism_megatron_and_the_best_of_all():
    graph = two_layers().graph
    found = compare(graph, 4, BYTES_ONLY, time_limit_s=10.0)
    tried = {one.name: one.costs.step_s for one in tuned(graph, fold(graph), Devices(4), BYTES_ONLY).tried}
    assert found.ddp.name == "ddp" and found.ddp.costs.step_s == tried["ddp"]
    plain = {name: step_s for name, step_s in tried.items() if name.startswith("megatron") and "zero" not in name}
    assert len(plain) > 2 and found.megatron.costs.step_s == min(plain.values())
    assert found.expert.costs.step_s == min(tried.values()) >= found.plan.costs.step_s


def test_the_fastest_is_one_that_fits():
    slow, large = (
        Tried("x", HandPlan(), Mesh((4,), ("a",)), costs) for costs in (HandCosts(2.0, 1), HandCosts(1.0, 9))
    )
    assert (
        fastest((slow, large), 9) is large and fastest((slow, large), 8) is slow and fastest((slow, large), 0) is large
    )


def test_published_rates_and_seconds_of_alpa_agree_with_its_own_latencies():
    """The artifact's file has seconds and rates for the runs without stages; the formula joins them."""
    latencies = {"350M": 71.11, "760M": 57.34, "6.7B": 74.36, "39B": 2493.7}
    for size in SIZES:
        if size.name in latencies:
            assert size.step_s(size.without_stages) == pytest.approx(latencies[size.name], rel=0.01)


def test_scaling_is_relative_to_the_smallest_model_on_one_device(monkeypatch):
    """Twice the devices at the same rate each scale by 1, whatever that rate is: a model that is too fast everywhere
    gains nothing.
    """
    small, large = SIZES[:2]
    plans = {
        small: SimpleNamespace(step_s=10.0),
        large: SimpleNamespace(step_s=10.0 * rate(large, 1.0) / rate(small, 1.0)),
    }
    monkeypatch.setattr(alpa, "planned", plans.get)
    monkeypatch.setattr(alpa, "described", lambda plan: {alpa.AGAIN: 0})
    (row,) = alpa.measure(large, small)[alpa.SCALING]
    assert alpa.run_rate(small, small.step_s(small.alpa), 1.0) == pytest.approx(small.alpa * 1e12)
    assert row["ours, of its one-GPU rate"] == pytest.approx(1.0)
    # the artifact's rates, of the same passes
    assert row["Alpa, of its one-GPU rate"] == pytest.approx(large.alpa / small.alpa, rel=0.01)


def test_published_rates_of_experts_agree_with_their_latencies_and_sizes():
    """The artifact's file has seconds and rates for the runs without stages, and the numbers of parameters."""
    latencies = {"380M": 36.51, "690M": 19.69, "1.3B": 18.6, "2.4B": 13.55, "10B": 28.79, "27B": 362.7, "70B": 1291.9}
    billions = {"380M": 0.3835, "690M": 0.6857, "1.3B": 1.3468, "2.4B": 2.383, "10B": 10.1696, "27B": 26.6481}
    for size in alpa_moe.MIXTURES[:-1]:  # whose rate is half of what its latency gives
        assert size.step_s(size.without_stages) == pytest.approx(latencies[size.name], rel=0.05)
    for size in alpa_moe.MIXTURES[:-1]:
        num = sum(parameter.numel() for parameter in alpa_moe.model_of(size).parameters())
        assert num == pytest.approx(billions[size.name] * 1e9, rel=2e-3)


SMALL_CASES = {
    "AutoDDL": lambda: autoddl.measure(
        replace(autoddl.MODELS["transformer"], build=lambda batch: autoddl.transformer_graph(batch, 2)),
        "one P100 a node, 10 GB/s",
        64,
        1,
    ),
    "TAP": lambda: tap.measure("8x8", "none", layers=2),
    "Whale": lambda: whale.measure(8, 50, 32, num_classes=1000),
    "Alpa": lambda: alpa.measure(replace(SIZES[1], layers=2), replace(SIZES[0], layers=2, num_devices=2)),
    "Alpa, experts": lambda: alpa_moe.measure(
        replace(alpa_moe.MIXTURES[4], layers=4), replace(alpa_moe.MIXTURES[0], layers=2, num_devices=2)
    ),
}


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_a_row_of_each_paper_runs_small_and_is_written(paper, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    found = SMALL_CASES[paper.name]()
    report.add("papers", TABLES, found, {})
    saved = report.load("papers")
    for title, rows in found.items():
        assert [row["row"] for row in saved[title]] == [row["row"] for row in rows]
        assert not any("error" in row for row in rows), rows
    text = (tmp_path / "papers.md").read_text()
    assert paper.source in text and all(f"## {title}" in text for title, rows in found.items() if rows)


def test_every_row_of_a_paper_has_what_makes_it():
    for paper in PAPERS:
        assert tuple(paper.cases) == paper.tables[0].rows
        assert all(set(table.rows) <= set(paper.cases) for table in paper.tables)


def test_no_sentence_claims_that_nothing_was_fitted():
    for paper in PAPERS:
        assert not any("fitted" in text for text in (*paper.settings.values(), *paper.notes, *paper.not_known))
