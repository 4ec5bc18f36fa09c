"""Batches of other sizes with microbatches and stages."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.journey.case import DP, PP, Numbers, Run, case
from tests.journey.stack import WIDTH, Block, Stack, batch

CLASSES = 5


def steps(run: Run, model: nn.Module, sizes: tuple[int, ...], **options: object) -> Numbers:
    """Losses and parameters of steps with batches of these sizes, the first of which the model is compiled for."""
    batches = [tuple(x[:rows] for x in _long(max(sizes))) for rows in sizes]
    model, found = run.compile(model, args=batches[0], **options), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, args in enumerate(batches):
        optimizer.zero_grad()
        found[f"loss {number}, {len(args[0])} rows"] = run.step(model, *args)
        optimizer.step()
    return found | run.parameters(model)


def _long(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


@case()
def last_batch_of_any_size(run: Run) -> Numbers:
    """Batches of eight rows, then of five, one, six and eight: drop_last=False"""
    return steps(run, Stack(), (8, 5, 1, 6, 8))


@case()
def larger_batch(run: Run) -> Numbers:
    """Batches of four rows, then one of eighteen"""
    return steps(run, Stack(), (4, 18))


@case(on=(DP,))
def last_batch_in_microbatches(run: Run) -> Numbers:
    """num_microbatches=4 without stages, and a last batch of five rows"""

    class Trained(Run):
        def compile(self, model: nn.Module, **options: object) -> nn.Module:
            return run.compile(model, num_microbatches=4, **options)

        def step(self, model: nn.Module, *args: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return model.train_step(*args) if hasattr(model, "train_step") else run.step(model, *args)

        def whole(self, x: torch.Tensor) -> torch.Tensor:
            return run.whole(x)

    return steps(Trained() if run.setting != "one device" else run, Stack(), (8, 5, 8))


class Words(nn.Module):
    """A mean over the words that are not ignored, which lie unevenly in the rows, and a weight for each class."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(CLASSES, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)


def _sentences(rows: int, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    words, labels = torch.randint(CLASSES, (rows, length)), torch.randint(CLASSES, (rows, length))
    return words, labels.masked_fill(torch.rand(rows, length) < 0.4, -100)


def _of_words(
    run: Run, make: Callable[[], nn.Module], sizes: tuple[int, ...], lengths: tuple[int, ...] = ()
) -> Numbers:
    batches = [_sentences(rows, length) for rows, length in zip(sizes, lengths or (6,) * len(sizes))]
    model, found = run.compile(make(), args=batches[0]), {}
    for number, args in enumerate(batches):
        found[f"loss {number}"] = run.step(model, *args)
    with torch.no_grad():
        alone = model.train_step(*batches[1]) if run.setting == PP else model(*batches[1])
    return found | {"evaluated": alone} | run.gradients(model)


@case()
def last_batch_of_words(run: Run) -> Numbers:
    """Token labels of which some are ignored, in batches of eight rows, three and one"""
    return _of_words(run, Words, (8, 3, 1))


@case()
def sequences_of_other_lengths(run: Run) -> Numbers:
    """Sequences of 6 tokens, then of 12, 7, 3, 16 and one, and a last batch of three rows of 9"""
    return _of_words(run, Words, (8, 8, 8, 8, 8, 8, 3), (6, 12, 7, 3, 16, 1, 9))


@case()
def last_batch_of_tied_words(run: Run) -> Numbers:
    """The same with one weight for the embedding and the head"""
    return _of_words(run, lambda: Words(is_tied=True), (8, 5, 1))


@case(on=(PP,), peers=False)
def last_batch_in_several_stages_a_rank(run: Run) -> Numbers:
    """The interleaved schedule, two stages a rank, and a last batch of five rows and of one"""
    options = {} if run.setting == "one device" else {"schedule": "interleaved", "num_microbatches": 4}
    return steps(run, Stack(depth=6), (8, 5, 1), **options)


@case(on=(PP,), peers=False)
def last_batch_of_zero_bubble(run: Run) -> Numbers:
    """The zero-bubble schedule, and a last batch of six rows and of one"""
    options = {} if run.setting == "one device" else {"schedule": "zero-bubble", "num_microbatches": 4}
    return steps(run, Stack(depth=6), (8, 6, 1), **options)


class Summed(Stack):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.body(x) - y).square().sum()


@case(on=(PP,), peers=False)
def empty_batch_in_stages(run: Run) -> Numbers:
    """A batch without rows, with stages: the sum of squares is 0, and nothing is added to the gradients"""
    args = batch()
    model = run.compile(Summed(), args=args)
    first = run.step(model, *args)
    return {"first": first, "empty": run.step(model, *(x[:0] for x in args))} | run.gradients(model)
