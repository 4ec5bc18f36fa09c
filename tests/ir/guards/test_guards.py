"""Branches on values, and sizes that follow from them: they go the example's way, which each call checks."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import AutoparError, TraceError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.guards.guard_ops import GUARDED
from autopar.ir.run_graph import run
from autopar.ir.trace import trace

Tensor = torch.Tensor
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A linear layer, of whose result `decide` makes the output."""

    def __init__(self, decide: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.decide = nn.Linear(3, 3), decide
        self.register_buffer("flag", torch.tensor(1))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.decide(self, self.linear(x), *more)


def masked(model: Model, y: Tensor, mask: Tensor) -> Tensor:
    return y if mask.all() else y * mask


def raises(model: Model, y: Tensor, mask: Tensor) -> Tensor:
    if mask.sum() != mask.numel():
        raise ValueError("the mask has holes")
    return y * 2


def asserts(model: Model, y: Tensor, lengths: Tensor) -> Tensor:
    assert lengths.max().item() <= 3
    return y * (torch.arange(3) < lengths[:, None])


def cuts(model: Model, y: Tensor, lengths: Tensor) -> Tensor:
    return y[:, : lengths.max()].sum(1)


def hits(model: Model, y: Tensor, mask: Tensor) -> Tensor:
    return y[mask].std()


def selects(model: Model, y: Tensor, mask: Tensor) -> Tensor:
    return y.masked_select(mask).abs().cumsum(0)[-1]


def finds(model: Model, y: Tensor, mask: Tensor) -> Tensor:
    return y[mask[:, 0].nonzero().squeeze(1)].mean()


def finds_by_where(model: Model, y: Tensor, mask: Tensor) -> Tensor:
    return y[torch.where(mask[:, 0])[0]].std()


def finds_in_lists(model: Model, y: Tensor, mask: Tensor) -> Tensor:
    (rows,) = mask[:, 0].nonzero(as_tuple=True)
    return F.cross_entropy(y[rows], rows % 3)


def finds_places(model: Model, y: Tensor, mask: Tensor) -> Tensor:
    return y[torch.argwhere(mask)[:, 0]].std()


def scales(model: Model, y: Tensor, sizes: Tensor) -> Tensor:
    height, width = sizes.tolist()
    return y[:, : int(height * (round(width * 1.5) / width) ** 2)].sum(1)


def flags(model: Model, y: Tensor) -> Tensor:
    return y * 2 if model.flag else y


def equals(model: Model, y: Tensor, mask: Tensor) -> Tensor:
    return y if torch.equal(mask, torch.ones_like(mask)) else y * 2


def is_close(model: Model, y: Tensor, lengths: Tensor) -> Tensor:
    return y if lengths.double().allclose(torch.full((), 1.0).double(), atol=0.5) else y * 2


def is_of_other_shape(model: Model, y: Tensor, mask: Tensor) -> Tensor:
    return y if mask.equal(mask[1:]) else y * 2


def marks(model: Model, y: Tensor, lengths: Tensor) -> Tensor:
    return y[:, :1] * F.one_hot(lengths)[:, 1:]


def permutes(model: Model, y: Tensor) -> Tensor:
    times = torch.linspace(0, 1, 3)
    for before, after in itertools.pairwise(times):
        if after > before:
            y = y + (after - before).item() * y.tanh()
    return y.permute(*torch.arange(2).flip(0).tolist())


def distributes(model: Model, y: Tensor) -> Tensor:
    return torch.distributions.Normal(y, y.exp()).log_prob(torch.zeros_like(y)).mean()


ONES, LENGTHS = torch.ones(4, 3, dtype=torch.bool), torch.tensor([1, 3, 2, 2])
SOME = torch.tensor([[True, False, True]] * 3 + [[False, True, True]])
# function, its further argument, another one for which it goes another way or gives another size
DECIDES: list[tuple[Callable[..., Tensor], Tensor | None, Tensor | None]] = [
    (masked, ONES, SOME),
    (raises, ONES, SOME),
    (asserts, LENGTHS, LENGTHS + 1),
    (cuts, LENGTHS.clamp(max=2), LENGTHS),
    (hits, SOME, ONES),
    (selects, SOME, ONES),
    (finds, SOME, ONES),
    (finds_by_where, SOME[:, 1:], ONES),
    (finds_in_lists, SOME, ONES),
    (finds_places, SOME, ONES),
    (scales, torch.tensor([1, 2]), torch.tensor([2, 3])),
    (flags, None, None),
    (equals, ONES, SOME),
    (equals, SOME, ONES),
    (is_close, LENGTHS, torch.ones(4)),
    (is_of_other_shape, ONES, None),
    (marks, LENGTHS, LENGTHS + 1),
    (marks, LENGTHS, LENGTHS.clamp(max=2)),
    (marks, LENGTHS * 5, LENGTHS * 6),
    (permutes, None, None),
    (distributes, None, None),
]


def result(graph: Graph, model: nn.Module, args: tuple[Tensor, ...]) -> Any:
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    named = dict(zip(graph.arguments, args))
    inputs = {item.value.name: state.get(item.fqn, named.get(item.value.name)) for item in graph.inputs}
    outputs, _ = run(graph, {name: x for name, x in inputs.items() if x is not None})
    return outputs[0]


@pytest.mark.parametrize(("decide", "given", "other"), DECIDES, ids=lambda item: getattr(item, "__name__", ""))
def test_the_example_decides_and_is_compared(decide: Callable, given: Tensor | None, other: Tensor | None) -> None:
    model, more = Model(decide), () if given is None else (given,)
    graph = trace(skeleton(model), (X, *more), {})
    torch.testing.assert_close(result(graph, model, (X, *more)), model(X, *more))
    if other is not None and decide is not asserts:  # one device's assert is the check there
        with pytest.raises(AutoparError, match=r"test_guards.py.*example that was traced"):
            result(graph, model, (X, other))


def test_an_assertion_that_holds_for_all_batches_is_compared_by_its_condition() -> None:
    model = Model(asserts)
    graph = trace(skeleton(model), (X, LENGTHS), {})
    other = torch.tensor([1, 1, 2, 1])
    torch.testing.assert_close(result(graph, model, (X, other)), model(X, other))
    with pytest.raises(AutoparError, match=r"assert lengths\.max"):
        result(graph, model, (X, LENGTHS + 1))


def test_a_buffer_that_changes_is_seen() -> None:
    model = Model(flags)
    graph = trace(skeleton(model), (X,), {})
    model.flag.zero_()
    with pytest.raises(AutoparError, match=r"if model\.flag"):
        result(graph, model, (X,))


def test_constants_need_no_check() -> None:
    assert GUARDED not in {op.target for op in trace(skeleton(Model(permutes)), (X,), {}).ops}


@pytest.mark.parametrize(
    ("asks", "is_so"),
    [
        (lambda: torch.rand(1) > 0.0, True),  # peft's module dropout
        (lambda: torch.rand([]) < 0, False),  # layerdrop of transformers
        (lambda: torch.rand(1).item() < 0.0, False),
        (lambda: torch.rand(1, dtype=torch.float64)[0] >= 1.0, False),
        (lambda: (torch.rand(2, 3) < 1).all(), True),
        (lambda: not torch.rand(1) >= 1, True),
        (lambda: torch.rand(1).detach().item() > -1, True),
    ],
)
def test_what_all_draws_answer_alike_is_decided(asks: Callable[[], Any], is_so: bool) -> None:
    """A draw that is exactly 0, one of 2 ** 24, is taken as one above."""
    model = Model(lambda model, y: y * 2 if asks() else y * 3)
    graph = trace(skeleton(model), (X,), {})
    assert GUARDED not in {op.target for op in graph.ops}
    torch.testing.assert_close(result(graph, model, (X,)), model.linear(X) * (2 if is_so else 3))


@pytest.mark.parametrize(
    "asks",
    [
        lambda: torch.rand(1) > 0.5,
        lambda: torch.rand(1).item() > 0.5,
        lambda: torch.rand(1).mul_(2) > 1,
        lambda: (torch.rand(1) > 0).logical_not_(),
        lambda: torch.rand(1, dtype=torch.bfloat16) > 0,
        lambda: (torch.rand(0) > 0).any(),
        lambda: torch.rand(1) * 2 < 1,
        lambda: torch.randn(1) > 0,
        lambda: torch.rand(1).sub(0.5).item() > 0,
        lambda: torch.rand(1).item() * 2 < 1,
    ],
)
def test_what_draws_answer_differently_is_refused(asks: Callable[[], Any]) -> None:
    with pytest.raises(TraceError, match="branches on the values"):
        trace(skeleton(Model(lambda model, y: y * 2 if asks() else y * 3)), (X,), {})


def test_branches_on_what_parameters_give_are_refused() -> None:
    with pytest.raises(TraceError, match="branches on the values"):
        trace(skeleton(Model(lambda model, y: y if y.sum() > 0 else -y)), (X,), {})


def test_what_is_unknown_makes_unknown_what_it_is_written_to() -> None:
    def writes(model: Model, y: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        view = mask[:2]
        view.logical_and_(y[:2] > 0)
        return y if mask.all() else -y

    with pytest.raises(TraceError, match="branches on the values"):
        trace(skeleton(Model(writes)), (X, ONES), {})


def test_memory_that_is_used_again_is_known_anew() -> None:
    def decide(model: Model, y: Tensor) -> Tensor:
        for _ in range(40):
            z = torch.zeros(3)
            z[0] = y.sum()
            y = y + z
            del z  # its memory is the next one's
            k = torch.arange(3)
            y = y * 2 if (k - k.flip(0)).sum() == 0 else y
        return y

    assert sum(op.target == "aten.mul.Tensor" for op in trace(Model(decide), (X,), {}).ops) == 40


def test_a_plan_is_made_without_values() -> None:
    model = Model(lambda model, y, mask: F.cross_entropy(y[mask[:, 0]], mask[:3, 0].long()))
    assert autopar.plan(model, "dp=2,tp=1", cluster="cpu", args=(X, SOME)).graph.ops


def test_memory_that_was_not_written_is_not_known() -> None:
    """What one_hot of router's choices has inside."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            chosen = nn.functional.one_hot(self.router(x).argmax(-1), 3)
            return x * chosen[:, :1] if chosen.sum() > 0 else x

    with pytest.raises(TraceError, match="branches on the values"):
        trace(Routed(), (torch.ones(2, 4),), {})
