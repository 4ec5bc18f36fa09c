"""What crosses a cut is sent in the layout with which the pipeline is fastest: every choice tried, and what the whole
plan gains by it.
"""

import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.costmodel.cluster.load_cluster import Cluster, load_cluster
from autopar.costmodel.training import Training
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.models.catalogue import build_model
from autopar.planner.budget import Budget
from autopar.planner.pipeline.boundary_layouts import _WORTH, OpenStages, _alike, _Ends, _values, choose_crossing
from autopar.planner.pipeline.cut_stages import Cut, crossing_layouts, cut_as
from autopar.planner.pipeline.search_pipeline import model_in_stages, plan_in_stages, sweep_stages
from autopar.planner.pipeline.sweep import Staged
from autopar.planner.request import PlanRequest
from autopar.sbp.candidates import even_layouts
from autopar.sbp.placement import I, S
from autopar.search.table import CostTable, Edge, Node, cost_of

REQUEST = PlanRequest(memory_limit_bytes=float("inf"), training=Training(), num_microbatches=4, schedule="1f1b")
V100 = load_cluster("v100-25g")
# Two devices a node, and between nodes a hundredth of the rate: what is sent whole holds up the stages.
INNER, OUTER = V100.levels
SLOW = replace(
    V100, levels=(replace(INNER, size=2), replace(OUTER, bandwidth_bytes_per_s=OUTER.bandwidth_bytes_per_s / 100))
)


def traced(name: str, **sizes: int) -> Graph:
    example = build_model(name, **sizes)
    return trace(skeleton(example.model), example.args, dict(example.kwargs))


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    """The sequence of the first cannot be split in two: by hand, what crosses its cuts is whole. T5's decoder gets
    several values.
    """
    return {
        "gpt2": traced("gpt2", layers=4, batch=8, sequence=127),
        "t5-large": traced("t5-large", layers=4, batch=8, sequence=128),
    }


def cut_of(graph: Graph, mesh: str, cluster: Cluster) -> tuple[Cut, Staged]:
    model = model_in_stages(graph, parse_mesh(mesh), REQUEST)
    found = sweep_stages(model, parse_mesh(mesh), cluster, REQUEST, Budget.of())
    return cut_as(model, found[0]), found[0]


@pytest.mark.parametrize("cluster", [V100, SLOW], ids=["as it is", "slow"])
@pytest.mark.parametrize(
    ("name", "mesh"), [("gpt2", "pp=2,tp=2"), ("gpt2", "pp=2,dp=2,tp=2"), ("t5-large", "pp=2,tp=2")]
)
def test_as_good_as_any(graphs: dict[str, Graph], name: str, mesh: str, cluster: Cluster) -> None:
    cut, found = cut_of(graphs[name], mesh, cluster)
    budget = Budget.of(60.0)
    pipeline = OpenStages(cut, found, found.mesh, cluster, REQUEST, budget)
    chosen, by_hand, values = choose_crossing(pipeline), crossing_layouts(cut), _values(cut)
    classes = _alike(cut, by_hand)
    offered = [even_layouts(values[names[0]].shape, found.mesh.shape) for names in classes]
    choices = (
        {name: layout for names, layout in zip(classes, layouts) for name in names} for layouts in product(*offered)
    )
    best_s = min(pipeline.step_s(choice) for choice in choices)
    assert pipeline.least_s() <= best_s * (1 + 1e-9) <= pipeline.step_s(by_hand) * (1 + 2e-9)
    assert pipeline.step_s(chosen) <= best_s * (1 + 2 * _WORTH)


def test_the_whole_plan_gains_by_it(graphs: dict[str, Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    def plan() -> object:
        return plan_in_stages(graphs["gpt2"], parse_mesh("pp=2,tp=2"), SLOW, REQUEST, budget=Budget.of(20))

    chosen = plan()
    driver = sys.modules["autopar.planner.pipeline.search_pipeline"]
    monkeypatch.setattr(driver, "choose_crossing", lambda stages: crossing_layouts(stages.cut))
    by_hand = plan()
    sent = [stage.assignment.outputs[stage.graph.outputs[0].name] for stage in (chosen.stages[0], by_hand.stages[0])]
    assert sent[0] != sent[1] and chosen.step_s < by_hand.step_s
    # one layout on both sides of the cut
    (received,) = (item.value.name for item in chosen.stages[1].graph.of_kind("argument") if item.value.needs_grad)
    assert chosen.stages[1].assignment.layouts[received] == sent[0]


def test_what_is_apart_from_the_boundary_counts() -> None:
    draw = np.random.default_rng(0)
    nodes = tuple(Node(f"n{i}", draw.random(3), np.zeros(3)) for i in range(4))
    edges = tuple(Edge(a, b, draw.random((3, 3)), np.zeros((3, 3))) for a, b in ((0, 1), (2, 3)))
    layouts: tuple[Any, ...] = ((I,), (S(0),), (S(1),))
    entity = SimpleNamespace(kind="output", options=layouts)
    problem: Any = SimpleNamespace(priced=SimpleNamespace(table=CostTable(nodes, edges), entities=[entity] * 4))
    setting: Any = None
    ends = _Ends(setting, problem, (0,))
    times = [min(cost_of(problem.priced.table, (k, *rest)) for rest in product(range(3), repeat=3)) for k in range(3)]
    assert [ends.least_s((layout,)) for layout in layouts] == pytest.approx(times)
    assert ends.least_s(None) == pytest.approx(min(times))
