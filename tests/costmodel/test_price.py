"""The table against the cost of the whole graph computed without it."""

import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.costmodel.decode import decode, encode
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.hardware import Cluster, LinkLevel
from autopar.costmodel.price import Priced, price
from autopar.errors import MeshError, PlanError
from autopar.ir.fold import Folded, value_classes
from autopar.ir.graph import Graph
from autopar.mesh import parse_mesh
from autopar.sbp.annotate import annotate
from autopar.sbp.assignment import Assignment, conversions, produced_layouts, uses_of
from autopar.search.solve import solve
from autopar.search.table import cost_of, memory_of
from tests.costmodel.build import folded_stack, layer_stack, unfolded

CLUSTER = Cluster("test", (LinkLevel(2, 1e-6, 1e8), LinkLevel(0, 1e-5, 1e7)), {"float32": 1e9}, 1e8, 2**30, "made up")
PROMPT = replace(CLUSTER, levels=tuple(replace(level, latency_s=0.0) for level in CLUSTER.levels))  # buckets are as good as alone


def random_choices(priced: Priced, seed: int, count: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(len(entity.options)) for entity in priced.entities) for _ in range(count)]


def is_shared(graph: Graph, folded: Folded, assignment: Assignment) -> bool:
    """Whether readers of different classes share a conversion that is not one to the kept layout, or one reads what was made beside
    what is kept: where the table may be too high."""
    made = produced_layouts(graph, assignment)
    for name, found in conversions(graph, assignment).items():
        is_bypassed = assignment.kept.get(name, made[name]) != made[name] and any(c.uses and c.dst == made[name] for c in found)
        moved = [c.uses for c in found if c.src != c.dst]
        if is_bypassed or any(len({(folded.representative.get(use.user), use.slot) for use in uses}) > 1 for uses in moved):
            return True
    return False


def folded_and_not(num_layers: int) -> list[tuple[Graph, Folded]]:
    graph, tracked = layer_stack(num_layers), layer_stack(num_layers, needs_grad=True)
    return [(graph, unfolded(graph)), (tracked, folded_stack(tracked, 0)), (graph, folded_stack(graph, 1))]


@pytest.mark.parametrize("mesh", ["4", "2x2", "2x1x2"])
@pytest.mark.parametrize("case", range(3))
def test_table_equals_evaluation(mesh, case):
    graph, folded = folded_and_not(3)[case]
    mesh = parse_mesh(mesh)
    priced = price(graph, folded, annotate(graph, mesh, folded), mesh, PROMPT)
    num_exact = 0
    for choice in random_choices(priced, case, 200):
        assignment = decode(priced, graph, folded, choice)
        costs = evaluate(graph, assignment, mesh, PROMPT)
        if is_shared(graph, folded, assignment):
            assert costs.step_s <= cost_of(priced.table, choice) * (1 + 1e-9)
        else:
            num_exact += 1
            assert costs.step_s == pytest.approx(cost_of(priced.table, choice))
        assert costs.total_memory_bytes <= memory_of(priced.table, choice) * (1 + 1e-9)
        assert encode(priced, graph, folded, assignment) == choice
    assert num_exact >= 5


def kept_as_made(priced: Priced, graph: Graph, folded: Folded, choice: tuple[int, ...]) -> tuple[int, ...]:
    """The choice with every value kept as it is made."""
    assignment = decode(priced, graph, folded, choice)
    made = produced_layouts(graph, assignment)
    return encode(priced, graph, folded, replace(assignment, kept={name: made[name] for name in assignment.kept}))


@pytest.mark.parametrize("mesh", ["4", "2x2", "4x2"])
@pytest.mark.parametrize("case", range(3))
def test_the_relaxed_table_is_never_too_high(mesh, case):
    graph, folded = folded_and_not(3)[case]
    mesh = parse_mesh(mesh)
    priced = price(graph, folded, annotate(graph, mesh, folded), mesh, CLUSTER)
    for choice in random_choices(priced, case, 60):
        costs = evaluate(graph, decode(priced, graph, folded, choice), mesh, CLUSTER)
        relaxed = kept_as_made(priced, graph, folded, choice)
        assert cost_of(priced.relaxed, relaxed) <= costs.step_s * (1 + 1e-9)
        assert memory_of(priced.relaxed, relaxed) <= costs.total_memory_bytes * (1 + 1e-9)


def test_the_relaxed_optimum_of_a_layer_stack_is_near_the_optimum():
    graph, mesh = layer_stack(3, batch=64, hidden=64), parse_mesh("2x2")
    priced = price(graph, unfolded(graph), annotate(graph, mesh), mesh, CLUSTER)
    found, least = solve(priced.table, time_limit_s=5.0), solve(priced.relaxed, time_limit_s=5.0)
    assert 0.8 * found.cost_s <= least.lower_bound_s <= found.cost_s * (1 + 1e-9)


