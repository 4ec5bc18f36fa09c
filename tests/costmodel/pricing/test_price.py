"""The table against the cost of the whole graph computed without it."""

import functools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.costmodel.activations.saved_activations import Regions
from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.pricing.encode_decode import decode, encode
from autopar.costmodel.pricing.price import Priced, PricedStep, price
from autopar.costmodel.state_offload import hostable
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.errors import MeshError, PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import Folded, fold, value_classes
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.graph import Graph
from autopar.ir.passes.rewire import with_values
from autopar.ir.trace import trace
from autopar.mesh import Mesh, parse_mesh
from autopar.models.catalogue import build_model
from autopar.planner.handwritten.hand_plan import hand_plans
from autopar.sbp.assignment import NO_CHOICES, Assignment
from autopar.sbp.candidates import annotate
from autopar.search.table import cost_of, memory_of
from tests.costmodel.build import folded_stack, layer_stack, unfolded
from tests.planner.cases import traced
from tests.runtime.any_plan import MESHES, draw_graph
from tests.sbp.exercise import in_order
from tests.zoo import ZOO

CLUSTER = Cluster(
    "test", (LinkLevel(2, 1e-6, 1e8), LinkLevel(0, 1e-5, 1e7)), {"float32": 1e9}, 1e8, 2**30, "made up", {}, 5e7
)
CLUSTER = replace(CLUSTER, fresh_s_per_byte=1e-7)


@pytest.fixture(autouse=True)
def small_tensors_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.costmodel.cluster.hardware.FRESH_BYTES", 2**10)


