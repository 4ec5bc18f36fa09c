"""Training days: own optimizers, own reductions, noise, penalties, searches of the rate."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.journey.case import FORWARD, PP, SETTINGS, Numbers, Run, case
from tests.journey.stack import Stack, batch

ON = SETTINGS
ALONE = FORWARD


def trained(run: Run, make: Callable[[Any], Any], change: Callable[[nn.Module, int], None] | None = None) -> Numbers:
    """Three steps by the optimizer that `make` gives; `change` is called between backward and the update."""
    args, found = batch(), {}
    model = run.compile(Stack(), args=args)
    optimizer = make(model.parameters())
    for number in range(3):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        if change is not None:
            change(model, number)
        optimizer.step()
    return found | run.parameters(model)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Lion(torch.optim.Optimizer):
    """The sign of an average; a trust ratio of norms with `trusts`, as LAMB has."""

    def __init__(self, parameters: Any, lr: float = 0.01, trusts: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "trusts": trusts})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                update = state["average"].mul(0.9).add(p.grad, alpha=0.1)
                state["average"].mul_(0.99).add_(p.grad, alpha=0.01)
                if group["trusts"]:
                    weight, length = p.norm(), update.norm()
                    ratio = torch.where(weight > 0, torch.where(length > 0, weight / length, 1.0), 1.0)
                    p.add_(update * ratio, alpha=-group["lr"])
                else:
                    p.add_(update.sign(), alpha=-group["lr"])


@case(on=ON)
def own_optimizer_of_signs(run: Run) -> Numbers:
    """An optimizer of one's own with state made by torch.zeros_like (Lion)"""
    return trained(run, Lion)


@case(on=ON)
def own_optimizer_of_norms(run: Run) -> Numbers:
    """An optimizer of one's own that scales by the norms of weight and update (LAMB, LARS)"""
    return trained(run, lambda own: Lion(own, lr=0.05, trusts=True))


@case(on=ON)
def gradients_centred(run: Run) -> Numbers:
    """g - g.mean(dim=1, keepdim=True) of each matrix (gradient centralisation)"""

    def centre(model: nn.Module, number: int) -> None:
        for p in model.parameters():
            if p.ndim > 1:
                p.grad.add_(-p.grad.mean(dim=1, keepdim=True))

    return trained(run, sgd, centre)


@case(on=ON)
def adaptive_clipping(run: Run) -> Numbers:
    """Gradients clipped by the ratio of row norms of weight and gradient (AGC)"""

    def clip(model: nn.Module, number: int) -> None:
        for p in model.parameters():
            dim, keep = (1, True) if p.ndim > 1 else (0, True)
            most = p.detach().norm(dim=dim, keepdim=keep).clamp(min=1e-3) * 0.05
            length = p.grad.norm(dim=dim, keepdim=keep)
            p.grad.copy_(torch.where(length > most, p.grad * (most / length.clamp(min=1e-6)), p.grad))

    return trained(run, sgd, clip)


@case(on=ON)
def gradients_without_nan(run: Run) -> Numbers:
    """p.grad.nan_to_num_(), p.grad.data.clamp_, and p.grad *= 0.5"""

    def clean(model: nn.Module, number: int) -> None:
        for p in model.parameters():
            p.grad.nan_to_num_()
            p.grad.data.clamp_(-0.01, 0.01)
            p.grad *= 0.5

    return trained(run, sgd, clean)


@case(on=ALONE)
def clipped_by_block(run: Run) -> Numbers:
    """clip_grad_norm_ of each block's parameters alone, of the largest entry (norm_type=inf), with foreach=False"""

    def clip(model: nn.Module, number: int) -> None:
        inner = run.inner(model)
        nn.utils.clip_grad_norm_(inner.blocks[0].parameters(), 0.01)
        nn.utils.clip_grad_norm_(inner.blocks[1].parameters(), 0.002, norm_type=float("inf"))
        nn.utils.clip_grad_norm_(inner.blocks[2].parameters(), 0.01, norm_type=1, foreach=False)

    return trained(run, sgd, clip)


@case(on=ON)
def rate_changed_by_hand(run: Run) -> Numbers:
    """for group in optimizer.param_groups: group["lr"] *= 0.5, and a warm-up by LambdaLR"""
    args, found = batch(), {}
    model = run.compile(Stack(), args=args)
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for number in range(4):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
        schedule.step()
        if number == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
    return found | run.parameters(model)


@case(on=ON)
def search_of_the_rate(run: Run) -> Numbers:
    """A learning rate finder: rates grow step by step, then model and optimizer are put back"""
    args, found = batch(), {}
    model = run.compile(Stack(), args=args)
    optimizer = sgd(model.parameters())
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for number in range(4):
        optimizer.param_groups[0]["lr"] = 1e-3 * 4**number
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    optimizer.zero_grad()
    found["loss"] = run.step(model, *args)
    optimizer.step()
    return found | run.parameters(model)


