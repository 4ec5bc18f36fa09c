"""Loops over experts become grouped products of sorted rows, or are refused with the reason."""

import pytest
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.ir.graph import Graph
from autopar.ir.run_graph import run
from autopar.ir.trace import trace
from autopar.ir.trace_with_loss import recorded, trace_loss, traced_for_sizes
from autopar.sbp.analysis.expert_routing import num_exchanged
from tests.expert_loops import EXPERTS, LOOPS, Expert, Experts, Layers, case_of


def run_on(graph: Graph, model: nn.Module, kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
    parameters = dict(model.named_parameters())
    inputs = {item.value.name: parameters[item.fqn] for item in graph.of_kind("parameter")}
    given = zip(graph.of_kind("argument"), (kwargs[name] for name in sorted(kwargs)))
    (loss,), _ = run(graph, inputs | {item.value.name: tensor for item, tensor in given})
    return loss


@pytest.mark.parametrize("route", ["any", "one expert", "an idle expert"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_traced_as_it_runs(name: str, route: str) -> None:
    case = case_of(name, 2)
    if route != "any":
        for layer in case.model.layers:
            layer.router.weight.data[1:] = 0 if route == "one expert" else layer.router.weight.data[1:]
            layer.router.weight.data[-1] = -layer.router.weight.data[0]  # and never both
    graph = trace(case.model, (), case.kwargs)
    assert num_exchanged(graph) == EXPERTS
    assert not any(op.target in ("autopar.rows.default", "aten.stack.default") for op in graph.ops) or name != (
        "stacked_weights"
    )
    parameters = list(case.model.parameters())
    found, truth = run_on(graph, case.model, case.kwargs), case.model(**case.kwargs)
    torch.testing.assert_close(found, truth)
    gradients = (torch.autograd.grad(loss, parameters, materialize_grads=True) for loss in (found, truth))
    for one, other in zip(*gradients):  # an expert without rows has none on one device, and zeros here
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def something_else(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        token, place = torch.where(ids == number)
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        else:
            out = out + 0.1 * expert(x[:1]).sum()
    return out


def capacity(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        token, place = torch.where(ids == number)
        if token.numel() > 5:
            token, place = token[:5], place[:5]
        out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
    return out


def mixed_rows(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        token, place = torch.where(ids == number)
        rows = expert(x[token])
        out.index_add_(0, token, (rows - rows.mean(0)) * weights[token, place, None])
    return out


def counted(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out, load = torch.zeros_like(x), 0
    for number, expert in enumerate(self.experts):
        token, place = torch.where(ids == number)
        load = load + token.shape[0]
        out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
    return out * load


def left_out(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number in range(1, EXPERTS):
        token, place = torch.where(ids == number)
        out.index_add_(0, token, self.experts[number](x[token]) * weights[token, place, None])
    return out


def unlike(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        token, place = torch.where(ids == number)
        rows = expert(x[token]) if number else 2 * expert(x[token])
        out.index_add_(0, token, rows * weights[token, place, None])
    return out


def read_back(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        token, place = torch.where(ids == number)
        out.index_add_(0, token, expert(x[token] + out[token]) * weights[token, place, None])
    return out


def of_another_mask(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    mask, other = (nn.functional.one_hot(part, EXPERTS).permute(2, 1, 0) for part in (ids, ids[:3]))
    for number in (other.sum((-1, -2)) > 0).nonzero():
        place, token = torch.where(mask[number].squeeze(0))
        out.index_add_(0, token, self.experts[number](x[token]) * weights[token, place, None])
    return out


def overwritten(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        token, _ = torch.where(ids == number)
        out[token] = expert(x[token])
    return out


def no_experts(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x * x[x > 0].std()


def other_ids(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return added_to(self, x, weights, ids * 2 // 2)


def added_to(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        token, place = torch.where(ids == number)
        out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
    return out


REFUSED = {
    something_else: "something else for an expert without rows",
    capacity: "branches on the values of a tensor",
    mixed_rows: "it does not treat each row by itself",
    counted: "computes with the number of rows",
    left_out: r"its experts are \[1, 2, 3\]",
    unlike: "the experts differ in what they compute",
    read_back: "rows",
    of_another_mask: "selects rows by another mask than it counts them in",
    overwritten: "overwrite one another",
    no_experts: "the mask that selects rows is not",
    other_ids: "not all that topk, argmax or max choose among",
}


@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_what_is_no_such_loop_is_refused(loop) -> None:
    case = case_of("one_hot_masks", 1)
    model = Layers(loop, 1)
    assert isinstance(model.layers[0].experts[0], Expert)
    with pytest.raises(TraceError, match=REFUSED[loop]):
        trace(model, (), case.kwargs)
    with pytest.raises(TraceError, match=REFUSED[loop]):
        trace_loss(model, lambda loss, target: loss * target, (*case.kwargs.values(), torch.ones(())), {})


def test_a_loop_is_traced_for_other_sizes() -> None:
    case = case_of("hit_experts", 2)
    sized = traced_for_sizes(case.model, None, (), case.kwargs, {0: (0, 1), 1: (0, 1)})
    kwargs = {name: tokens[:6, :5] for name, tokens in case.kwargs.items()}
    graph = sized.graph((), kwargs)
    assert graph is not None and num_exchanged(graph) == EXPERTS
    torch.testing.assert_close(run_on(graph, case.model, kwargs), case.model(**kwargs))
    with pytest.raises(TraceError, match="no op that is recorded"):  # then it is exported again
        recorded(case.model, None, (), kwargs)
