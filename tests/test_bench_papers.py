"""The published comparisons: the formulas against counting, and every section once, small."""

import itertools
import json
import math

import pytest
import torch
from torch import nn

from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.hardware import Cluster, LinkLevel
from autopar.ir.fold import fold
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.plan.assemble import make_plan
from autopar.plan.hand import HandPlan
from autopar.plan.plan import Plan
from autopar.plan.store import HandCosts
from autopar.plan.tuned import Tried, tuned
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import I, P, R, S
from autopar.sbp.signature import Signature, Strategy
from bench.papers import section as written
from bench.papers.__main__ import SECTIONS
from bench.papers.alpa import ROWS, batch_s
from bench.papers.compare import compare, fastest, traced
from bench.papers.grid import Shape, bytes_by_layer, grid_of, linear_ops, sent_bytes, shape_of
from bench.papers.section import Section, Table, save, to_markdown

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
    """Rows split on axis 0, outputs on axis 1, inputs on axis 2; gradients come back summed, and the product leaves summed."""
    (op,) = graph.ops
    x, weight, y = op.inputs[0].name, op.inputs[1].name, op.outputs[0].name
    signatures = (
        Signature((S(0), R), (S(0),)),
        Signature((R, S(0)), (S(1),)),
        Signature((S(1), S(1)), (P,)),
    )
    return Assignment({op.name: Strategy(signatures)}, {x: (S(0), I, S(1)), weight: (I, S(0), S(1))}, {}, {y: (S(0), S(1), I)})


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_linear_layer_on_a_grid_is_counted_as_by_the_formula_to_the_byte(grid):
    graph, mesh = linear_graph(), Mesh(grid, ("batch", "out", "in"))
    costs = evaluate(graph, on_grid(graph), mesh, BYTES_ONLY)
    counted = sum(sent_bytes(planned.collective, mesh) for planned in costs.collectives)
    p1, p2, p3 = grid
    by_formula = 2 * 4 * ((p3 - 1) / p3 * M * N / (p1 * p2) + (p2 - 1) / p2 * M * K / (p1 * p3) + (p1 - 1) / p1 * K * N / (p2 * p3))
    assert counted == by_formula == Shape(M, K, N, 4).moved_bytes(grid)
    assert costs.communication_s("forward") + costs.communication_s("backward") == pytest.approx(counted)  # a ring at 1 byte/s
    (op,) = graph.ops
    assert grid_of(op, on_grid(graph).strategies[op.name], mesh) == grid and shape_of(op) == Shape(M, K, N, 4)


def test_best_grid_is_the_least_of_all_that_divide():
    for num_devices, shape in itertools.product((4, 8, 12), (Shape(64, 24, 48, 2), Shape(8, 96, 96, 4), Shape(4096, 6, 6, 4))):
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
    slow, large = (Tried("x", HandPlan(), Mesh((4,), ("a",)), costs) for costs in (HandCosts(2.0, 1), HandCosts(1.0, 9)))
    assert fastest((slow, large), 9) is large and fastest((slow, large), 8) is slow and fastest((slow, large), 0) is large


def test_microbatches_repeat_all_but_the_reduction_of_gradients_and_the_update():
    graph = linear_graph()
    mesh = Mesh((2, 1, 2), ("batch", "out", "in"))
    plan = make_plan(graph, mesh, BYTES_ONLY, pins={"weight": "BBS(1)"})
    once = sum(p.time_s for p in plan.costs.collectives if p.where == "weight")
    step_s = plan.costs.step_s
    assert once > 0 and batch_s(graph, plan.costs, 1) == pytest.approx(step_s)
    assert batch_s(graph, plan.costs, 5) == pytest.approx(5 * step_s - 4 * (once + plan.costs.optimizer_s))


def test_published_rates_and_seconds_of_alpa_agree_with_its_own_latencies():
    """The artifact's file has seconds and rates for the runs without stages; the formula joins them."""
    latencies = {"350M": 71.11, "760M": 57.34, "6.7B": 74.36, "39B": 2493.7}
    for row in ROWS:
        if row.name in latencies:
            assert row.step_s(row.without_stages) == pytest.approx(latencies[row.name], rel=0.01)


@pytest.mark.parametrize("name", SECTIONS)
def test_each_section_runs_small_and_is_written(name, tmp_path, monkeypatch):
    told = []
    section = SECTIONS[name](told.append, is_small=True)
    assert told and section.tables and all(table.rows for table in section.tables)
    text = to_markdown(section)
    assert section.paper in text and all(table.title in text for table in section.tables)
    monkeypatch.setattr(written, "RESULTS", tmp_path)
    save(section)
    (saved,) = json.loads((tmp_path / "papers.json").read_text())["sections"]
    assert saved["name"] == section.name and {"commit", "processor", "torch"} <= set(saved["measured"])
    assert all(table.title in (tmp_path / "papers.md").read_text() for table in section.tables)


def test_a_section_run_alone_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "RESULTS", tmp_path)
    for name, seconds in (("one", 1.0), ("two", 2.0), ("one", 3.0)):
        save(Section(name, "paper", {}, (Table("t", ({"s": seconds},)),), (), ("note",)))
    found = json.loads((tmp_path / "papers.json").read_text())["sections"]
    assert [(one["name"], one["tables"][0]["rows"]) for one in found] == [("one", [{"s": 3.0}]), ("two", [{"s": 2.0}])]
    assert (tmp_path / "papers.md").read_text().count("## two: paper") == 1


def test_tables_round_numbers_for_people_only():
    section = Section("x", "paper", {"a": "b"}, (Table("t", ({"s": 1.23456, "what": "y"},)),), (), ("note",))
    assert "1.235" in to_markdown(section) and "Not found" not in to_markdown(section)
