"""Segments are finer classes, wired as before, and what is planned alike costs the same in both folds."""

import random

import pytest
import torch

from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.pricing.encode_decode import decode, encode
from autopar.costmodel.pricing.price import price
from autopar.ir.folding.fold import Folded, Repeat, fold, value_classes
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.sbp.candidates import annotate
from autopar.search.table import cost_of, memory_of
from tests import zoo
from tests.ir.folding.test_fold import Block, Stack, check
from tests.ir.graphs import chain
from tests.sbp.exercise import in_order


def members(folded: Folded) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, same in folded.representative.items():
        found.setdefault(same, []).append(name)
    return found


@pytest.mark.parametrize("sizes", [(1, 30, 1), (32,), (2, 1, 29), (1,) * 32])
def test_sizes_are_taken(sizes):
    graph = chain(num_layers=32, ops_per_layer=5)
    found = segmented(fold(graph), graph, (sizes,))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for start, size in zip(starts, sizes):
        for layer in range(start, start + size):
            names = ("v{}_0", "v{}_3", "sum{}", "w{}_0", "w{}_1")
            assert [found.representative[name.format(layer)] for name in names] == [
                name.format(start) for name in names
            ]
    expected = [(f"v{start}_0", 5, size) for start, size in zip(starts, sizes) if size > 1]
    assert [(repeat.ops[0], len(repeat.ops), repeat.count) for repeat in found.repeats] == expected
    assert found.representative["x"] == "x"


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "llama"])
def test_segments_refine_the_fold(name, monkeypatch):
    monkeypatch.setattr(zoo, "LAYERS", 5)
    case = zoo.build(name)
    graph = trace(case.model, case.args, case.kwargs)
    folded = fold(graph)
    found = segmented(folded, graph, ends_apart(folded))
    check(graph, found)
    assert found.representative.keys() == folded.representative.keys()
    for same, names in members(found).items():
        assert same in names and len({folded.representative[name] for name in names}) == 1
    whole, parts = len(members(folded)), len(members(found))
    repeated = sum(len(names) > 1 for names in members(folded).values())
    assert whole + repeated < parts <= whole + 2 * repeated


def test_shared_parameters_stay_one_class():
    block = Block()
    layers = [torch.nn.Sequential(block) for _ in range(4)]
    graph = trace(Stack(*layers), (torch.randn(2, 4, requires_grad=True),), {})
    folded = fold(graph)
    found = segmented(folded, graph, ((1, 2, 1),))
    assert len({found.representative[op.name] for op in graph.ops}) == 3 * len(folded.repeats[0].ops)
    assert all(found.representative[item.value.name] == item.value.name for item in graph.inputs)
    check(graph, found)


def test_parameters_shared_by_two_stacks():
    """Each copy of the second stack reads a parameter of the same copy of the first; the segments of both count for
    it.
    """

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            x = x.softmax(-1)
            for block in self.blocks:
                x = block(x)
            return x

    graph = trace(Twice(), (torch.randn(2, 4, requires_grad=True),), {})
    folded = fold(graph)
    assert [repeat.count for repeat in folded.repeats] == [4, 4]
    found = segmented(folded, graph, ((1, 3), (3, 1)))
    weights = [f"blocks_{i}_up_weight" for i in range(4)]
    assert [found.representative[name] for name in weights] == [weights[0], weights[1], weights[1], weights[3]]


@pytest.mark.parametrize("segments", [((4,), (4,)), (), ((1, 2),), ((0, 4),), ((5, -1),)])
def test_sizes_that_do_not_fit(segments):
    graph = chain(num_layers=4, ops_per_layer=5)
    with pytest.raises(ValueError, match=r"sum to \[4\]"):
        segmented(fold(graph), graph, segments)


def test_the_usual_segments():
    repeats = tuple(Repeat(("a",), count) for count in (2, 3, 126))
    assert ends_apart(Folded({}, repeats)) == ((1, 1), (1, 1, 1), (1, 124, 1))


def priced_twice(graph, sizes, count):
    """(assignment, table and choice of the fold, table and choice of its segments) of plans that treat all copies
    alike.
    """
    mesh, cluster = parse_mesh("2x2"), PRESETS["v100"]
    folded = fold(graph)
    finer = segmented(folded, graph, (sizes,))
    limit = {"memory_limit_bytes": 1.0}  # without parameter buckets, which are of the copies of a repeat
    whole, parts = (price(graph, x, annotate(graph, mesh, x), mesh, cluster, **limit) for x in (folded, finer))
    rng = random.Random(0)
    for _ in range(count):
        options = (in_order(entity.options) for entity in whole.entities)
        assignment = decode(whole, graph, folded, tuple(map(rng.choice, options)))
        choices = encode(whole, graph, folded, assignment), encode(parts, graph, finer, assignment)
        assert decode(parts, graph, finer, choices[1]) == assignment
        yield (whole.table, choices[0]), (parts.table, choices[1])


@pytest.mark.parametrize("sizes", [(1, 3, 1), (2, 3), (1, 1, 1, 1, 1)])
def test_copies_planned_alike_cost_the_same(sizes):
    graph = trace(Stack(*(Block() for _ in range(5))), (torch.randn(4, 4, requires_grad=True),), {})
    for whole, parts in priced_twice(graph, sizes, count=40):
        for measure in (cost_of, memory_of):
            assert measure(*parts) == pytest.approx(measure(*whole), rel=1e-12)


def test_copies_that_share_a_mask_cost_the_same(monkeypatch):
    monkeypatch.setattr(zoo, "LAYERS", 5)
    case = zoo.build("gpt2")
    for whole, parts in priced_twice(trace(case.model, case.args, case.kwargs), (1, 3, 1), count=20):
        assert cost_of(*parts) == pytest.approx(cost_of(*whole), rel=1e-9)
        assert memory_of(*parts) == pytest.approx(memory_of(*whole), rel=1e-9)


def test_copies_planned_apart_cost_what_they_cost():
    graph, mesh, cluster = chain(num_layers=4, ops_per_layer=4), parse_mesh("2"), PRESETS["p100"]
    folded = fold(graph)
    found = segmented(folded, graph, ends_apart(folded))
    priced = price(graph, found, annotate(graph, mesh, found), mesh, cluster)
    rng = random.Random(0)
    for _ in range(50):
        choice = tuple(rng.randrange(len(entity.options)) for entity in priced.entities)
        assignment = decode(priced, graph, found, choice)
        classes = value_classes(graph, found)
        assert all(assignment.layouts[name] == assignment.layouts[classes[name]] for name in assignment.layouts)
        costs = evaluate(graph, assignment, mesh, cluster)
        assert costs.step_s == pytest.approx(cost_of(priced.table, choice), rel=1e-9)
        assert costs.total_memory_bytes == pytest.approx(memory_of(priced.table, choice), rel=1e-9)
