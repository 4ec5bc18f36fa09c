"""Stages run one after the other do what the whole graph does."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from autopar.errors import UnsupportedOp
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.graph import Value
from autopar.ir.run_graph import run
from autopar.ir.split_stages import crossing_numbers, cut, cut_points
from autopar.ir.trace import trace
from tests import zoo
from tests.ir.compare import bindings, results


def run_stages(stages, inputs):
    """As `run` of the whole graph. Each stage is given its own inputs and what it receives, and nothing else."""
    received, mutations = {}, {}
    for stage in stages:
        own = {item.value.name: inputs[item.value.name] for item in stage.graph.inputs if item.value.name in inputs}
        outputs, written = run(stage.graph, own | received)
        mutations |= written
        received = dict(zip(stage.sends, outputs))
    return outputs, mutations


def t5(**changed: int):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "vocab_size": zoo.VOCABULARY,
        "d_model": zoo.HIDDEN,
        "d_kv": 8,
        "d_ff": 64,
        "num_heads": zoo.HEADS,
        "num_layers": 3,
    }
    model = T5ForConditionalGeneration(
        T5Config(**sizes | changed, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0)
    )
    tokens = torch.randint(1, zoo.VOCABULARY, (zoo.BATCH, zoo.SEQUENCE))
    return zoo.Case(model.double(), (), {"input_ids": tokens, "labels": tokens.flip(0)}, lambda output: output.loss)


def build(name):
    return t5() if name == "t5" else zoo.build(name)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "bert", "vit", "resnet", "t5"])
def test_stages_in_turn_equal_the_whole(name):
    case = build(name)
    graph = trace(case.model, case.args, case.kwargs)
    inputs = bindings(graph, case.model, case.args, case.kwargs)
    whole, written = run(graph, inputs)
    expected = results(whole, case.model)
    points = cut_points(fold(graph), graph)
    anywhere = tuple(op.name for op in graph.ops[3 :: max(len(graph.ops) // 5, 1)])
    for starts in (points, points[1::2], anywhere, ()):
        stages = cut(graph, starts)
        assert len(stages) == len(starts) + 1
        names = [op.name for stage in stages for op in stage.graph.ops]
        assert set(names) == {op.name for op in graph.ops}
        outputs, mutations = run_stages(stages, inputs)
        apart = {"rtol": 1e-12, "atol": 1e-15} if name == "t5" else {"rtol": 0.0, "atol": 0.0}  # tied: sums of stages
        torch.testing.assert_close(results(outputs, case.model), expected, **apart)
        torch.testing.assert_close(mutations, written, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_stages_hold_what_they_need_and_no_more(name):
    case = build(name)
    graph = trace(case.model, case.args, case.kwargs)
    stages = cut(graph, cut_points(fold(graph), graph)[::2])
    for stage, following in pairwise(stages):
        assert stage.sends == following.receives
        assert [value.name for value in stage.graph.outputs] == list(stage.sends)
        assert [item.value for item in following.graph.inputs[: len(stage.sends)]] == list(stage.graph.outputs), (
            "shape and gradient alike"
        )
    for number, stage in enumerate(stages):
        read = {value.name for op in stage.graph.ops for value in op.inputs} | {
            v.name for v in stage.graph.outputs if isinstance(v, Value)
        }
        for item in stage.graph.inputs:
            assert item.value.name in read or (number == 0 and item.kind in ("parameter", "buffer")), item.fqn
    state = [item.fqn for stage in stages for item in stage.graph.inputs if item.kind in ("parameter", "buffer")]
    assert set(state) == {item.fqn for item in graph.inputs if item.kind in ("parameter", "buffer")}
    tied = {fqn for fqn in state if state.count(fqn) > 1}
    biases = {f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for side in ("encoder", "decoder")}
    assert tied == {"gpt2": {"transformer.wte.weight"}, "t5": {"shared.weight", *biases}, "resnet": set()}[name]


def test_blocks_are_where_stages_may_start():
    case = zoo.build("gpt2")
    graph = trace(case.model, case.args, case.kwargs)
    points = cut_points(fold(graph), graph)
    by_name = {op.name: op for op in graph.ops}
    modules = [by_name[name].module for name in points]
    assert modules == ["transformer.h.0.ln_1", "transformer.h.1.ln_1", "transformer.ln_f"]
    for stage in cut(graph, points)[1:]:
        assert len(stage.receives) == 1, "only the activations of the blocks cross"


def test_what_skips_a_stage_is_passed_on():
    case = t5()
    graph = trace(case.model, case.args, case.kwargs)
    stages = cut(graph, cut_points(fold(graph), graph))
    passed = [set(stage.receives) & set(stage.sends) for stage in stages]
    made = {value.name for stage in stages for op in stage.graph.ops for value in op.outputs}
    assert any(passed), "the encoder's output and the position bias are read by every layer after them"
    for names, stage in zip(passed, stages):
        own = {value.name for op in stage.graph.ops for value in op.outputs}
        assert names <= made - own


def test_what_follows_from_a_small_parameter_does_not_cross() -> None:
    """Each stage looks up the biases of T5's layers: their parameters are on several stages, as a tied one is."""
    case = t5(relative_attention_num_buckets=4)
    graph = trace(case.model, case.args, case.kwargs)
    stages = cut(graph, cut_points(fold(graph), graph))
    assert [len(stage.receives) for stage in stages] == [0, 1, 1, 2, 2, 2]
    holders = {
        fqn: sum(fqn in {item.fqn for item in stage.graph.inputs} for stage in stages)
        for fqn in case.model.state_dict()
        if "relative" in fqn
    }
    assert sorted(holders.values()) == [3, 3], holders
    inputs = bindings(graph, case.model, case.args, case.kwargs)
    outputs, _ = run_stages(stages, inputs)
    torch.testing.assert_close(results(outputs, case.model), results(run(graph, inputs)[0], case.model))


