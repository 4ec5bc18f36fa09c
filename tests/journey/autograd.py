"""What people do with autograd: own backwards, hooks on gradients, gradients of gradients."""

import torch

from tests.journey.case import Numbers, Run, case
from tests.journey.stack import Block, Stack, batch


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class ReversedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Reversed.apply(x))


@case(wrong="the forward of the function is differentiated")
def gradient_reversal(run: Run) -> Numbers:
    """A custom autograd.Function that reverses the gradient (domain adaptation)"""
    args = batch()
    model = run.compile(Stack(ReversedBlock), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)
