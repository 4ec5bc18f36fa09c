"""A forward that asks for other ranks is told that it is alone; a collective in it, which would count each sum once for
each rank, is refused by name.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradient
from torch import nn
from torch.distributed import get_world_size
from torch.distributed._functional_collectives import all_reduce

from autopar.errors import TraceError
from autopar.ir.function_ops import is_function
from autopar.ir.functions.function_body import body_of
from autopar.ir.trace import trace


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Counted(nn.Linear):
    """Statistics that a library sums over ranks by itself, as VQ-VAEs do with their codebooks."""

    def __init__(self, exchange: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__(4, 4)
        self.exchange = exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = super().forward(x).sum(0)
        found = self.exchange(total)
        return total if found is None else found


def gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def broadcast(x: torch.Tensor) -> torch.Tensor:
    copy = x.detach()
    handle = dist.broadcast(copy.data, 0, async_op=True)
    assert handle is not None
    handle.wait()
    return x - copy


def counted(x: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([x.shape[0]])
    dist.all_reduce(rows)
    return x / rows


def objects(x: torch.Tensor) -> torch.Tensor:
    found: list[Any] = [None]
    dist.all_gather_object(found, x.shape[0])
    return x * found[0]


class SummedBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


class Asking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * get_world_size()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def guarded(x: torch.Tensor) -> torch.Tensor:
    if dist.is_available() and dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x)
    return x * (dist.get_rank() + 1) / get_world_size()


@pytest.mark.parametrize(
    "exchange",
    [
        *(dist.all_reduce, lambda x: all_reduce(x, "sum", dist.group.WORLD), gathered, with_gradient.all_reduce),
        *(broadcast, counted, objects),
    ],
    ids=["sum", "new", "list", "gradient", "broadcast", "counted", "objects"],
)
def test_a_collective_in_a_forward_is_refused(exchange: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    with pytest.raises(TraceError, match=r"test_collectives.py:\d+.*forward calls a collective"):
        trace(Counted(exchange), (torch.ones(2, 4),), {})


def test_a_collective_in_a_backward_is_refused() -> None:
    op = next(op for op in trace(Counted(SummedBackwards.apply), (torch.ones(2, 4),), {}).ops if is_function(op))
    with pytest.raises(TraceError, match=r"test_collectives.py:\d+.*forward calls a collective"):
        body_of(op)


def test_a_function_of_its_own_that_asks_for_ranks_is_refused() -> None:
    with pytest.raises(TraceError, match=r"test_collectives.py:\d+.*get_world_size in a custom .*ask in forward"):
        trace(Counted(Asking.apply), (torch.ones(2, 4),), {})


def test_a_forward_that_asks_for_ranks_is_alone() -> None:
    x = torch.ones(2, 4)
    graph = trace(Counted(guarded), (x,), {})
    dist.destroy_process_group()
    alone = trace(Counted(lambda total: total * 1 / 1), (x,), {})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert [op.target for op in graph.ops] == [op.target for op in alone.ops]
    assert dist.is_initialized() and dist.get_world_size() == 1
