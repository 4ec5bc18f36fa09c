"""The traced graph computes what the model computes, and tracing leaves no trace on the model."""

import dataclasses
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import TraceError
from autopar.ir.print_graph import fingerprint, format_graph
from autopar.ir.trace import trace
from tests import zoo
from tests.ir.compare import assert_same_as_model


@pytest.mark.parametrize("name", sorted(zoo.ZOO))
@pytest.mark.parametrize("is_training", [True, False])
def test_graph_equals_model(name, is_training):
    case = zoo.build(name)
    model = case.model.train(is_training)
    assert_same_as_model(trace(model, case.args, case.kwargs), model, case.args, case.kwargs)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "bert"])
def test_random_ops_draw_as_the_model_does(name):
    case = zoo.build(name, dropout=0.5)
    assert_same_as_model(trace(case.model, case.args, case.kwargs), case.model, case.args, case.kwargs)


class Listed(nn.Module):
    """Reads its state from a list and a dict that hold it beside the module, as cells of recurrent libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.zeros(4))
        self.listed, self.named = [self.weight, self.mean], {"bias": self.bias}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.listed[1].mul_(0.9).add_(0.1 * x.mean(0))
        return (x @ self.listed[0]).tanh() * self.named["bias"] - self.mean


def test_parameters_and_buffers_that_are_read_from_a_list():
    model, x = Listed().double(), torch.randn(8, 4).double()
    graph = trace(model, (x,), {})
    assert graph.constants == {}
    assert_same_as_model(graph, model, (x,), {})


def _t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0))


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
    }
    return MixtralForCausalLM(
        MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
    )


def _llama_with_cache():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, use_cache=True))


BUILDERS = {"t5": _t5, "mixtral": _mixtral, "llama_with_cache": _llama_with_cache}


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_encoder_decoders_experts_and_caches(name):
    torch.manual_seed(0)
    model = BUILDERS[name]()
    tokens = torch.randint(1, 64, (2, 8))
    kwargs = {"input_ids": tokens, "labels": tokens}
    graph = trace(model, (), kwargs)
    assert_same_as_model(graph, model, (), kwargs | {"labels": torch.randint(1, 64, (2, 8))}, tolerance=1e-5)
    with torch.device("meta"):
        on_meta = BUILDERS[name]()
    assert fingerprint(trace(on_meta, (), kwargs)) == fingerprint(graph)


@pytest.mark.parametrize("name", sorted(zoo.ZOO))
def test_meta_model_has_the_same_graph(name):
    case = zoo.build(name)
    expected = format_graph(trace(case.model, case.args, case.kwargs))
    with torch.device("meta"):
        on_meta = zoo.build(name)
    assert format_graph(trace(on_meta.model, case.args, case.kwargs)) == expected


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tracing_changes_nothing(device):
    case = zoo.build("resnet")
    model = case.model.to(device)
    before = {
        name: (id(tensor), tensor._version, None if tensor.is_meta else tensor.clone())
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    random_state = torch.random.get_rng_state()
    trace(model, case.args, case.kwargs)
    after = {
        name: (id(tensor), tensor._version, None if tensor.is_meta else tensor.clone())
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    assert {name: item[:2] for name, item in before.items()} == {name: item[:2] for name, item in after.items()}
    torch.testing.assert_close(
        [item[2] for item in before.values()], [item[2] for item in after.values()], rtol=0, atol=0
    )
    assert torch.equal(random_state, torch.random.get_rng_state())
    assert model.training and not model._forward_hooks


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.ones(4), persistent=False)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, tokens):
        return self.head(self.embed(tokens) * self.scale + self.offset)


def test_tied_unused_and_frozen_parameters():
    model, tokens = Tied(), torch.tensor([[1, 2]])
    graph = trace(model, (tokens,), {})
    parameters = {item.fqn: item for item in graph.of_kind("parameter")}
    assert set(parameters) == {"embed.weight", "unused.weight", "unused.bias", "scale"}
    assert parameters["embed.weight"].aliases == ("head.weight",)
    assert not parameters["scale"].value.needs_grad and parameters["embed.weight"].value.needs_grad
    assert [(item.fqn, item.is_persistent) for item in graph.of_kind("buffer")] == [("offset", False)]
    assert_same_as_model(graph, model, (tokens,), {})


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    label: str


class Structured(nn.Module):
    def forward(self, x, scale=None, *, extra, twice=False):
        y = x * extra["weights"][0] + (0 if scale is None else scale)
        return Result(y * 2 if twice else y, "done"), {"count": 3, "x": x}


def test_nested_arguments_constants_and_dataclass_outputs():
    x = torch.randn(3, dtype=torch.float64)
    model, kwargs = Structured(), {"twice": True, "extra": {"weights": [torch.ones(3), None]}}
    graph = trace(model, (x,), kwargs)
    assert sorted(map(str, graph.arguments)) == ["None", "True", "extra_weights_0", "x"]
    assert_same_as_model(graph, model, (x,), kwargs)
    result, _ = model(x, **kwargs)
    assert type(result) is Result


def test_one_tensor_passed_twice_is_two_inputs():
    x = torch.randn(3, dtype=torch.float64)
    graph = trace(Structured(), (x, x), {"extra": {"weights": [x]}})
    y = torch.ones(3, dtype=torch.float64)
    assert_same_as_model(graph, Structured(), (x, y), {"extra": {"weights": [2 * y]}})


class Sum(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache = torch.zeros(4)
        self.function = function

    def forward(self, x):
        return self.function(self, self.linear(x))


def _branch(model, x):
    if x.sum() > 0:
        return x
    return -x


def _write_parameter(model, x):
    y = model.linear(x)
    with torch.no_grad():
        model.linear.weight.mul_(0.5)
    return y


ERRORS = {
    "branch": (_branch, "`if x.sum() > 0:` branches on the values"),
    "item": (lambda model, x: x * x.sum().item(), "aten.item.default gives a number"),
    "nonzero": (lambda model, x: x.nonzero(), "torch.where with a mask"),
    "index by mask": (lambda model, x: x[x > 0], "torch.where with a mask"),
    "cond": (lambda model, x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)), "torch.cond of"),
    "own bug": (lambda model, x: x @ torch.ones(3, 3), "RuntimeError"),
    "parameter": (_write_parameter, "in place after %linear_1 read it"),
    "attribute": (lambda model, x: x + model.cache.add_(1), "tensor attribute cache in place"),
    "several views": (
        lambda model, x: torch.broadcast_tensors(x, x[:1])[0].mul_(2),
        "aten.broadcast_tensors.default gave a view of",
    ),
    "overlap": (
        lambda model, x: x[:, :1].clone().expand(-1, 4).add_(1),
        "cannot write in place through aten.expand.default",
    ),
}


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_errors_name_the_line(name):
    function, message = ERRORS[name]
    with pytest.raises(TraceError, match=r"test_trace.py:\d+") as error:
        trace(Sum(function), (torch.randn(2, 4),), {})
    assert message in str(error.value)


class Attribute(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear, self.table = linear, torch.arange(4.0)

    def forward(self, x):
        return self.linear(x) + self.table


@pytest.mark.parametrize("layer", [nn.Linear, nn.Identity])
def test_constants_without_contents(layer):
    with torch.device("meta"):
        model = Attribute(layer(4, 4))
    with pytest.raises(TraceError, match="register"):
        trace(model, (torch.randn(2, 4, device="meta"),), {})


def test_numbers_in_the_forward_survive_the_meta_device():
    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x) * torch.tensor([1.0, 2.0, 4.0], device=x.device) + F.one_hot(
                torch.tensor(1, device=x.device), 3
            )

    model, x = Numbers(), torch.randn(2, 3)
    with torch.device("meta"):
        graph = trace(Numbers(), (x,), {})
    assert_same_as_model(graph, model, (x,), {}, tolerance=1e-6)


def test_what_cannot_be_traced_is_said_in_a_line(capsys):
    """torch.export prints the whole graph there; what the model says is passed on."""

    class Branching(nn.Linear):
        def forward(self, x):
            print("hello", file=sys.stderr)
            return x + 1 if super().forward(x).relu().nonzero().shape[0] > 3 else x

    with pytest.raises(TraceError, match="branches on the values"):
        trace(Branching(4, 4), (torch.ones(4),), {})
    said = capsys.readouterr().err
    assert "hello" in said and "def forward" not in said
