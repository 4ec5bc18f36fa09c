"""Folding finds the layers, whatever they are called, and nothing that is wired otherwise."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.ir.folding.fold import fold, value_classes
from autopar.ir.folding.periods import find_runs
from autopar.ir.trace import trace
from tests import zoo
from tests.ir.graphs import chain


class Stack(nn.Module):
    """Layers with names of their own, so that nothing can be learned from names."""

    def __init__(self, *layers):
        super().__init__()
        for i, layer in enumerate(layers):
            self.add_module("abcdefghij"[i] * (i + 1), layer)

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self, width=4, is_frozen=False):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.requires_grad_(not is_frozen)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def folded(model, x):
    graph = trace(model, (x.requires_grad_(),), {})
    return graph, fold(graph)


def classes(graph, found) -> int:
    return len({found.representative[op.name] for op in graph.ops})


@pytest.mark.parametrize("count", [2, 3, 9])
def test_blocks_fold_to_one(count):
    graph, found = folded(Stack(*(Block() for _ in range(count))), torch.randn(2, 4))
    assert [(len(repeat.ops), repeat.count) for repeat in found.repeats] == [(4, count)]
    assert classes(graph, found) == 4
    inputs = [found.representative[item.value.name] for item in graph.of_kind("parameter")]
    assert inputs == ["a_up_weight", "a_up_bias", "a_down_weight", "a_down_bias"] * count


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "llama"])
def test_depth_of_transformers_costs_nothing(name, monkeypatch):
    counts = []
    for layers in (2, 5):
        monkeypatch.setattr(zoo, "LAYERS", layers)
        case = zoo.build(name)
        graph = trace(case.model, case.args, case.kwargs)
        found = fold(graph)
        assert max(repeat.count for repeat in found.repeats) == layers
        counts.append(classes(graph, found))
        check(graph, found)
    assert counts[0] == counts[1]


def check(graph, found) -> None:
    """A class is alike in everything that a plan may depend on."""
    by_name = {op.name: op for op in graph.ops}
    values = value_classes(graph, found)
    for op in graph.ops:
        same = by_name[found.representative[op.name]]
        assert (op.target, op.args, op.kwargs, op.is_no_grad) == (same.target, same.args, same.kwargs, same.is_no_grad)
        for a, b in zip((*op.inputs, *op.outputs), (*same.inputs, *same.outputs)):
            assert (a.shape, a.dtype, a.needs_grad) == (b.shape, b.dtype, b.needs_grad)
    made = {value.name: op for op in graph.ops for value in op.outputs}
    for repeat in found.repeats:
        inside = set(repeat.ops)
        for op in graph.ops:
            same = by_name[found.representative[op.name]]
            if same.name not in inside:
                continue
            for a, b in zip(op.inputs, same.inputs):
                producer = made.get(b.name)
                if producer is not None and producer.name in inside:
                    assert values[a.name] == b.name, "what a copy makes for itself"
                elif b.name not in made and a.name not in made:
                    assert values[a.name] == values[b.name], "an input of the graph"


def test_several_regions():
    layers = [*(Block(4) for _ in range(4)), nn.Linear(4, 8), *(Block(8) for _ in range(3))]
    graph, found = folded(Stack(*layers), torch.randn(2, 4))
    assert [(len(repeat.ops), repeat.count) for repeat in found.repeats] == [(4, 4), (4, 3)]
    check(graph, found)


def test_one_linear_is_too_little_for_a_block():
    """Two equal linear layers must be free to take column and row split."""
    _, found = folded(Stack(*(nn.Linear(4, 4) for _ in range(3))), torch.randn(2, 4))
    assert not found.repeats
    _, found = folded(Stack(*(nn.Linear(4, 4) for _ in range(9))), torch.randn(2, 4))
    assert [(len(repeat.ops), repeat.count) for repeat in found.repeats] == [(2, 4)]


def test_frozen_layers_are_other_layers():
    layers = [Block(is_frozen=True), Block(is_frozen=True), Block(is_frozen=True), Block(), Block(), Block()]
    graph, found = folded(Stack(*layers), torch.randn(2, 4))
    assert [repeat.count for repeat in found.repeats] == [3, 3]
    check(graph, found)


def test_first_layer_without_gradient_is_another_layer():
    graph = trace(Stack(*(Block() for _ in range(4))), (torch.randn(2, 4),), {})
    found = fold(graph)
    assert [repeat.count for repeat in found.repeats] == [3]
    check(graph, found)


def test_shared_layer_keeps_its_parameters():
    block = Block()

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            for _ in range(4):
                x = self.block(x)
            return x

    graph, found = folded(Shared(), torch.randn(2, 4))
    assert [repeat.count for repeat in found.repeats] == [4]
    assert all(found.representative[item.value.name] == item.value.name for item in graph.inputs)


def test_swapped_parameters_do_not_fold():
    """The second copy reads the parameters of the first in another order."""

    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.b(self.a(x).relu()).relu()
            return self.a(self.b(x).relu()).relu()

    graph, found = folded(Crossed(), torch.randn(2, 4))
    assert not found.repeats and classes(graph, found) == len(graph.ops)


def test_reading_further_back_does_not_fold():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            seen = [x]
            for i, block in enumerate(self.blocks):
                seen.append(block(seen[-1]) + seen[max(0, i - 2)])
            return seen[-1]

    graph, found = folded(Dense(), torch.randn(2, 4))
    check(graph, found)
    assert all(repeat.count < 4 for repeat in found.repeats)


def test_deep_graphs_fold_in_no_time():
    graph = chain(num_layers=126, ops_per_layer=60)
    start = time.process_time()
    found = fold(graph)
    assert time.process_time() - start < 1.0
    assert [(len(repeat.ops), repeat.count) for repeat in found.repeats] == [(60, 126)]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(2, 5), st.lists(st.integers(0, 3), max_size=4))
def test_runs_equal_brute_force(block, count, rest):
    import numpy as np

    sequence = rest + block * count + rest
    found = {(run.start, run.stop, run.period) for run in find_runs(np.array(sequence))}
    n = len(sequence)
    for period in range(1, n // 2 + 1):
        for start in range(n):
            stop = start
            while stop + period < n and sequence[stop] == sequence[stop + period]:
                stop += 1
            is_maximal = start == 0 or start - 1 + period >= n or sequence[start - 1] != sequence[start - 1 + period]
            if stop - start >= period and is_maximal and period <= len(block):
                assert (start, stop + period, period) in found
