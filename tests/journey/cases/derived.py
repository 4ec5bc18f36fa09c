"""Derivatives in other ways, and several models at once."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from tests.journey.case import FORWARD, Numbers, Run, case
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch

ALONE = FORWARD


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@case(on=ALONE)
def two_views(run: Run) -> Numbers:
    """SimSiam: two views through one model, cosine of each with the other's detached output"""
    model = run.compile(Head())
    one, two = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    p, q = model(one), model(two)
    loss = -(F.cosine_similarity(p, q.detach()).mean() + F.cosine_similarity(q, p.detach()).mean()) / 2
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


@case(on=ALONE)
def teacher_that_follows(run: Run) -> Numbers:
    """A student and a teacher, compiled each: the teacher follows by p.data.mul_ and add_ (mean teacher, DINO, BYOL)"""
    student, teacher = Head(), Head()
    teacher.load_state_dict(student.state_dict())
    student, teacher = run.compile(student), run.compile(teacher)
    for p in teacher.parameters():
        p.requires_grad_(False)
    optimizer, found = torch.optim.SGD(student.parameters(), lr=0.1), {}
    for number in range(3):
        x = torch.randn(BATCH, WIDTH)
        with torch.no_grad():
            wanted = teacher(x + 0.1).softmax(-1)
        loss = -(wanted * student(x).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(student.parameters(), teacher.parameters()):
                q.data.mul_(0.9).add_(p.detach().data, alpha=0.1)
        found[f"loss {number}"] = loss.detach()
    return found | run.parameters(teacher)


@case(on=ALONE)
def gradient_surgery(run: Run) -> Numbers:
    """PCGrad: the gradients of two losses by autograd.grad, projected weight by weight, written to p.grad"""
    x, y = batch()
    model = run.compile(Head())
    out, parameters = model(x), list(model.parameters())
    one = torch.autograd.grad((out - y).square().mean(), parameters, retain_graph=True)
    two = torch.autograd.grad(out.abs().mean(), parameters)
    for p, g, h in zip(parameters, one, two):
        dot = (g * h).sum()
        p.grad = g + h - torch.where(dot < 0, dot / h.square().sum(), torch.zeros_like(dot)) * h
    return run.gradients(model)


@case(on=ALONE)
def steps_inside_a_step(run: Run) -> Numbers:
    """Reptile: three steps on a deep copy, then the weights move a part of the way to the copy's"""
    args = batch()
    model = run.compile(Stack(), args=args)
    inner = copy.deepcopy(model)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        run.step(inner, *args)
        optimizer.step()
    with torch.no_grad():
        for p, q in zip(model.parameters(), inner.parameters()):
            p += 0.5 * (q - p)
    return run.parameters(model)


@case(on=ALONE)
def weights_that_adapt_fast(run: Run) -> Numbers:
    """MAML: autograd.grad(create_graph=True) of the weights, and functional_call with what it gives"""
    x, y = batch()
    model = run.compile(Head())
    loss = (model(x) - y).square().mean()
    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    fast = {name: p - 0.1 * g for name, p, g in zip(names, parameters, gradients)}
    outer = (torch.func.functional_call(model, fast, (x,)) - y).square().mean()
    outer.backward()
    return {"inner": loss.detach(), "outer": outer.detach()} | run.gradients(model)


def of_functions(run: Run, made: Callable[[nn.Module, dict[str, Any], torch.Tensor], Any]) -> Numbers:
    """What a function of torch.func gives for the compiled model, its weights and rows."""
    x = torch.randn(BATCH, WIDTH)
    model = run.compile(Head(), args=(x,))
    model(x)
    found = made(model, {fqn: p.detach() for fqn, p in model.named_parameters()}, x)
    return {name: run.whole(value).detach() for name, value in found.items()}


@case(on=ALONE, refused="inside torch.func.grad, vmap or jvp.*torch.autograd.functional.jacobian")
def gradients_by_functions(run: Run) -> Numbers:
    """torch.func.grad of functional_call of the compiled model"""

    def made(model: nn.Module, weights: dict[str, Any], x: torch.Tensor) -> Any:
        return torch.func.grad(lambda own: torch.func.functional_call(model, own, (x,)).square().mean())(weights)

    return of_functions(run, made)


@case(on=ALONE, refused="inside torch.func.grad, vmap or jvp.*torch.autograd.functional.jacobian")
def gradients_of_each_row(run: Run) -> Numbers:
    """torch.func.vmap(grad(functional_call)): the gradient of each row (differential privacy)"""

    def made(model: nn.Module, weights: dict[str, Any], x: torch.Tensor) -> Any:
        def loss(own: dict[str, Any], row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, own, (row[None],)).square().mean()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)

    return of_functions(run, made)


@case(on=ALONE)
def product_with_the_jacobian(run: Run) -> Numbers:
    """torch.func.jvp and torch.autograd.functional.jacobian of the compiled model in its input"""
    x = torch.randn(BATCH, WIDTH)
    model = run.compile(Head(), args=(x,))
    jacobian = torch.autograd.functional.jacobian(lambda own: model(own).sum(0), x)
    return {"jacobian": jacobian}


@case(on=ALONE, refused="inside torch.func.grad, vmap or jvp.*torch.autograd.functional.jacobian")
def forward_mode(run: Run) -> Numbers:
    """torch.func.jvp of the compiled model: derivatives in the direction of an input"""
    x = torch.randn(BATCH, WIDTH)
    model = run.compile(Head(), args=(x,))
    return {"product": torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]}


@case(on=ALONE, refused="a dual tensor of torch.autograd.forward_ad.*torch.autograd.functional.jacobian")
def dual_numbers(run: Run) -> Numbers:
    """torch.autograd.forward_ad: the tangent of the compiled model's output for that of an input"""
    x = torch.randn(BATCH, WIDTH)
    model = run.compile(Head(), args=(x,))
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(x, torch.ones_like(x)))
        return {"tangent": forward_ad.unpack_dual(output).tangent}


@case(on=ALONE, refused="inside torch.func.grad, vmap or jvp.*torch.autograd.functional.jacobian")
def mapped_over_a_dim(run: Run) -> Numbers:
    """torch.vmap(model) of the compiled model over a dim of its input"""
    x = torch.randn(3, BATCH, WIDTH)
    model = run.compile(Head(), args=(x[0],))
    return {"outputs": torch.vmap(model)(x).detach()}
