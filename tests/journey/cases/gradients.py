"""Hooks on gradients, and gradients of gradients."""

import torch
from torch import nn

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.cases.autograd import OwnLinearBlock, stepped
from tests.journey.stack import WIDTH, Block, Stack, batch


class HookedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).tanh()
        hidden.register_hook(lambda grad: 10 * grad)
        return x + self.down(hidden)


@case(refused=r"gradients.py:\d+: `hidden.register_hook.*custom torch.autograd.Function", peers=True)
def hook_on_a_tensor_in_forward(run: Run) -> Numbers:
    """tensor.register_hook in forward, which changes the gradient"""
    return stepped(run, HookedBlock)


def scaled(grad: torch.Tensor) -> torch.Tensor:
    return 10 * grad


def hooked(run: Run, hook) -> Numbers:
    """A step of a model that was given hooks before it was compiled."""
    args, model = batch(), Stack()
    hook(model)
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(refused=r"parameter blocks.1.up.weight has a hook on gradients, scaled \(gradients.py:\d+\).*compiled model's")
def hook_on_a_weight(run: Run) -> Numbers:
    """weight.register_hook before compile"""
    return hooked(run, lambda model: model.blocks[1].up.weight.register_hook(scaled))


@case(refused="parameter blocks.1.up.weight has a hook on gradients")
def hook_after_accumulation(run: Run) -> Numbers:
    """weight.register_post_accumulate_grad_hook before compile"""
    return hooked(
        run, lambda model: model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    )


@case(refused="module blocks.1 has a hook on gradients, .*gradients.py")
def hook_on_the_backward_of_a_module(run: Run) -> Numbers:
    """module.register_full_backward_hook before compile, which changes the gradient"""
    return hooked(
        run, lambda model: model.blocks[1].register_full_backward_hook(lambda *grads: tuple(3 * x for x in grads[1]))
    )


@case(refused="module blocks.1 has a hook on gradients, .*gradients.py")
def hook_before_the_backward_of_a_module(run: Run) -> Numbers:
    """module.register_full_backward_pre_hook before compile, which changes the gradient"""
    return hooked(run, lambda model: model.blocks[1].register_full_backward_pre_hook(lambda _, grads: (3 * grads[0],)))


@case()
def hook_on_a_compiled_weight(run: Run) -> Numbers:
    """weight.register_hook on the compiled model"""
    args = batch()
    model = run.compile(Stack(), args=args)
    for _, weight in run.named(model):
        weight.register_hook(scaled)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case()
def hook_that_clips_by_the_norm_of_the_gradient(run: Run) -> Numbers:
    """weight.register_hook on the compiled model: the gradient over its own norm"""
    args = batch()
    model = run.compile(Stack(), args=args)
    for _, weight in run.named(model):
        weight.register_hook(lambda grad: grad / (grad.norm() + 1e-3))
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case()
def optimizer_in_backward(run: Run) -> Numbers:
    """An optimizer step in each weight's register_post_accumulate_grad_hook"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizers = {}

    def update(weight: torch.Tensor) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for _, weight in run.named(model):
        optimizers[weight] = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(update)
    for _ in range(2):
        loss = run.step(model, *args)
    return {"loss": loss} | run.parameters(model)


class Critic(nn.Module):
    """Scores of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.score(x).sum()


@case(on=FORWARD, peers=False)
def gradient_penalty(run: Run) -> Numbers:
    """A gradient penalty on the input (WGAN-GP): autograd.grad(score, x, create_graph=True)"""
    x = torch.randn(8, WIDTH, requires_grad=True)
    model = run.compile(Critic(), args=(x,))
    score = model(x)
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    loss = score / 8 + 10 * (gradient.norm(dim=1) - 1).square().mean()
    loss.backward()
    return {"loss": loss.detach(), "gradient": gradient.detach()} | run.gradients(model)


@case(on=FORWARD, peers=False)
def penalty_on_the_gradients_of_weights(run: Run) -> Numbers:
    """The norm of all weights' gradients as part of the loss (create_graph=True)"""
    args = batch()
    model = run.compile(Stack(), args=args)
    loss = model(*args)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(run.whole(x).square().sum() for x in gradients)
    (loss + 0.1 * penalty).backward()
    return {"penalty": penalty.detach()} | run.gradients(model)


@case(on=FORWARD, peers=False)
def hessian_times_vector(run: Run) -> Numbers:
    """A Hessian-vector product by two calls of autograd.grad"""
    args = batch()
    model = run.compile(Stack(), args=args)
    weights = list(model.parameters())
    gradients = torch.autograd.grad(model(*args), weights, create_graph=True)
    product = sum((run.whole(x) * torch.linspace(0, 1, x.numel()).view(x.shape)).sum() for x in gradients)
    found = torch.autograd.grad(product, weights)
    return {fqn: run.whole(x) for (fqn, _), x in zip(run.named(model), found)}


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x)) + self.scores(x).softmax(-1)


@case(on=FORWARD, peers=False)
def second_order_through_norms_and_softmax(run: Run) -> Numbers:
    """Gradients of a gradient penalty through layer norms, softmax and cross-entropy"""

    class Classifier(Critic):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.score = nn.ModuleList(Normed() for _ in range(3)), nn.Linear(WIDTH, 16)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy(self.score(x), y)

    x, y = torch.randn(8, WIDTH, requires_grad=True), torch.randint(16, (8,))
    model = run.compile(Classifier(), args=(x, y))
    loss = model(x, y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + 5 * gradient.square().sum()).backward()
    return {"gradient": gradient.detach()} | run.gradients(model)


@case(on=FORWARD, refused="trying to differentiate twice")
def gradient_of_the_gradient_of_a_function_once_differentiable(run: Run) -> Numbers:
    """create_graph=True through a function that is once_differentiable: an error, as on one device"""
    args = batch()
    model = run.compile(Stack(OwnLinearBlock), args=args)
    gradients = torch.autograd.grad(model(*args), list(model.parameters()), create_graph=True)
    sum(run.whole(x).square().sum() for x in gradients).backward()
    return run.gradients(model)


class Energy(nn.Module):
    """An energy whose gradient is part of the loss, taken in forward (force fields)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Critic()

    def forward(self, x: torch.Tensor, forces: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.net(x)
            (found,) = torch.autograd.grad(energy, x, create_graph=True)
        return (found - forces).square().mean() + energy.square()


@case(refused={PP: "needs the sum of .* over the whole batch"}, peers=False)
def autograd_grad_in_forward(run: Run) -> Numbers:
    """torch.autograd.grad in forward (forces as the gradient of an energy)"""
    args = batch()
    model = run.compile(Energy(), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)
