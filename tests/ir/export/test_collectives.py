"""A collective in a forward, which would count each sum once for each rank, is refused by name."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradient
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from autopar.errors import TraceError
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


@pytest.mark.parametrize(
    "exchange",
    [dist.all_reduce, lambda x: all_reduce(x, "sum", dist.group.WORLD), gathered, with_gradient.all_reduce],
    ids=["sum", "new", "list", "gradient"],
)
def test_a_collective_in_a_forward_is_refused(exchange: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    with pytest.raises(TraceError, match=r"test_collectives.py:\d+.*forward calls a collective"):
        trace(Counted(exchange), (torch.ones(2, 4),), {})
