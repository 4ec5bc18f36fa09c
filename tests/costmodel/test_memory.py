"""Bytes the model predicts for one device against the tensors that a real run keeps for backward."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.memory import input_bytes, saved_by_op, update_bytes
from autopar.costmodel.training import OPTIMIZER_STATES, Training
from autopar.ir.graph import Graph, Input, Value
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.sbp.assignment import Assignment
from autopar.sbp.axis import Axis
from autopar.sbp.candidates import annotate
from autopar.sbp.local_ops import LOCAL_OPS
from autopar.sbp.placement import I, S
from autopar.sbp.signature import Signature, Strategy
from tests.costmodel.build import make_op, meta


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 8, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        return self.out(y.transpose(1, 2).reshape(2, 8, 16))


MODULES = {
    "mlp": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)),
    "blocks": nn.Sequential(Block(), Block()),
    "frozen": nn.Sequential(nn.Linear(16, 32).requires_grad_(False), nn.SiLU(), nn.Linear(32, 16)),
}


def whole(graph: Graph, num_axes: int) -> Assignment:
    """Everything whole on every device."""
    candidates = annotate(graph, parse_mesh("x".join("1" * num_axes)))
    strategies = {name: found[0] for name, found in candidates.strategies.items()}
    layouts = {item.value.name: (I,) * num_axes for item in graph.inputs}
    return Assignment(strategies, layouts, {}, {value.name: (I,) * num_axes for value in graph.outputs})


def saved_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the distinct storages a real run keeps, besides parameters and input."""
    alive = {t.untyped_storage().data_ptr() for t in (*module.parameters(), x)}
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = module(x)
    assert out.requires_grad
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(num_bytes for pointer, num_bytes in kept.items() if pointer not in alive)


@pytest.mark.parametrize("name", MODULES)
def test_activations_equal_what_autograd_keeps(name):
    module, x = MODULES[name], torch.randn(2, 8, 16)
    graph = trace(module, (x,), {})
    costs = evaluate(graph, whole(graph, 1), parse_mesh("1"), PRESETS["cpu"])
    assert costs.memory_bytes["activations"] == saved_bytes(module, x)
    num_parameters = sum(p.numel() for p in module.parameters())
    assert costs.memory_bytes["parameters"] == 4 * num_parameters
    assert costs.memory_bytes["gradients"] == 4 * sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_activations_of_attention_are_close():
    module, x = Heads(), torch.randn(2, 8, 16)
    graph = trace(module, (x,), {})
    costs = evaluate(graph, whole(graph, 1), parse_mesh("1"), PRESETS["cpu"])
    assert costs.memory_bytes["activations"] == pytest.approx(saved_bytes(module, x), rel=0.25)


def test_stored_bytes_by_hand():
    weight = Input("parameter", Value("w", (8, 6), torch.bfloat16, True), "w")
    assert input_bytes(weight, (S(0),), (4,), Training("adamw")) == {"parameters": 24, "gradients": 24, "optimizer": 48}
    assert update_bytes(weight, (S(0),), (4,), Training("adamw")) == 2 * (24 + 48) + 24
    frozen = Input("parameter", Value("w", (8, 6), torch.bfloat16, False), "w")
    assert input_bytes(frozen, (I,), (4,), Training("adamw")) == {"parameters": 96}
    assert update_bytes(frozen, (I,), (4,), Training("adamw")) == 0
    assert input_bytes(Input("buffer", weight.value, "b"), (I,), (4,), Training("sgd")) == {"buffers": 96}


def test_an_unknown_optimizer_lists_the_known():
    with pytest.raises(ValueError, match=r"adamw.*found 'lion-2000'"):
        Training("lion-2000")


@pytest.mark.parametrize(("num_microbatches", "num_in_flight"), [(0, 0), (2, 3), (2, 0)])
def test_impossible_counts_of_microbatches_are_refused(num_microbatches, num_in_flight):
    with pytest.raises(
        ValueError, match=f"found {num_in_flight} in flight, 0 waiting, of {num_microbatches} microbatches"
    ):
        Training("adamw", num_microbatches, num_in_flight)


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_as_large_as_that_of_a_real_optimizer(name: str, dtype: torch.dtype) -> None:
    """Of masters: as an optimizer of float32 copies, which are state themselves."""
    weight = nn.Parameter(torch.ones(8, 6, dtype=dtype))
    item = Input("parameter", Value("w", (8, 6), dtype, True), "w")
    kept = partial(input_bytes, item, (I,), (4,))
    assert kept(Training(name)).get("optimizer") == state_bytes(OPTIMIZERS[name], weight)
    if f"{name}-master" in OPTIMIZER_STATES and not dtype.is_complex:
        copy = nn.Parameter(weight.detach().to(torch.promote_types(dtype, torch.float32), copy=True))
        own_bytes = copy.untyped_storage().nbytes()
        assert kept(Training(f"{name}-master"))["optimizer"] == own_bytes + state_bytes(OPTIMIZERS[name], copy)


def state_bytes(optimizer: Callable[..., torch.optim.Optimizer], parameter: nn.Parameter) -> int:
    """Bytes of the state of an optimizer after a step, without the count of steps."""
    made = optimizer([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    made.step()
    return sum(
        x.untyped_storage().nbytes() for key, x in made.state[parameter].items() if x is not None and key != "step"
    )


def test_a_parameter_of_float32_that_is_computed_in_bfloat16_has_state_of_float32() -> None:
    value = Value("w", (8, 6), torch.bfloat16, True, stored_dtype=torch.float32)
    sizes = {"parameters": 192, "casts": 96, "gradients": 192, "optimizer": 384}
    assert input_bytes(Input("parameter", value, "w"), (I,), (4,), Training("adamw")) == sizes


def test_a_gathered_parameter_that_is_saved_transposed_is_kept():
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 12))

        def forward(self, x):
            return nn.functional.linear(x, self.weight.t())

    graph, mesh = trace(Turned(), (torch.randn(4, 8, requires_grad=True),), {}), parse_mesh("4")
    (parameter,) = graph.of_kind("parameter")
    stored = whole(graph, 1)
    split = Assignment(stored.strategies, stored.layouts | {parameter.value.name: (S(0),)}, {}, stored.outputs)
    kept = [evaluate(graph, one, mesh, PRESETS["cpu"]).memory_bytes.get("gathered", 0) for one in (stored, split)]
    assert kept == [0, 8 * 12 * 4]


def test_what_a_local_implementation_saves_is_asked_of_it():
    logits, target = meta(32, 64), torch.empty(32, dtype=torch.long, device="meta")
    op = make_op("aten.cross_entropy_loss.default", logits, target)
    split = Strategy((Signature((S(1), I), (I,), "vocab"),))
    kept = saved_by_op(op, split, ((32, 16), (32,)), ((),), (4,))
    tensors = torch.randn(32, 16, requires_grad=True), torch.randint(64, (32,))
    saved: dict[int, torch.Tensor] = {}
    with saved_tensors_hooks(lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t):
        LOCAL_OPS[op.target].run(*tensors, vocab=(Axis("a", 4, 0, None),))
    assert kept == sum(t.untyped_storage().nbytes() for t in saved.values())
