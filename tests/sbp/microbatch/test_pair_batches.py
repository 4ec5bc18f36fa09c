"""Batches of pairs in microbatches give the numbers of the whole batch, or are refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import MicrobatchError
from autopar.ir.trace import trace
from autopar.sbp.microbatch.microbatch_graph import microbatch_counts, microbatched
from tests.sbp.microbatch.test_microbatch_graph import check

Tensor = torch.Tensor


class Scored(nn.Module):
    """Sequences of several arguments through one model, whose scores `loss` takes apart."""

    def __init__(self, loss: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.loss = nn.Embedding(16, 8), loss
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList((layer, nn.Linear(8, 16)))

    def forward(self, *given: Tensor) -> Tensor:
        ids = torch.cat(given)
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        rows = F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return self.loss(-rows.view(ids.shape[0], -1).sum(-1), given[0].shape[0])


def preference(better: Tensor, worse: Tensor) -> Tensor:
    return -F.logsigmoid(0.1 * (better - worse)).mean()


LOSSES = {
    "chunk": lambda scores, n: preference(*scores.chunk(2)),
    "slices": lambda scores, n: preference(scores[:n], scores[n:]),
    "view": lambda scores, n: preference(*scores.view(2, n)),
    "neighbours, half of them of each": lambda scores, n: preference(*scores.view(n, 2).unbind(1)),
    "numbered": lambda scores, n: (scores * torch.arange(2 * n)).mean(),
    "all of them too": lambda scores, n: preference(*scores.chunk(2)) + scores.square().mean(),
}


def batch(num: int = 2) -> tuple[Tensor, ...]:
    return tuple(torch.randint(16, (8, 6)) for _ in range(num))


@pytest.mark.parametrize("how", LOSSES)
def test_pairs_are_those_of_the_whole_batch(how: str) -> None:
    check(Scored(LOSSES[how]).double(), batch(), {}, counts=(2, 4))


def test_three_of_a_kind_are_too() -> None:
    model = Scored(lambda scores, n: (scores[:n] - scores[n : 2 * n] * scores[2 * n :]).square().mean())
    check(model.double(), batch(3), {}, counts=(2, 8))


class Repeated(nn.Module):
    """A layer on the rows of two arguments, each several times, beside others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.layer(x.repeat(3, 1, 1)).tanh() * torch.cat([y, y * 2, y.exp()])
        pairs = torch.cat([x, y]).repeat(2, 1, 1)
        pooled = x[:, 0].repeat(2, 1, 1) * y[:, 0].sin()  # of the rows as they are
        return made.square().mean() + (self.layer(pairs) * torch.cat([y, x, x * y, x + y])).mean() + pooled.mean()


def test_rows_that_are_repeated_are_those_of_the_whole_batch() -> None:
    check(Repeated().double(), (torch.randn(8, 3, 4).double(), torch.randn(8, 3, 4).double()), {}, counts=(2, 4))


@pytest.mark.parametrize(
    "loss",
    [
        lambda scores, n: scores,  # the rows of all microbatches in their order are others
        lambda scores, n: preference(scores[: n // 2], scores[n // 2 : n]),
        lambda scores, n: scores.cumsum(0).mean(),
    ],
)
def test_what_reads_rows_by_their_place_is_refused(loss: Callable[[Tensor, int], Tensor]) -> None:
    graph = trace(Scored(loss).double(), batch(), {})
    assert microbatch_counts(graph) == (1,)
    with pytest.raises(MicrobatchError, match=r"use one microbatch|cannot be cut in 2"):
        microbatched(graph, 2)


def test_zeros_for_each_of_a_pair_are_cut_as_the_pair() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, better: Tensor, worse: Tensor) -> Tensor:
            scores = self.head(self.rnn(torch.cat([better, worse]))[0][:, -1])
            return preference(*scores.chunk(2))

    check(Recurrent().double(), (torch.randn(8, 3, 6).double(), torch.randn(8, 3, 6).double()), {}, counts=(2, 4))