@case(on=ON)
def state_of_the_optimizer_emptied(run: Run) -> Numbers:
    """optimizer.state.clear() after two steps: momentum begins anew"""

    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = sgd(model.parameters())
    for number in range(4):
        optimizer.zero_grad()
        loss = run.step(model, *args)
        if number == 2:
            optimizer.state.clear()
        optimizer.step()
    return {"loss": loss} | run.parameters(model)


@case(on=ALONE)
def model_and_optimizer_copied(run: Run) -> Numbers:
    """copy.deepcopy((model, optimizer)): the copy trains on, the original stays"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    run.step(model, *args)
    optimizer.step()
    other, other_optimizer = copy.deepcopy((model, optimizer))
    for _ in range(2):
        other_optimizer.zero_grad()
        loss = run.step(other, *args)
        other_optimizer.step()
    return {"loss": loss} | run.parameters(other) | {f"kept {key}": x for key, x in run.parameters(model).items()}


@case(on=ALONE)
def penalty_of_an_earlier_task(run: Run) -> Numbers:
    """Elastic weight consolidation: squares of gradients and old weights in dicts, a penalty added to the loss"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    fisher = {fqn: p.grad.detach().clone() ** 2 for fqn, p in run.named(model)}
    old = {fqn: p.detach().clone() for fqn, p in run.named(model)}
    optimizer = sgd(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        penalty = sum((fisher[fqn] * (p - old[fqn]) ** 2).sum() for fqn, p in run.named(model))
        loss = model(*args) + run.whole(100.0 * penalty)
        loss.backward()
        optimizer.step()
    return {"loss": loss} | run.parameters(model)


def mean_over_ranks(run: Run, x: torch.Tensor) -> None:
    if run.setting != "one device":
        dist.all_reduce(x)
        x /= dist.get_world_size()


@case(on=ALONE, refused="collective was called by hand.*full_tensor")
def gradients_reduced_by_hand(run: Run) -> Numbers:
    """dist.all_reduce(p.grad) and p.grad /= world_size by hand, which DDP makes superfluous"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    for p in model.parameters():
        mean_over_ranks(run, p.grad)
    return run.gradients(model)


@case(on=ALONE, refused="collective was called by hand.*full_tensor")
def weights_broadcast_by_hand(run: Run) -> Numbers:
    """dist.broadcast(p.data, 0) of all parameters after compile"""
    args = batch()
    model = run.compile(Stack(), args=args)
    for p in model.parameters():
        if run.setting != "one device":
            dist.broadcast(p.data, 0)
    return {"loss": run.step(model, *args)} | run.parameters(model)


@case(on=ALONE)
def metric_reduced_by_hand(run: Run) -> Numbers:
    """dist.all_reduce of the detached loss and its mean over the ranks, for a log"""
    args = batch()
    model = run.compile(Stack(), args=args)
    loss = run.step(model, *args).clone()
    mean_over_ranks(run, loss)
    return {"loss": loss}


@case(on=ON)
def rows_of_data_set_after_an_update(run: Run) -> Numbers:
    """p.data[0] = 0 and p.data[:, 1] *= 0.5 after each update, as a padding row is kept at zero"""
    args, found = batch(), {}
    model = run.compile(Stack(), args=args)
    optimizer = sgd(model.parameters())
    for number in range(3):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
        for p in model.parameters():
            if p.ndim > 1:
                p.data[0] = 0
                p.data[:, 1] *= 0.5
    return found | run.parameters(model)


@case(on=ON)
def data_exchanged_for_an_average(run: Run) -> Numbers:
    """kept = p.data; p.data = average; a loss; p.data = kept; and updates of what was assigned reach the weight"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = sgd(model.parameters())
    averages = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
    kept = [p.data for p in model.parameters()]
    for p, average in zip(model.parameters(), averages):
        p.data = average
    with torch.no_grad():
        evaluated = model.train_step(*args) if run.setting == PP else model(*args)
        for average in averages:
            average.mul_(0.5)
        halved = model.train_step(*args) if run.setting == PP else model(*args)
    for p, old in zip(model.parameters(), kept):
        p.data = old
    optimizer.zero_grad()
    loss = run.step(model, *args)
    return {"evaluated": evaluated, "halved": halved, "loss": loss} | run.gradients(model)


@case(on=ON)
def anomalies_and_determinism(run: Run) -> Numbers:
    """torch.autograd.set_detect_anomaly(True) and torch.use_deterministic_algorithms(True) around training"""
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True):
            return trained(run, sgd)
    finally:
        torch.use_deterministic_algorithms(False)


@case(on=ON)
def updates_within_backward(run: Run) -> Numbers:
    """register_post_accumulate_grad_hook on each parameter, after compile: an update as soon as a gradient is there"""
    args, found = batch(), {}
    model = run.compile(Stack(), args=args)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for number in range(2):
        found[f"loss {number}"] = run.step(model, *args)
    return found | run.parameters(model)
