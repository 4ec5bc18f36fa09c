"""A forward that is recorded gives the graph that its export gives, or is seen to differ and is exported."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import TraceError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.print_graph import fingerprint
from autopar.ir.sizes.same_names import is_of_other_sizes, named_like
from autopar.ir.trace_with_loss import recorded, traced
from tests import zoo


def check(model: nn.Module, first: tuple, others: list[tuple], loss: Any = None, **kwargs: Any) -> None:
    """The recorded graph of each call is that of its export."""
    known = traced(model, loss, first, kwargs)
    for args in (first, *others):
        assert fingerprint(of_sizes(model, known, args, loss, **kwargs)) == fingerprint(
            traced(model, loss, args, kwargs)
        )


def of_sizes(model: nn.Module, known: Graph, args: tuple, loss: Any = None, **kwargs: Any) -> Graph:
    graph = named_like(recorded(model, loss, args, kwargs), known)
    assert is_of_other_sizes(graph, known)
    assert [(op.name, op.module, op.line) for op in graph.ops] == [(op.name, op.module, op.line) for op in known.ops]
    return graph


def meta(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="meta")


@pytest.mark.parametrize("name", ["mlp", "vgg13", "resnet", "gpt2", "llama", "bert", "vit"])
@pytest.mark.parametrize("is_training", [False, True])
def test_batches_of_models(name: str, is_training: bool) -> None:
    case = zoo.build(name, dropout=0.0 if name == "resnet" else 0.1)
    model = skeleton(case.model).train(is_training)

    def rows(count: int) -> tuple[tuple, dict]:
        take: Callable[[Any], Any] = lambda x: x[:count].to("meta") if isinstance(x, torch.Tensor) else x  # noqa: E731
        return tuple(map(take, case.args)), {name: take(x) for name, x in case.kwargs.items()}

    args, kwargs = rows(8)
    known = traced(model, None, args, kwargs)
    for count in (8, 6, 3):
        args, kwargs = rows(count)
        graph = of_sizes(model, known, args, **kwargs)
        assert fingerprint(graph) == fingerprint(traced(model, None, args, kwargs))


class Everything(nn.Module):
    """Writes in place, makes tensors of sizes, has regions without gradient, updates a buffer and takes views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        length = x.shape[1]
        with torch.no_grad():
            self.seen.add_(x.shape[0])
            mean = x.mean(1, keepdim=True)
        hidden = self.linear(x - mean)
        hidden[:, 0] += torch.tensor([1.0, 2.0]).sum() + torch.scalar_tensor(length)
        hidden = F.relu_(self.norm(hidden.transpose(1, 2)).transpose(1, 2)).mul_(scale)
        positions = torch.arange(length, dtype=x.dtype) / math.sqrt(length)
        mask = torch.full((length, length), -math.inf).triu_(1)
        first, rest = hidden.split([1, length - 1], dim=1)
        scores = (first @ rest.transpose(1, 2)).squeeze(1) + positions[1:] + mask[0, :-1].clamp(min=-1.0)
        return {"scores": scores.softmax(-1), "length": length, "top": scores.max(1)}


def test_writes_constants_and_views() -> None:
    check(skeleton(Everything()), (meta(4, 6, 8),), [(meta(3, 9, 8),)], scale=0.5)
    check(skeleton(Everything().eval()), (meta(4, 6, 8),), [(meta(2, 7, 8),)])


def test_numbers_that_follow_from_sizes() -> None:
    """What is made of numbers has the numbers of its own sizes."""
    model = skeleton(Everything())
    known = traced(model, None, (meta(4, 6, 8),), {})
    graph = of_sizes(model, known, (meta(5, 9, 8),))
    given = {x for op in (*graph.ops, *graph.constant_ops) for x in op.args if isinstance(x, (int, float))}
    assert 9 in given and 5 in given and not {6, 4} & given
    (length,) = (x for x in graph.outputs if isinstance(x, int))
    assert length == 9


def test_a_loss_function() -> None:
    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    def call(length: int) -> tuple:
        return meta(4, length, 8), torch.zeros(4, length, dtype=torch.int64, device="meta")

    check(skeleton(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))), call(6), [call(9)], loss)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if x.shape[1] > 8 else x + 2
        return x.sin() if x.shape[0] > 8 else x.cos()


class InOtherOrder(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x * 2, x.sin()
        return a - b if x.shape[1] > 8 else b - a


class Rounds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float64 if x.shape[1] > 8 else torch.float32) * 2


class NoGradient(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(x.shape[1] <= 8):
            return x * 2


class Reduces(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=x.shape[1] > 8).sum()


@pytest.mark.parametrize("model", [Branches(), InOtherOrder(), Rounds(), NoGradient(), Reduces()], ids=str)
def test_what_a_model_decides_by_sizes_is_seen(model: nn.Module) -> None:
    x = meta(4, 6).requires_grad_()
    known = traced(model, None, (x,), {})
    assert is_of_other_sizes(named_like(recorded(model, None, (meta(4, 7).requires_grad_(),), {}), known), known)
    graph = recorded(model, None, (meta(4, 9).requires_grad_(),), {})
    assert not is_of_other_sizes(named_like(graph, known), known)


class AsksForDevice(nn.Module):
    """Has other numbers where there are no contents."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if x.device.type == "cpu" else 3.0
        shift = 5 if x.is_meta or not x.is_cpu else 7
        table = torch.tensor([1.0, 2.0, x.shape[1]], device=x.device)
        x = self.weight + x
        return (x * scale + shift).to(x.device) * table.sum() + torch.ones(x.shape[1], device=x.device)


def test_what_a_model_decides_by_device() -> None:
    model = skeleton(AsksForDevice())
    check(model, (meta(4, 6),), [(meta(3, 9),)])
    graph = recorded(model, None, (meta(3, 9),), {})
    numbers = {x for op in graph.ops for x in op.args if isinstance(x, (int, float))}
    assert {2.0, 7} <= numbers and not {3.0, 5} & numbers
    (table,) = (x for x in graph.constants.values() if x.shape == (3,))
    assert table.tolist() == [1.0, 2.0, 9.0]


class ReadsContents(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] < 8 or bool(x.sum() > 0) else x


class Keeps(nn.Module):
    """Adds to an attribute that the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            x = x if self.last is None else x + self.last
            self.last = x.mean(0)
        return x * 2


@pytest.mark.parametrize("model", [ReadsContents(), Keeps()], ids=str)
def test_what_an_export_refuses_is_not_recorded(model: nn.Module) -> None:
    recorded(model, None, (meta(4, 6),), {})
    for how in (recorded, traced):
        with pytest.raises(TraceError):
            how(model, None, (meta(8, 6),), {})


def test_autocast_is_exported() -> None:
    with torch.autocast("cpu"), pytest.raises(TraceError, match="autocast"):
        recorded(skeleton(nn.Linear(8, 8)), None, (meta(4, 8),), {})


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x)


def test_autocast_inside_is_seen() -> None:
    model = skeleton(Casts())
    known = traced(model, None, (meta(4, 8),), {})
    assert not is_of_other_sizes(named_like(recorded(model, None, (meta(6, 8),), {}), known), known)