class Spread(nn.Module):
    """What follows from small parameters, some with a product, an argument that looks up, or random numbers, and what
    is smaller than its parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.row = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        spread = self.row.expand(64, 4) + 1
        kept = [
            self.table.square().sum(),
            spread,
            spread @ self.table.T @ self.table,
            (self.table * 2)[which],
            torch.dropout(spread, 0.5, True),
        ]
        for layer in self.layers:
            x = torch.relu(layer(x))
            for one in kept:
                x = x + one
        return x.sum()


def test_products_lookups_of_the_batch_and_random_numbers_cross() -> None:
    graph = trace(Spread(), (torch.randn(64, 4), torch.randint(2, (64,))), {})
    second = [op.name for op in graph.ops if op.target == "aten.linear.default"][-2]
    _, stage = cut(graph, (second,))
    assert len(stage.receives) == 5, "x, and all but what is spread out of the row"
    assert {item.fqn for item in stage.graph.inputs if item.kind == "parameter"} >= {"row"}


def test_what_follows_from_the_arguments_does_not_cross():
    case = zoo.build("llama")
    graph = trace(case.model, case.args, case.kwargs)
    stages = cut(graph, cut_points(fold(graph), graph))
    assert [len(stage.receives) for stage in stages] == [0, 1, 1, 1], (
        "the rotary angles are made on each stage with a layer"
    )
    made = [op.name for stage in stages for op in stage.graph.ops]
    again = {name for name in made if made.count(name) > 1}
    by_name = {op.name: op for op in graph.ops}
    assert again and not any(value.needs_grad for name in again for value in by_name[name].outputs)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        x = self.first(x) + self.calls
        x = self.second(x)
        self.calls.add_(x.detach().mean())
        return x


def test_a_buffer_written_on_another_stage_is_refused():
    graph = trace(Counter(), (torch.randn(2, 4),), {})
    assert len(cut(graph, (graph.ops[1].name,))) == 2, "reading and writing on one stage"
    with pytest.raises(UnsupportedOp, match=r"buffer calls .* stages \[0, 1\]"):
        cut(graph, (graph.ops[2].name,))


def test_bad_starts():
    graph = trace(Counter(), (torch.randn(2, 4),), {})
    first, second, third = (op.name for op in graph.ops[:3])
    with pytest.raises(ValueError, match="nowhere"):
        cut(graph, ("nowhere",))
    for starts in ((first,), (third, second), (second, second)):
        with pytest.raises(ValueError, match="in graph order"):
            cut(graph, starts)


def test_points_of_a_graph_without_repeats():
    graph = trace(Counter(), (torch.randn(2, 4),), {})
    assert cut_points(replace(fold(graph), repeats=()), graph) == ()


class Uneven(nn.Module):
    """Layers of different sizes, of which one is skipped over, and a mask that follows from the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(*size) for size in ((4, 6), (6, 6), (6, 5), (5, 2)))

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        mask = (keep > 0).float()
        x = torch.relu(self.first(x))
        x = x + torch.relu(self.second(x)) * mask
        return self.last(torch.tanh(self.third(x))).sum()


def test_points_where_one_tensor_crosses():
    graph = trace(Uneven(), (torch.randn(3, 4), torch.ones(3, 1)), {})
    folded = replace(fold(graph), repeats=())
    points = cut_points(folded, graph, least=2)
    products = [op.name for op in graph.ops if "linear" in op.target]
    assert points == (products[1], products[2], products[3])
    assert all(len(stage.sends) == 1 for stage in cut(graph, points)[:-1])
    assert cut_points(folded, graph, least=1) == ()


def test_points_of_repeats_are_enough_where_they_give_the_stages():
    graph = trace(nn.Sequential(nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(4))), (torch.randn(3, 4),), {})
    folded = fold(graph)
    assert cut_points(folded, graph, least=3) == cut_points(folded, graph)


class Halves(nn.Module):
    """A way down and a way up, with what the way down gave beside."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(c, 2 * c, 3, 2, 1) for c in (4, 8, 16))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in (16, 16, 12))

    def forward(self, x):
        kept = []
        for layer in self.down:
            kept.append(x)
            x = layer(x).relu()
        for layer in self.up:
            x = torch.cat([layer(x), kept.pop()], 1)[:, : 32 if len(kept) == 2 else 24]
        return x.square().mean()


def test_points_between_halves_where_several_tensors_cross():
    model, x = Halves().double(), torch.randn(2, 4, 16, 16, dtype=torch.float64)
    graph = trace(model, (x,), {})
    numbers = dict(zip([op.name for op in graph.ops], crossing_numbers(graph)))
    found = cut_points(fold(graph), graph, least=4)
    assert {numbers[name] for name in found} >= {1, 2, 3}
    for name in found:
        (loss,), _ = run_stages(cut(graph, [name]), bindings(graph, model, (x,), {}))
        assert torch.allclose(loss, model(x), rtol=1e-12)


def test_the_points_between_halves_of_a_deep_model_are_limited():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(150))

        def forward(self, x):
            start = self.layers[0](x)
            for layer in self.layers[1:]:
                x = layer(x + start[:, :1]).tanh()
            return x.sum()

    graph = trace(Deep(), (torch.ones(2, 4),), {})
    assert 32 < len(cut_points(Folded({}, ()), graph, least=4)) <= 66
