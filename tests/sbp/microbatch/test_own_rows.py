"""Models that read or write their own rows of a batch in microbatches, beside the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import AutoparError, MicrobatchError
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
    joined = torch.cat(steps, 0).flatten(0, 1)
    return joined.square().mean() + torch.cat([y[:, 0], joined, y[:, 1]]).tanh().square().mean()


def counted(model: Own, y: Tensor, places: Tensor) -> Tensor:
    longest, spread = places.max(), places.to(y.dtype).std()
    return ((y.mean(-1) * (rows(y) < longest)) / spread).square().mean() + y.mean() / places.abs().amax().clamp(min=1)


def checked(model: Own, y: Tensor, places: Tensor) -> Tensor:
    return F.gaussian_nll_loss(y[..., 0], y[..., 1].detach(), F.softplus(y[..., 2]))


def neighbours(model: Own, y: Tensor, places: Tensor) -> Tensor:
    """Rows of each sample that are near to it, by numbers that count through all samples."""
    near = torch.cdist(y, y).topk(3, dim=-1, largest=False)[1]
    flat = (near + torch.arange(len(y)).view(-1, 1, 1) * y.shape[1]).view(-1)
    around = y.reshape(-1, y.shape[2])[flat].view(*near.shape, -1)
    most = y.flatten(0, 1)[rows(y) * 6 + y.argmax(1)]
    return (around - y.unsqueeze(2)).tanh().square().mean() + most.exp().mean()


def beams(model: Own, y: Tensor, places: Tensor) -> Tensor:
    """A beam search: the best of the words of all beams, each of which goes on from the beam that it was of."""
    state, offset, scores = y[:, :3], torch.arange(len(y))[:, None] * 3, y[:, :3, 0]
    for _ in range(2):
        totals = scores[..., None] + model.layer(state).log_softmax(-1)
        scores, best = totals.flatten(1).topk(3, -1)
        of, word = torch.div(best, 8, rounding_mode="floor"), best % 8
        state = state.reshape(-1, 8).index_select(0, (of + offset).view(-1)).view_as(state) + F.one_hot(word, 8)
        state = state + state.flatten(0, 1)[best // 8 + offset].sin()
    return (scores * state.square().mean(-1)).mean()


def matched(model: Own, y: Tensor, places: Tensor) -> Tensor:
    """Targets at the places that a model finds, as detectors have them."""
    target = torch.full(y.shape[:2], 2)
    target[rows(y), y[..., 0].topk(2)[1]] = places % 6
    return F.cross_entropy(y.transpose(1, 2), target)


OWN = {
    "several columns of each row": lambda m, y, places: y[rows(y), places].square().mean(),
    "rows spelled out": lambda m, y, places: y[rows(y).expand(-1, 2), places].tanh().mean(),
    "written": written,
    "added": added,
    "numbered twice": numbered_twice,
    "asked by parameters": asked,
    "joined steps": stepped,
    "targets of a matching": matched,
    "places counted through all": neighbours,
    "beams": beams,
    "numbers of the batch": counted,
    "a branch": checked,
    "zeros like a sample": lambda m, y, places: (y + torch.zeros_like(y[0])).square().mean(),
}


@pytest.mark.parametrize("name", OWN)
def test_own_rows(name: str) -> None:
    check(Own(OWN[name]).double(), (torch.randn(8, 6, 8).double(), PLACES), {}, counts=(2, 4))


@pytest.mark.parametrize(
    "places_of",
    [
        lambda y, places: places,  # of which one is -1
        lambda y, places: y.flatten(1).argmax(1, keepdim=True) // 4,  # of which one may be 6
        lambda y, places: y.argmax(1) // -1,
    ],
)
def test_places_that_may_be_of_another_sample_are_refused(places_of) -> None:
    def next_sample(model: Own, y: Tensor, places: Tensor) -> Tensor:
        return y.flatten(0, 1)[rows(y) * 6 + places_of(y, places)].mean()

    with pytest.raises(MicrobatchError, match=r"index\.Tensor"):
        microbatched(trace(Own(next_sample), (torch.randn(8, 6, 8), PLACES), {}), 2)


def test_targets_that_parameters_ignore_end_the_step() -> None:
    def loss(model: Own, y: Tensor, places: Tensor) -> Tensor:
        return F.cross_entropy(y.transpose(1, 2), y.argmax(2).masked_fill(y[..., 0] > 0, -100))

    with pytest.raises(AutoparError, match=r"test_own_rows.*targets that are ignored"):
        check(Own(loss).double(), (torch.randn(8, 6, 8).double(), PLACES), {}, counts=(2,))


def test_a_branch_that_some_microbatches_cannot_see_is_refused() -> None:
    def some(model: Own, y: Tensor, places: Tensor) -> Tensor:
        if not (y > -100).any():
            raise ValueError("nothing there")
        return y.mean()

    with pytest.raises(MicrobatchError, match="any"):
        microbatched(trace(Own(some), (torch.randn(8, 6, 8), PLACES), {}), 2)
