"""Models that read or write their own rows of a batch in microbatches, beside the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import MicrobatchError
from autopar.ir.trace import trace
from autopar.sbp.microbatch.microbatch_graph import microbatched
from tests.sbp.microbatch.test_microbatch_graph import check

Tensor = torch.Tensor
PLACES = torch.tensor([[0, 5], [1, 2], [3, 3], [4, -1], [2, 0], [5, 1], [0, 1], [3, 4]])


class Own(nn.Module):
    """A layer on [batch, 6, 8], and what `function` makes of it, of the number and of places of each sample."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(8, 8), function
        self.attention, self.queries = nn.MultiheadAttention(8, 2, batch_first=True), nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.function(self, self.layer(x), places)


def rows(y: Tensor) -> Tensor:
    return torch.arange(len(y))[:, None]


def written(model: Own, y: Tensor, places: Tensor) -> Tensor:
    target = torch.full(y.shape[:2], 2)
    target[rows(y), places] = places % 6
    kept = torch.zeros_like(y)
    kept[rows(y), places % 2 + torch.tensor([0, 3])] = y[:, :2].tanh()
    return F.cross_entropy(y.transpose(1, 2), target) + (kept * y).mean()


def added(model: Own, y: Tensor, places: Tensor) -> Tensor:
    counts = y.new_zeros(y.shape[:2]).index_put((rows(y), places), y[:, :2, 0], accumulate=True)
    return (counts * y[..., 1]).mean()


def numbered_twice(model: Own, y: Tensor, places: Tensor) -> Tensor:
    """Own entries of two dims at a time: read, written, and one of them the same for all rows."""
    split = y.unflatten(2, (4, 2))
    read = split[rows(y), places, places % 2]
    put = torch.zeros_like(split)
    put[rows(y), places, torch.tensor([1, -2])] = split[:, 1:3, 0].tanh()
    last = y[torch.arange(len(y)), places[:, 0], places[:, 1]]
    return read.tanh().mean() + (put * split).mean() + last.exp().mean()


def asked(model: Own, y: Tensor, places: Tensor) -> Tensor:
    found, weights = model.attention(model.queries.expand(len(y), -1, -1), y, y)
    return found.square().mean() + weights.square().sum()


def stepped(model: Own, y: Tensor, places: Tensor) -> Tensor:
    steps = [torch.stack([h, h.tanh()]) for h in y.unbind(1)]
    return torch.cat(steps, 0).flatten(0, 1).square().mean()


def counted(model: Own, y: Tensor, places: Tensor) -> Tensor:
    longest, spread = places.max(), places.to(y.dtype).std()
    return ((y.mean(-1) * (rows(y) < longest)) / spread).square().mean() + y.mean() / places.abs().amax().clamp(min=1)


def checked(model: Own, y: Tensor, places: Tensor) -> Tensor:
    return F.gaussian_nll_loss(y[..., 0], y[..., 1].detach(), F.softplus(y[..., 2]))


OWN = {
    "several columns of each row": lambda m, y, places: y[rows(y), places].square().mean(),
    "rows spelled out": lambda m, y, places: y[rows(y).expand(-1, 2), places].tanh().mean(),
    "written": written,
    "added": added,
    "numbered twice": numbered_twice,
    "asked by parameters": asked,
    "joined steps": stepped,
    "numbers of the batch": counted,
    "a branch": checked,
    "zeros like a sample": lambda m, y, places: (y + torch.zeros_like(y[0])).square().mean(),
}


@pytest.mark.parametrize("name", OWN)
def test_own_rows(name: str) -> None:
    check(Own(OWN[name]).double(), (torch.randn(8, 6, 8).double(), PLACES), {}, counts=(2, 4))


def test_a_branch_that_some_microbatches_cannot_see_is_refused() -> None:
    def some(model: Own, y: Tensor, places: Tensor) -> Tensor:
        if not (y > -100).any():
            raise ValueError("nothing there")
        return y.mean()

    with pytest.raises(MicrobatchError, match="any"):
        microbatched(trace(Own(some), (torch.randn(8, 6, 8), PLACES), {}), 2)