def random_choices(priced: Priced, seed: int, count: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    options = [in_order(entity.options) for entity in priced.entities]
    return [tuple(map(rng.choice, options)) for _ in range(count)]


def folded_and_not(num_layers: int) -> list[tuple[Graph, Folded]]:
    graph, tracked = layer_stack(num_layers), layer_stack(num_layers, needs_grad=True)
    return [(graph, unfolded(graph)), (tracked, folded_stack(tracked, 0)), (graph, folded_stack(graph, 1))]


def is_exact(
    priced: Priced,
    graph: Graph,
    folded: Folded,
    choice: tuple[int, ...],
    mesh: Mesh,
    cluster: Cluster = CLUSTER,
    training: Training = WHOLE_BATCH,
) -> bool:
    """Whether the choice costs and takes what the whole graph does without the table."""
    costs = evaluate(graph, decode(priced, graph, folded, choice), mesh, cluster, training=training)
    assert cost_of(priced.table, choice) == pytest.approx(costs.step_s, rel=1e-9)
    # whole bytes, where the table has thirds of them
    assert memory_of(priced.table, choice) == pytest.approx(costs.total_memory_bytes, rel=1e-9, abs=1.0)
    return True


@pytest.mark.parametrize("mesh", ["4", "2x2", "2x1x2"])
@pytest.mark.parametrize("case", range(3))
def test_the_table_is_exact(mesh, case):
    graph, folded = folded_and_not(3)[case]
    mesh = parse_mesh(mesh)
    priced = price(graph, folded, annotate(graph, mesh, folded), mesh, CLUSTER)
    for choice in random_choices(priced, case, 100):
        assert is_exact(priced, graph, folded, choice, mesh)
        assert encode(priced, graph, folded, decode(priced, graph, folded, choice)) == choice


def draw_training(draw: random.Random) -> Training:
    num_microbatches = draw.choice((1, 2, 8))
    kind, in_flight = draw.choice(("sgd", "adamw", "adamw-master")), draw.randint(1, num_microbatches)
    return Training(kind, num_microbatches, in_flight, draw.randint(0, min(2, num_microbatches)))


def draw_regions(draw: random.Random, graph: Graph) -> Regions:
    """Some runs of consecutive ops."""
    names, ends = [op.name for op in graph.ops], sorted(draw.randrange(len(graph.ops) + 1) for _ in range(6))
    return tuple(tuple(names[start:end]) for start, end in zip(ends[::2], ends[1::2]) if start < end)


def draw_offloaded(draw: random.Random, graph: Graph, recomputed: Regions) -> Regions:
    """Some of the recomputed regions, and runs of ops outside them."""
    inside = {name for region in recomputed for name in region}
    runs = [tuple(name for name in region if name not in inside) for region in draw_regions(draw, graph)]
    position = {op.name: number for number, op in enumerate(graph.ops)}
    whole = [run for run in runs if run and position[run[-1]] - position[run[0]] == len(run) - 1]
    return tuple(
        sorted(
            [*whole, *(region for region in recomputed if draw.random() < 0.5)], key=lambda region: position[region[0]]
        )
    )


def draw_state(draw: random.Random, graph: Graph) -> frozenset[str]:
    """Some of the parameters, whatever copies they are of."""
    return frozenset(item.value.name for item in hostable(graph) if draw.random() < 0.5)


def stored_wide(graph: Graph) -> Graph:
    """The graph with parameters that are stored in a dtype of twice the size."""
    names = {item.value.name for item in graph.of_kind("parameter")}
    return with_values(graph, lambda x: replace(x, stored_dtype=torch.complex128) if x.name in names else x)


@given(seed=st.integers(0, 2**32), num_calls=st.integers(1, 12), shape=st.sampled_from(MESHES))
@example(seed=128, num_calls=8, shape=(2, 2, 2))  # a parameter to be regathered that is stored as it is read
@example(seed=1483613, num_calls=12, shape=(2, 2, 2))  # two thirds of a byte
@settings(max_examples=60)
def test_the_table_of_a_drawn_graph_is_exact(seed, num_calls, shape):
    draw = random.Random(seed)
    graph, _ = draw_graph(draw, num_calls)
    training, regions = draw_training(draw), draw_regions(draw, graph)
    training = replace(training, reduce_dtype=("", "bfloat16")[seed % 2])
    graph = training.reduced(stored_wide(graph) if seed % 3 else graph)
    mesh, folded = Mesh(shape, tuple(f"a{axis}" for axis in range(len(shape)))), unfolded(graph)
    candidates, away = annotate(graph, mesh, folded), draw_offloaded(draw, graph, regions)
    kept = draw_state(draw, graph)
    priced = price(
        graph,
        folded,
        candidates,
        mesh,
        CLUSTER,
        PricedStep(training, replace(NO_CHOICES, recomputed=regions, offloaded=away, state_on_host=kept)),
    )
    assert all(
        is_exact(priced, graph, folded, choice, mesh, training=training) for choice in random_choices(priced, seed, 3)
    )


@pytest.mark.parametrize("is_segmented", [False, True])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_the_table_of_a_model_is_exact(name, is_segmented):
    graph, mesh = traced(name), Mesh((2, 2), ("dp", "tp"))
    folded = fold(graph)
    folded = segmented(folded, graph, ends_apart(folded)) if is_segmented else folded
    candidates = annotate(graph, mesh, folded)
    priced = price(graph, folded, candidates, mesh, CLUSTER)
    assert all(is_exact(priced, graph, folded, choice, mesh) for choice in random_choices(priced, 1, 5))
    for assignment in hand_plans(graph, folded, candidates, mesh).values():
        choice = encode(priced, graph, folded, assignment)
        plain = replace(decode(priced, graph, folded, choice), parameter_buckets={})
        assert plain == assignment and is_exact(priced, graph, folded, choice, mesh)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama"])
def test_the_table_of_a_model_in_microbatches_with_recomputed_blocks_is_exact(name, seed):
    graph, mesh, draw = traced(name), Mesh((2, 2), ("dp", "tp")), random.Random(seed)
    folded = fold(graph)
    candidates = annotate(graph, mesh, folded)
    training, regions = draw_training(draw), blocks_of(graph, folded) if seed else draw_regions(draw, graph)
    away = regions[draw.randrange(2) :: 2]
    regions = regions[: len(regions) // 2]
    kept = draw_state(draw, graph)
    priced = price(
        graph,
        folded,
        candidates,
        mesh,
        CLUSTER,
        PricedStep(training, replace(NO_CHOICES, recomputed=regions, offloaded=away, state_on_host=kept)),
    )
    assert all(
        is_exact(priced, graph, folded, choice, mesh, training=training) for choice in random_choices(priced, seed, 5)
    )
    by_hand = encode(priced, graph, folded, hand_plans(graph, folded, candidates, mesh)["zero3"])
    assert is_exact(priced, graph, folded, by_hand, mesh, training=training)


def blocks_of(graph: Graph, folded: Folded) -> Regions:
    """Every copy of every repeated block."""
    names, found = [op.name for op in graph.ops], []
    for repeat in folded.repeats:
        first, size = names.index(repeat.ops[0]), len(repeat.ops)
        found += [tuple(names[first + copy * size : first + (copy + 1) * size]) for copy in range(repeat.count)]
    return tuple(found)


@functools.cache
def of_suite(name: str) -> Graph:
    example = build_model(name, layers=None if name == "vgg13" else 4)
    return trace(skeleton(example.model), example.args, dict(example.kwargs))


@pytest.mark.parametrize("mesh", ["2x8", "2x2x4"])
@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "bert-large", "vgg13"])
def test_the_table_of_a_large_model_is_exact(name, mesh):
    graph, mesh, cluster = of_suite(name), parse_mesh(mesh), PRESETS["h100"]
    folded = fold(graph)
    folded = segmented(folded, graph, ends_apart(folded))
    candidates = annotate(graph, mesh, folded)
    priced = price(graph, folded, candidates, mesh, cluster)
    by_hand = [
        encode(priced, graph, folded, assignment) for assignment in hand_plans(graph, folded, candidates, mesh).values()
    ]
    assert all(
        is_exact(priced, graph, folded, choice, mesh, cluster) for choice in random_choices(priced, 2, 2) + by_hand
    )