def test_memory_is_exact_where_each_value_is_read_as_it_is_kept():
    graph, mesh = layer_stack(3), parse_mesh("2x2")
    folded = folded_stack(graph, 1)
    priced = price(graph, folded, annotate(graph, mesh, folded), mesh, CLUSTER, optimizer="sgd")
    num_exact = 0
    for text in ("S(0)", "B"):
        choice = tuple(
            next((k for k, option in enumerate(entity.options) if str(option).replace(" ", "").count(text) == _most(entity, text)), 0)
            for entity in priced.entities
        )
        choice = kept_as_made(priced, graph, folded, choice)
        assignment = decode(priced, graph, folded, choice)
        if all(c.src == c.dst for name in assignment.kept for c in conversions(graph, assignment)[name]):
            num_exact += 1
            costs = evaluate(graph, assignment, mesh, CLUSTER, optimizer="sgd")
            assert costs.total_memory_bytes == pytest.approx(memory_of(priced.table, choice))
    assert num_exact


def _most(entity, text: str) -> int:
    return max(str(option).replace(" ", "").count(text) for option in entity.options)


def test_folding_changes_no_price():
    graph, mesh = layer_stack(4), parse_mesh("4")
    folded = folded_stack(graph, 1)
    small = price(graph, folded, annotate(graph, mesh, folded), mesh, CLUSTER)
    large = price(graph, unfolded(graph), annotate(graph, mesh, unfolded(graph)), mesh, CLUSTER)
    chosen = [(choice, decode(small, graph, folded, choice)) for choice in random_choices(small, 1, 300)]
    exact = [pair for pair in chosen if not is_shared(graph, unfolded(graph), pair[1])]
    assert len(exact) >= 10
    for choice, assignment in exact:
        unfolded_choice = encode(large, graph, unfolded(graph), assignment)
        assert cost_of(small.table, choice) == pytest.approx(cost_of(large.table, unfolded_choice))
        assert memory_of(small.table, choice) == pytest.approx(memory_of(large.table, unfolded_choice))
    assert len(small.entities) < len(large.entities)


def test_the_table_is_well_formed():
    graph, mesh = layer_stack(3), parse_mesh("2x2")
    folded = folded_stack(graph, 1)
    priced = price(graph, folded, annotate(graph, mesh, folded), mesh, CLUSTER, memory_limit_bytes=5.0)
    table = priced.table
    pairs = [(edge.a, edge.b) for edge in table.edges]
    assert len(set(pairs)) == len(pairs) and all(a < b for a, b in pairs)
    for entity, node in zip(priced.entities, table.nodes, strict=True):
        assert len(entity.options) == len(node.cost_s) == len(node.memory_bytes) > 0, node.name
    for edge in table.edges:
        assert edge.cost_s.shape == edge.memory_bytes.shape == tuple(len(table.nodes[n].cost_s) for n in (edge.a, edge.b))
        assert np.isfinite(edge.cost_s).all() and (edge.cost_s >= 0).all()
    assert table.memory_limit_bytes == 5.0


def test_a_missing_kept_layout_is_filled_with_the_cheapest():
    graph, mesh = layer_stack(2), parse_mesh("4")
    folded = unfolded(graph)
    priced = price(graph, folded, annotate(graph, mesh, folded), mesh, CLUSTER)
    choice = random_choices(priced, 3, 1)[0]
    full = decode(priced, graph, folded, choice)
    filled = encode(priced, graph, folded, Assignment(full.strategies, full.layouts, {}, full.outputs))
    others = [node for node, entity in enumerate(priced.entities) if entity.kind != "kept"]
    assert [filled[node] for node in others] == [choice[node] for node in others]
    for node, entity in enumerate(priced.entities):
        if entity.kind == "kept":
            costs = [cost_of(priced.table, filled[:node] + (k,) + filled[node + 1 :]) for k in range(len(entity.options))]
            assert min(costs) == pytest.approx(costs[filled[node]])


def test_what_is_no_candidate_is_refused():
    graph, mesh = layer_stack(1), parse_mesh("4")
    folded = unfolded(graph)
    priced = price(graph, folded, annotate(graph, mesh, folded), mesh, CLUSTER)
    full = decode(priced, graph, folded, (0,) * len(priced.entities))
    with pytest.raises(PlanError, match="%w0: expected one of"):
        encode(priced, graph, folded, Assignment(full.strategies, {**full.layouts, "w0": ()}, full.kept, full.outputs))
    with pytest.raises(MeshError, match="4 devices"):
        price(graph, folded, annotate(graph, mesh, folded), mesh, Cluster("two", (LinkLevel(2, 0.0, 1.0),), {"float32": 1.0}, 1.0, 1, ""))
    with pytest.raises(ValueError, match="optimizer"):
        price(graph, folded, annotate(graph, mesh, folded), mesh, CLUSTER, optimizer="lion-2000")


def test_value_classes_follow_their_ops():
    graph = layer_stack(3)
    classes = value_classes(graph, folded_stack(graph, 1))
    assert classes["add2"] == "add1" and classes["add0"] == "add0" and classes["w2"] == "w1"
    assert set(classes) >= set(uses_of(graph))
