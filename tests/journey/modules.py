"""Kinds of modules, and what their forwards do."""

import math

import torch
from torch import nn

from tests.journey.case import Numbers, Run, case
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


@case(peers=False)
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