def test_equal_copies_share_their_arrays():
    graph, mesh = layer_stack(6), parse_mesh("2x2")
    whole, apart = unfolded(graph), folded_stack(graph, 1)
    assert folded_nodes(price(graph, whole, annotate(graph, mesh, whole), mesh, CLUSTER)) <= 1.5 * folded_nodes(
        price(graph, apart, annotate(graph, mesh, apart), mesh, CLUSTER)
    )


def folded_nodes(priced: Priced) -> int:
    """Arrays of the table that are objects of their own."""
    return len({id(part.cost_s) for part in (*priced.table.nodes, *priced.table.edges)})


def test_folding_changes_no_price():
    graph, mesh = layer_stack(4), parse_mesh("4")
    folded = folded_stack(graph, 1)
    no_buckets = {"memory_limit_bytes": 1.0}  # they are of blocks, which the unfolded graph has not
    small = price(graph, folded, annotate(graph, mesh, folded), mesh, CLUSTER, **no_buckets)
    large = price(graph, unfolded(graph), annotate(graph, mesh, unfolded(graph)), mesh, CLUSTER, **no_buckets)
    for choice in random_choices(small, 1, 100):
        unfolded_choice = encode(large, graph, unfolded(graph), decode(small, graph, folded, choice))
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
        assert (
            edge.cost_s.shape == edge.memory_bytes.shape == tuple(len(table.nodes[n].cost_s) for n in (edge.a, edge.b))
        )
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
            costs = [
                cost_of(priced.table, filled[:node] + (k,) + filled[node + 1 :]) for k in range(len(entity.options))
            ]
            assert min(costs) == pytest.approx(costs[filled[node]])


def test_what_is_no_candidate_is_refused():
    graph, mesh = layer_stack(1), parse_mesh("4")
    folded = unfolded(graph)
    priced = price(graph, folded, annotate(graph, mesh, folded), mesh, CLUSTER)
    full = decode(priced, graph, folded, (0,) * len(priced.entities))
    with pytest.raises(PlanError, match="%w0: expected one of"):
        encode(priced, graph, folded, Assignment(full.strategies, {**full.layouts, "w0": ()}, full.kept, full.outputs))
    with pytest.raises(MeshError, match="4 devices"):
        price(
            graph,
            folded,
            annotate(graph, mesh, folded),
            mesh,
            Cluster("two", (LinkLevel(2, 0.0, 1.0),), {"float32": 1.0}, 1.0, 1, ""),
        )


def test_value_classes_follow_their_ops():
    graph = layer_stack(3)
    classes = value_classes(graph, folded_stack(graph, 1))
    assert classes["add2"] == "add1" and classes["add0"] == "add0" and classes["w2"] == "w1"
    assert set(classes) >= set(graph.uses)
