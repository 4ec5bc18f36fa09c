"""What forwards write: buffers, and tensors given to ops."""

import math

import torch
from torch import nn

from tests.journey.case import PP, Numbers, Run, case
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch


def stepped(run: Run, block: type[nn.Module]) -> Numbers:
    """Loss, gradients and buffers after a step of a stack of such blocks."""
    args = batch()
    model = run.compile(Stack(block), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model) | run.buffers(model)


class Positions(Block):
    """Adds sines and cosines of the position, written with out=."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(BATCH, WIDTH)
        angles = torch.arange(len(table))[:, None] * torch.exp(torch.arange(0, WIDTH, 2) * -math.log(1e4) / WIDTH)
        torch.sin(angles, out=table[:, 0::2])
        torch.cos(angles, out=table[:, 1::2])
        return super().forward(x + table[: len(x)])


@case()
def sines_written_with_out(run: Run) -> Numbers:
    """torch.sin(x, out=table[:, 0::2]): a table of positions"""
    return stepped(run, Positions)


class Mixed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mixed, values, places = torch.empty_like(x), torch.empty(len(x)), torch.empty(len(x), dtype=torch.long)
            torch.add(x, x.flip(-1), alpha=0.5, out=mixed)
            torch.max(mixed, 1, out=(values, places))
        return super().forward(x + mixed * values[:, None] + places[:, None])


@case()
def sums_written_with_out(run: Run) -> Numbers:
    """torch.add(x, y, out=c) and torch.max(x, 1, out=(values, places)) without gradient"""
    return stepped(run, Mixed)


class Detached(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.up(x).tanh()
        state.detach_()
        return x + self.down(state)


@case()
def detached_in_place(run: Run) -> Numbers:
    """state.detach_() in forward"""
    return stepped(run, Detached)


class Spiking(Block):
    """Its membrane is as large as the batch, and starts from zero in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("membrane", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.membrane = torch.zeros_like(x)
        for _ in range(2):
            self.membrane = 0.9 * self.membrane + x.detach()
        return super().forward(x + self.membrane)


@case(refused=r"writes.py:\d+: .*replaces buffer blocks.0.membrane, torch.float32 of shape \[1\].*\[8, 8\]")
def buffer_replaced_by_one_of_another_shape(run: Run) -> Numbers:
    """self.membrane = torch.zeros_like(x): a buffer replaced by one of another shape"""
    return stepped(run, Spiking)


class Lazy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = x if self.state is None else 0.5 * self.state + x
        return super().forward(self.state)


@case(refused=r"writes.py:\d+: .*replaces buffer blocks.0.state, None, by")
def buffer_that_is_none_at_first(run: Run) -> Numbers:
    """register_buffer("state", None), set in forward"""
    return stepped(run, Lazy)


class Averaging(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


@case(refused={PP: "cannot be run on microbatches"})
def buffer_replaced_by_one_of_the_same_shape(run: Run) -> Numbers:
    """self.mean = 0.9 * self.mean + ...: a buffer replaced by one of the same shape"""
    args = batch()
    model = run.compile(Stack(Averaging), args=args)
    losses = {f"loss {number}": run.step(model, *args) for number in range(3)}
    return losses | run.gradients(model) | run.buffers(model)


class Recurrent(Block):
    """Its state is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.state = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x if self.state is None else 0.5 * self.state + x
        self.state = state.detach()
        return super().forward(state)


@case(refused=r"writes.py:\d+: the forward keeps state in attribute blocks.0.state.*register it as a buffer")
def state_in_a_plain_attribute(run: Run) -> Numbers:
    """self.state = ..., a tensor that is no buffer and that the next call reads"""
    return stepped(run, Recurrent)


class Counted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x / self.calls)


@case(refused=r"writes.py:\d+: the forward keeps state in attribute blocks.0.calls", peers=False)
def calls_counted_in_a_number(run: Run) -> Numbers:
    """self.calls += 1, a number by which forward divides"""
    return stepped(run, Counted)


class CountedByClass(Block):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x / self.calls)


@case(refused=r"writes.py:\d+: the forward keeps state in attribute blocks.0.calls", peers=False)
def calls_counted_in_a_number_of_the_class(run: Run) -> Numbers:
    """self.calls += 1 of `calls = 0` in the class"""
    return stepped(run, CountedByClass)


class Remembering(Block):
    def __init__(self) -> None:
        super().__init__()
        self.history = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(x.detach())
        return super().forward(torch.stack(self.history).sum(0))


@case(refused=r"writes.py:\d+: the forward keeps state in attribute blocks.0.history", peers=False)
def state_in_a_list(run: Run) -> Numbers:
    """self.history.append(x), summed in each call"""
    return stepped(run, Remembering)


class Collecting(Remembering):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(x.detach().mean())
        return Block.forward(self, x)


@case(
    refused=r"writes.py:\d+: the forward keeps state in .*blocks.0.history: it puts tensors into this list", peers=False
)
def list_that_nobody_reads(run: Run) -> Numbers:
    """self.history.append(x.mean()), which forward itself never reads"""
    return stepped(run, Collecting)


class RememberingByClass(Block):
    history: list = []  # noqa: RUF012, which is what people do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(x.detach())
        return super().forward(self.history[0])


@case(refused=r"writes.py:\d+: the forward keeps state in attribute blocks.0.history", peers=False)
def state_in_a_list_of_the_class(run: Run) -> Numbers:
    """self.history.append(x) of a list of the class, which all blocks share"""
    return stepped(run, RememberingByClass)


class Cached(Block):
    """Makes a table at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or len(self.table) != len(x):
            self.table = torch.arange(len(x))[:, None] / len(x)
        self.last = x
        return super().forward(x + self.table)


@case(peers=False)
def table_made_at_the_first_call(run: Run) -> Numbers:
    """self.table = ... where it is None, and self.last = x"""
    args = batch()
    model = run.compile(Stack(Cached), args=args)
    return {f"loss {number}": run.step(model, *args) for number in range(2)} | run.gradients(model)
