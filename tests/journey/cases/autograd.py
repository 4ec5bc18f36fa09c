"""What people do with autograd: own backwards, hooks on gradients, gradients of gradients."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import autopar
from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.stack import WIDTH, Block, Stack, batch

UNSPLIT = {PP: "there is no rule for splitting it, and as its ops it splits only as.*autopar.splits"}


def stepped(run: Run, block: type[nn.Module]) -> Numbers:
    """Loss and gradients of a step of a stack of such blocks."""
    args = batch()
    model = run.compile(Stack(block), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None


class ReversedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Reversed.apply(x, 0.5))


@case()
def gradient_reversal(run: Run) -> Numbers:
    """A custom autograd.Function that reverses the gradient (domain adaptation)"""
    return stepped(run, ReversedBlock)


@autopar.splits("elementwise")
class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


rounded = Rounded.apply


class RoundedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(rounded(self.up(x).tanh()))


@case()
def straight_through_estimator(run: Run) -> Numbers:
    """A custom autograd.Function that rounds and passes the gradient (quantisation), split as autopar.splits says"""
    return stepped(run, RoundedBlock)


class ClippedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm().clamp(min=1e-3)


class ClippedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(ClippedGradient.apply(x))


@case(refused=UNSPLIT)
def gradient_normalised_in_backward(run: Run) -> Numbers:
    """A backward that divides the gradient by its norm: of the whole batch"""
    return stepped(run, ClippedBlock)


@case(on=FORWARD)
def same_function_twice_on_one_input(run: Run) -> Numbers:
    """A function with a nonlinear backward applied twice to one tensor"""

    class Twice(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ClippedGradient.apply(x) + self.down(self.up(ClippedGradient.apply(x)).tanh())

    return stepped(run, Twice)


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias):
        return x @ weight.t() + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        return of_x, grad.t() @ x if ctx.needs_input_grad[1] else None, 2 * grad.sum(0)


class OwnLinearBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(OwnLinear.apply(x, self.up.weight, self.up.bias).tanh())


@case(on=FORWARD)
def linear_with_own_backward(run: Run) -> Numbers:
    """An own linear layer: saved tensors, setup_context, ctx.needs_input_grad, once_differentiable"""
    return stepped(run, OwnLinearBlock)


class Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes, mode=None):
        ctx.set_materialize_grads(False)
        large, small = x.split(sizes, -1)
        sign = x > 0
        ctx.mark_non_differentiable(sign)
        return large.clone(), None, small.clone(), sign

    @staticmethod
    def backward(ctx, large, nothing, small, sign):
        return torch.cat([3 * large, small], -1), None, None


class PartsBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large, nothing, small, sign = Parts.apply(x, [WIDTH - 2, 2])
        assert nothing is None
        return super().forward(torch.cat([small, large], -1) * sign)


@case(on=FORWARD)
def function_with_several_outputs(run: Run) -> Numbers:
    """A function of a list of numbers with several outputs: tensors, None, one without gradient"""
    return stepped(run, PartsBlock)


class CheckpointedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class CheckpointedStack(Stack):
    def __init__(self) -> None:
        super().__init__(CheckpointedBlock)
        self.first = nn.Linear(WIDTH, WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(self.first(x))


@case()
def reentrant_checkpoint(run: Run) -> Numbers:
    """torch.utils.checkpoint(use_reentrant=True) in each block"""
    args = batch()
    model = run.compile(CheckpointedStack(), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


class FirstCheckpointed(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.blocks
        x = checkpoint(first, x, use_reentrant=True)
        for block in others:
            x = block(x)
        return x


@case()
def reentrant_checkpoint_of_an_input_without_gradient(run: Run) -> Numbers:
    """A reentrant checkpoint of a tensor that needs no gradient: its parameters get none, as in torch"""
    args = batch()
    model = run.compile(FirstCheckpointed(depth=4), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


class OtherCheckpointedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@case()
def checkpoint_without_reentry(run: Run) -> Numbers:
    """torch.utils.checkpoint(use_reentrant=False) in each block"""
    return stepped(run, OtherCheckpointedBlock)


class Closure(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ClosureBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Closure.apply(x, self.up)


@case(refused="Closure.apply is called with a Linear as argument 1.*hand it the tensors")
def function_called_with_a_module(run: Run) -> Numbers:
    """A function that is called with a module, whose tensors it reads"""
    return stepped(run, ClosureBlock)
