"""Repeats in models that are not one stack of equal layers."""

import math

import pytest
import torch
from torch import nn

from autopar.codegen.lower import lower
from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.pricing.encode_decode import decode
from autopar.costmodel.pricing.price import price
from autopar.ir.folding.fold import fold, value_classes
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.models.vision import resnet50
from autopar.sbp.candidates import annotate
from autopar.search.table import cost_of
from tests.ir.folding.test_fold import Block, Stack, check
from tests.ir.outline.test_export_once import _causal, _t5, _tokens


def repeats(graph) -> list[tuple[int, int]]:
    return [(len(repeat.ops), repeat.count) for repeat in fold(graph).repeats]


def x(*shape):
    return torch.randn(*shape or (4, 4), requires_grad=True)


class Gated(nn.Module):
    """Unlike `Block`, and with two products as well."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.gate(x).sigmoid() * self.up(x) + x


@pytest.mark.parametrize("count", [2, 5])
def test_two_alternating_kinds(count):
    graph = trace(Stack(*(kind() for _ in range(count) for kind in (Block, Gated))), (x(),), {})
    assert repeats(graph) == [(9, count)]
    check(graph, fold(graph))


def test_layers_with_two_kinds_of_attention():
    with torch.device("meta"):
        kinds = ["sliding_attention", "full_attention"] * 3
        model = _causal("Qwen3", head_dim=8, layer_types=kinds, use_sliding_window=True, sliding_window=4)
    graph = trace(model, (), _tokens(2, 8))
    ((block, count),) = repeats(graph)
    assert count == 3 and block > 100  # ops of two layers
    check(graph, fold(graph))


def test_encoder_and_decoder():
    """The first layers make the position bias; all others repeat, and the decoder's all read what the encoder
    returns.
    """
    with torch.device("meta"):
        model = _t5()
    graph = trace(model, (), _tokens(2, 8))
    folded = fold(graph)
    assert [repeat.count for repeat in folded.repeats] == [5, 5]
    check(graph, folded)
    readers: dict[str, set[str]] = {}
    for op in graph.ops:
        for value in op.inputs:
            readers.setdefault(value.name, set()).add(op.name)
    inside = set(folded.repeats[1].ops)
    shared = [names for names in readers.values() if sum(folded.representative[name] in inside for name in names) >= 5]
    assert shared and all(len({folded.representative[name] for name in names}) < len(names) for names in shared)


def test_stages_of_a_resnet():
    graph = trace(resnet50(), (torch.zeros(2, 3, 32, 32),), {})
    # 3, 4, 6 and 3 bottlenecks, the first of each with a projection
    assert [count for _, count in repeats(graph)] == [2, 3, 5, 2]
    check(graph, fold(graph))


@pytest.mark.parametrize("counts", [(3, 5), (6, 2), (2, 2)])
def test_lists_of_unequal_length(counts):
    """Side by side, joined at the end."""

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (
                nn.Sequential(*(Block() for _ in range(counts[0]))),
                nn.Sequential(*(Gated() for _ in range(counts[1]))),
            )

        def forward(self, x, y):
            return self.a(x) * self.b(y)

    graph = trace(Towers(), (x(), x()), {})
    assert repeats(graph) == [(4, counts[0]), (5, counts[1])]
    check(graph, fold(graph))


class Scaled(Block):
    """A layer with numbers of its own."""

    def __init__(self, scale=1.0, p=0.0, bias=0.0):
        super().__init__()
        self.scale, self.bias, self.dropout = scale, bias, nn.Dropout(p)

    def forward(self, x):
        return self.dropout(super().forward(x) * self.scale + self.bias)


def scaled_layers():
    return [Scaled(1 / math.sqrt(i + 1.5), 0.1 * (i + 1), 1.0 + i) for i in range(4)]


def test_layers_with_numbers_of_their_own():
    graph = trace(Stack(*scaled_layers()), (x(),), {})
    assert repeats(graph) == [(7, 4)]
    ops = {op.name: op for op in graph.ops}
    folded = fold(graph)
    assert all(ops[same].target == ops[name].target for name, same in folded.representative.items() if name in ops)


@pytest.mark.parametrize("odd", [(0.0, 0.1, 1.0), (-1.0, 0.1, 1.0), (2.0, 0.0, 1.0), (2.0, 0.1, 0.0), (2, 0.1, 1.0)])
def test_nought_and_signs_are_told_apart(odd):
    """Nothing is dropped at rate 0; 2 is not the 2.0 of the others."""
    layers = [Scaled(2.0, 0.1, 1.0), Scaled(3.0, 0.2, 2.0), Scaled(4.0, 0.3, 3.0), Scaled(*odd)]
    assert repeats(trace(Stack(*layers), (x(),), {})) == [(7, 3)]


def test_powers_and_bounds_are_told_apart():
    class Power(Block):
        exponent = 2.0

        def forward(self, x):
            return super().forward(x).clamp(max=self.exponent) ** self.exponent

    layers = [Power() for _ in range(3)]
    for i, layer in enumerate(layers):
        layer.exponent = 2.0 + i
    assert not repeats(trace(Stack(*layers), (x(),), {}))


def test_each_layer_runs_with_its_own_numbers():
    """Planned alike they cost what each costs, and the program has the numbers of the graph."""
    graph, mesh, cluster = trace(Stack(*scaled_layers()), (x(8, 4),), {}), parse_mesh("2"), PRESETS["v100"]
    folded = fold(graph)
    priced = price(graph, folded, annotate(graph, mesh, folded), mesh, cluster)
    choice = tuple(len(entity.options) // 2 for entity in priced.entities)
    assignment = decode(priced, graph, folded, choice)
    assert evaluate(graph, assignment, mesh, cluster).step_s <= cost_of(priced.table, choice) * (1 + 1e-9)
    assert len(set(value_classes(graph, folded).values())) < len(value_classes(graph, folded)) / 2
    text = repr(lower(graph, mesh, assignment))
    for layer in scaled_layers():
        assert repr(layer.scale) in text and repr(layer.dropout.p) in text
