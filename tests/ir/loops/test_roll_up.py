"""Loops over many steps are one op, which computes what the model does; short ones and others stay written out."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.graph import Graph
from autopar.ir.loops.body import body_called
from autopar.ir.loops.find_loops import MIN_STEPS
from autopar.ir.loops.scan_op import SCAN
from autopar.ir.run_graph import run
from autopar.ir.trace import trace
from autopar.sbp.op_signatures import signatures_of
from autopar.sbp.proof.check_signature import check_signature

STEPS = MIN_STEPS + 3  # all of which are traced
MORE = 2 * MIN_STEPS


class Loop(nn.Module):
    """A model of `function(model, x)`, x of [4, steps, 6], with a cell and a layer."""

    def __init__(self, function: Callable[["Loop", Tensor], Tensor]) -> None:
        super().__init__()
        self.cell, self.layer, self.start = nn.GRUCell(6, 6), nn.Linear(6, 6), nn.Parameter(torch.randn(6))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def last_state(model: Loop, x: Tensor) -> Tensor:
    h = model.start.expand(len(x), -1)
    for t in range(x.shape[1]):
        h = model.cell(x[:, t], h)
    return h


def all_states(model: Loop, x: Tensor) -> Tensor:
    h, states = torch.zeros_like(x[:, 0]), []
    for step in x.unbind(1):
        h = model.cell(step, h)
        states.append(h)
    return torch.stack(states, 1)


def read_backwards(model: Loop, x: Tensor) -> Tensor:
    states, h, found = all_states(model, x).unbind(1), model.start.expand(len(x), -1), []
    for state in reversed(states):
        h = torch.tanh(model.layer(state)) * h
        found.append(h.unsqueeze(1))
    return torch.cat(found[::-1], 1)


def written(model: Loop, x: Tensor) -> Tensor:
    out, h = torch.zeros_like(x), model.start.expand(len(x), -1)
    for t in range(x.shape[1]):
        h = model.cell(x[:, t : t + 1].squeeze(1), h)
        out[:, t] = h
    return out


def some_read(model: Loop, x: Tensor) -> Tensor:
    states = all_states(model, x).unbind(1)
    return states[3] + states[-1] + torch.stack(states[5:9]).sum(0)


def two_carried(model: Loop, x: Tensor) -> Tensor:
    old, new = model.start.expand(len(x), -1), x[:, 0]
    for t in range(1, x.shape[1]):
        old, new = new, torch.tanh(model.layer(old + x[:, t]))  # each reads what two steps before computed
    return torch.stack([old, new])


def powers(model: Loop, x: Tensor) -> Tensor:
    out = x[:, 0]
    for _ in range(x.shape[1]):
        out = out + 0.1 * torch.tanh(model.layer(out))
    return out


ROLLED = [last_state, all_states, read_backwards, written, some_read, two_carried, powers]


def dropped_out(model: Loop, x: Tensor) -> Tensor:
    h = model.start.expand(len(x), -1)
    for t in range(x.shape[1]):
        h = F.dropout(model.cell(x[:, t], h), 0.5, training=True)
    return h


def summed_losses(model: Loop, x: Tensor) -> Tensor:
    h, loss = model.start.expand(len(x), -1), x.new_zeros(())
    for t in range(x.shape[1]):
        h = model.cell(x[:, t], h)
        loss = loss + h.square().mean()
    return loss


def other_layers(model: Loop, x: Tensor) -> Tensor:
    out = x[:, 0]
    for t in range(x.shape[1]):
        out = torch.tanh(out) if t % 5 == 3 else out * 1.5
    return out + model.start


def wraps_around(model: Loop, x: Tensor) -> Tensor:
    h, n = model.start.expand(len(x), -1), x.shape[1]
    for t in range(n):
        h = model.cell(x[:, (t + 3) % n], h)
    return h


def changes_late(model: Loop, x: Tensor) -> Tensor:
    h, states = model.start.expand(len(x), -1), []
    for t in range(x.shape[1]):
        h = model.cell(x[:, t], h) if t < MORE - 9 else torch.tanh(model.layer(h + x[:, 5]))
        states.append(h)
    return torch.stack(states[::2]).sum(0) * states[MIN_STEPS + 10]


def grows(model: Loop, x: Tensor) -> Tensor:
    seen = x[:, :1]
    for t in range(1, x.shape[1]):
        seen = torch.cat([seen, torch.tanh(model.layer(x[:, t : t + 1] + seen.mean(1, keepdim=True)))], 1)
    return seen


def written_behind(model: Loop, x: Tensor) -> Tensor:
    h, x = model.start.expand(len(x), -1), x.clone()
    for t in range(x.shape[1]):
        step = x[:, t]
        h = torch.tanh(step + h)
    step.mul_(2)  # a view of x
    return x + h[:, None]


def state_written_behind(model: Loop, x: Tensor) -> Tensor:
    states = [h := model.start.expand(len(x), -1)]
    for t in range(x.shape[1]):
        states.append(h := 0.9 * h + x[:, t] + model.start)
    states[-1].mul_(2)
    states[MIN_STEPS].mul_(3)
    return torch.stack([*states[3:9], *states[-4:], *states[MIN_STEPS - 2 : MIN_STEPS + 12]])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def own_function(model: Loop, x: Tensor) -> Tensor:
    h = model.start.expand(len(x), -1)
    for t in range(x.shape[1]):
        h = torch.tanh(Doubled.apply(h) + x[:, t])
    return Doubled.apply(h)


def own_function_behind(model: Loop, x: Tensor) -> Tensor:
    return Doubled.apply(last_state(model, x))


def two_loops_by_turns(model: Loop, x: Tensor) -> Tensor:
    h, g = model.start.expand(len(x), -1), x[:, 0]
    for t in range(x.shape[1]):
        h = model.cell(x[:, t], h)
        for _ in range(2):
            g = torch.tanh(model.layer(g)) * h
    return g


def counts(model: Loop, x: Tensor) -> Tensor:
    h = model.start.expand(len(x), -1)
    for t in range(x.shape[1]):
        h = model.cell(x[:, t], h) + t * 0.01
    return h


def without_gradient(model: Loop, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = last_state(model, x)
    return h * model.start


OTHERS = [wraps_around, changes_late, grows, written_behind, state_written_behind, own_function, own_function_behind]
OTHERS += [two_loops_by_turns, counts, without_gradient]


@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.__name__)
def test_loops_that_do_otherwise_compute_the_same(function: Callable[[Loop, Tensor], Tensor]) -> None:
    model, x = modelled(function), drawn(MORE)
    assert_as_model(trace(model, (x,), {}), model, x)


WRITTEN_OUT = [dropped_out, summed_losses, other_layers]


def inputs_of(graph: Graph, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        item.value.name: x if item.kind == "argument" else state[item.fqn]
        for item in graph.inputs
        if item.kind != "constant"
    }


def drawn(steps: int) -> Tensor:
    return torch.randn(4, steps, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def modelled(function: Callable[[Loop, Tensor], Tensor]) -> Loop:
    torch.manual_seed(0)
    return Loop(function).double()


def gradients(out: Tensor, model: nn.Module) -> Iterator[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    found = torch.autograd.grad((out * weights).sum(), list(model.parameters()), allow_unused=True)
    return (x for x in found if x is not None)


@pytest.mark.parametrize("steps", [STEPS, MORE])
@pytest.mark.parametrize("function", ROLLED)
def test_a_loop_is_one_op_that_computes_the_same(function: Callable[[Loop, Tensor], Tensor], steps: int) -> None:
    model, x = modelled(function), drawn(steps)
    graph = trace(model, (x,), {})
    assert any(op.target == SCAN for op in graph.ops)
    assert_as_model(graph, model, x)


@pytest.mark.parametrize("function", ROLLED)
def test_the_graph_is_as_long_for_more_steps(function: Callable[[Loop, Tensor], Tensor]) -> None:
    model = modelled(function)
    short, long = (trace(model, (drawn(steps),), {}) for steps in (STEPS, MORE))
    assert [op.target for op in short.ops] == [op.target for op in long.ops]


def assert_as_model(graph: Graph, model: Loop, x: Tensor) -> None:
    (found,), _ = run(graph, inputs_of(graph, model, x))
    expected = model(x)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, model), gradients(expected, model), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("function", WRITTEN_OUT)
def test_other_loops_stay_written_out(function: Callable[[Loop, Tensor], Tensor]) -> None:
    graph = trace(modelled(function), (drawn(STEPS),), {})
    assert not any(op.target == SCAN for op in graph.ops)


def test_a_short_loop_stays_written_out() -> None:
    graph = trace(modelled(last_state), (drawn(MIN_STEPS - 1),), {})
    assert not any(op.target == SCAN for op in graph.ops)


@pytest.mark.parametrize("function", ROLLED)
def test_the_ways_to_split_a_loop_are_true(function: Callable[[Loop, Tensor], Tensor]) -> None:
    graph = trace(modelled(function), (drawn(STEPS),), {})
    op = next(op for op in graph.ops if op.target == SCAN)
    tensors = [torch.randn(value.shape, dtype=value.dtype, requires_grad=value.needs_grad) for value in op.inputs]
    signatures = [one for one in signatures_of(op) if any(placed.is_split for placed in one.inputs)]
    assert signatures
    for signature in signatures:
        assert check_signature(op, signature, 2, tensors), signature


def test_a_second_derivative_is_refused_by_name() -> None:
    model, x = modelled(last_state), drawn(STEPS)
    graph = trace(model, (x,), {})
    (found,), _ = run(graph, inputs_of(graph, model, x))
    with pytest.raises(Exception, match="a loop over steps has no second derivative"):
        torch.autograd.grad(found.sum(), list(model.parameters()), create_graph=True, allow_unused=True)


def test_equal_loops_of_two_layers_have_one_body() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Loop(all_states) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    graph = trace(Layers().double(), (drawn(STEPS).requires_grad_(),), {})
    names = [op.args[3] for op in graph.ops if op.target == SCAN]
    assert len(names) == 2 and names[0] == names[1]
    assert len(body_called(names[0]).ops) <= 3
