"""Gradients and weights that are read and changed by hand."""

import torch
from torch import nn

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.cases.training import sgd, trained
from tests.journey.stack import Stack, batch

IN_OTHER_STAGES = "this rank's stages only|parameter of another stage of the pipeline"


@case(on=FORWARD)
def loss_scaled_by_hand(run: Run) -> Numbers:
    """(1024 * loss).backward(), and gradients divided by 1024"""
    args = batch()
    model = run.compile(Stack(), args=args)
    (1024 * model(*args)).backward()
    for p in model.parameters():
        p.grad.div_(1024)
    return run.gradients(model)


@case()
def gradients_edited(run: Run) -> Numbers:
    """p.grad is doubled, clamped, replaced and set to None"""

    model, args = run.compile(Stack(), args=batch()), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.step(model, *args)
    for fqn, p in run.named(model):
        if "blocks.0" in fqn:
            p.grad = p.grad * 2
        elif "blocks.1" in fqn:
            p.grad.clamp_(-1e-3, 1e-3)
        elif fqn.endswith("bias"):
            p.grad = None
    optimizer.step()
    return run.parameters(model) | run.gradients(model)


@case()
def gradients_of_two_tasks_compared(run: Run) -> Numbers:
    """The cosine of each weight's gradients of two batches"""
    model, found = run.compile(Stack(), args=batch()), []
    for _ in range(2):
        model.zero_grad()
        run.step(model, *batch())
        found.append({fqn: p.grad.clone() for fqn, p in run.named(model)})
    cosine = nn.CosineSimilarity(0)
    return {fqn: cosine(*(run.whole(x[fqn]).flatten() for x in found)) for fqn in found[0]}


@case()
def update_by_hand(run: Run) -> Numbers:
    """p -= lr * p.grad under no_grad"""
    model, args = run.compile(Stack(), args=batch()), batch()
    for _ in range(2):
        model.zero_grad()
        loss = run.step(model, *args)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return {"loss": loss} | run.parameters(model)


@case()
def update_of_data_by_hand(run: Run) -> Numbers:
    """p.data -= lr * p.grad"""
    model, args = run.compile(Stack(), args=batch()), batch()
    for _ in range(2):
        model.zero_grad()
        loss = run.step(model, *args)
        for p in model.parameters():
            p.data -= 0.1 * p.grad
    return {"loss": loss} | run.parameters(model)


@case()
def weights_clamped(run: Run) -> Numbers:
    """p.data.clamp_ after each update (WGAN)"""

    def clamp(model: nn.Module) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)

    return trained(run, Stack(), sgd, clamp)


@case(on=FORWARD)
def sharpness_aware(run: Run) -> Numbers:
    """SAM: weights moved along the gradient over its norm, and back"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    with torch.no_grad():
        moves = [0.05 * p.grad / norm for p in model.parameters()]
        torch._foreach_add_(list(model.parameters()), moves)
    model.zero_grad()
    loss = run.step(model, *args)
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moves)
    return {"loss": loss} | run.gradients(model) | run.parameters(model)


@case(on=FORWARD)
def adversarial_input(run: Run) -> Numbers:
    """The sign of the input's gradient under a frozen model (FGSM)"""
    x, y = batch()
    x.requires_grad_()
    model = run.compile(Stack().requires_grad_(False), args=(x, y))
    loss = model(x, y)
    loss.backward()
    with torch.no_grad():
        attacked = model((x + 0.1 * x.grad.sign()).detach().requires_grad_(), y)
    return {"gradient": x.grad, "attacked": attacked} | run.gradients(model)


@case(refused=dict.fromkeys(FORWARD, "was read as a number.*full_tensor") | {PP: IN_OTHER_STAGES})
def norm_summed_by_item(run: Run) -> Numbers:
    """The norm of all gradients by p.grad.detach().data.norm(2).item() ** 2, as in many loops"""
    model, args = run.compile(Stack(), args=batch()), batch()
    run.step(model, *args)
    total = 0.0
    for p in model.parameters():
        total += p.grad.detach().data.norm(2).item() ** 2
    return {"norm": torch.tensor(total**0.5)}


@case(refused={PP: IN_OTHER_STAGES})
def squares_summed(run: Run) -> Numbers:
    """The sum of the squares of all gradients"""
    model, args = run.compile(Stack(), args=batch()), batch()
    run.step(model, *args)
    return {"sum": run.whole(sum((p.grad**2).sum() for p in model.parameters()))}


@case(refused=dict.fromkeys(FORWARD, "was read as a number.*full_tensor") | {PP: IN_OTHER_STAGES})
def largest_gradient(run: Run) -> Numbers:
    """max(p.grad.abs().max().item() for p in model.parameters())"""
    model, args = run.compile(Stack(), args=batch()), batch()
    run.step(model, *args)
    return {"largest": torch.tensor(max(p.grad.abs().max().item() for p in model.parameters()))}


@case(refused={PP: IN_OTHER_STAGES})
def clip_grad_norm_in_steps(run: Run) -> Numbers:
    """torch.nn.utils.get_total_norm and clip_grads_with_norm_"""
    model, args = run.compile(Stack(), args=batch()), batch()
    run.step(model, *args)
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, total)
    return {"norm": run.whole(total)} | run.gradients(model)


@case(refused={PP: IN_OTHER_STAGES})
def vector_of_gradients(run: Run) -> Numbers:
    """torch.cat of all gradients, flattened"""
    model, args = run.compile(Stack(), args=batch()), batch()
    run.step(model, *args)
    return {"gradients": run.whole(torch.cat([p.grad.flatten() for p in model.parameters()]))}


@case(on=FORWARD)
def number_of_parameters(run: Run) -> Numbers:
    """sum(p.numel() for p in model.parameters()), names, shapes and order"""
    model, args = run.compile(Stack(), args=batch()), batch()
    named = run.named(model)
    assert [(n, p.shape) for n, p in named] == [(n, p.shape) for n, p in Stack().named_parameters()]
    return {"loss": run.step(model, *args), "number": torch.tensor(sum(p.numel() for p in model.parameters()))}


@case(on=FORWARD)
def weights_regularised(run: Run) -> Numbers:
    """An L1 and an L2 penalty on all weights, added to the loss"""
    args = batch()
    model = run.compile(Stack(), args=args)
    penalty = sum(run.whole(p.abs().sum()) + run.whole(p.square().sum()) for p in model.parameters())
    loss = model(*args) + 0.01 * penalty
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)
