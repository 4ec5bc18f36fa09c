"""The chains read off a fold with few copies apart are the table of the graph without a fold."""

import math
import time

import numpy as np
import pytest

from autopar.costmodel.pricing.price import price
from autopar.costmodel.pricing.unroll import copies_apart, unfold
from autopar.ir.folding.fold import fold
from autopar.ir.folding.segments import segmented
from autopar.mesh import parse_mesh
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.request import PlanRequest
from autopar.sbp.candidates import annotate
from autopar.search.min_plus.repeat_power import Chains, condensed
from autopar.search.solve import solve
from autopar.search.table import CostTable
from tests.planner.test_folding import V100, traced, unfolded
from tests.search.chains import unrolled


def _chains(name: str, layers: int, mesh: str) -> Chains:
    graph, mesh, folded = traced(name, layers), parse_mesh(mesh), fold(traced(name, layers))
    apart = segmented(folded, graph, copies_apart(folded))
    return unfold(graph, folded, price(graph, apart, annotate(graph, mesh, apart), mesh, V100))


def _whole(name: str, layers: int, mesh: str) -> CostTable:
    graph, mesh = traced(name, layers), parse_mesh(mesh)
    every = unfolded(graph)
    return price(graph, every, annotate(graph, mesh, every), mesh, V100).table


def _sums(table: CostTable) -> np.ndarray:
    """Of each edge the number of pairs, the seconds and the bytes of those allowed; each of the three in ascending
    order.
    """
    allowed = [np.isfinite(edge.cost_s) for edge in table.edges]
    rows = [(w.size, e.cost_s[w].sum(), e.memory_bytes[w].sum()) for e, w in zip(table.edges, allowed)]
    return np.sort(np.array(rows), axis=0)


@pytest.mark.parametrize(
    ("name", "layers", "mesh"),
    [
        ("gpt2", 4, "8"),
        ("gpt2", 6, "4x2"),
        ("llama", 6, "8"),
        ("t5", 5, "8"),
        pytest.param("llama", 6, "4x2", marks=pytest.mark.slow),
        pytest.param("t5", 5, "4x2", marks=pytest.mark.slow),
    ],
)
def test_written_out_they_are_the_table_without_a_fold(name, layers, mesh):
    table, whole = unrolled(_chains(name, layers, mesh)), _whole(name, layers, mesh)
    assert len(table.nodes) == len(whole.nodes)
    np.testing.assert_allclose(_sums(table), _sums(whole), rtol=1e-9, atol=1e-15)
    found, truth = solve(table), solve(whole)
    assert found.cost_s == pytest.approx(truth.cost_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "layers", "mesh"),
    [
        ("gpt2", 6, "8"),
        ("gpt2", 6, "4x2"),
        ("llama", 6, "4x2"),
        ("t5", 6, "8"),
        pytest.param("llama", 6, "8", marks=pytest.mark.slow),
        pytest.param("t5", 6, "4x2", marks=pytest.mark.slow),
    ],
)
def test_condensed_they_prove_the_plan_of_the_fold(name, layers, mesh):
    bound_s = solve(condensed(_chains(name, layers, mesh))).lower_bound_s
    plan = make_plan(traced(name, layers), parse_mesh(mesh), V100, PlanRequest(memory_limit_bytes=math.inf))
    assert plan.lower_bound_s <= bound_s * (1 + 1e-12) <= plan.costs.step_s * (1 + 1e-9)
    assert plan.gap < 1e-6


def test_the_time_does_not_depend_on_depth():
    seconds = {}
    for layers in (6, 48):
        chains = _chains("gpt2", layers, "4x2")
        start = time.process_time()
        condensed(chains)
        seconds[layers] = time.process_time() - start
    assert seconds[48] < 2 * seconds[6] + 0.05
