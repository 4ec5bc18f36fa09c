"""Training loops with averages, schedules, groups and scales."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.stack import WIDTH, Stack, batch

Change = Callable[[nn.Module], None]


def nothing(model: nn.Module) -> None:
    """Leaves the model as it is."""


def trained(run: Run, model: nn.Module, optimizer_of: Callable, after: Change = nothing, steps: int = 3) -> Numbers:
    """Losses and parameters of some steps with the optimizer of `optimizer_of(model)`; `after(model)` each update."""
    model, found = run.compile(model, args=batch()), {}
    optimizer = optimizer_of(model)
    for number, args in enumerate([batch() for _ in range(steps)]):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
        after(model)
    return found | run.parameters(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@case()
def moving_average_by_hand(run: Run) -> Numbers:
    """A moving average of the weights in a dict of clones"""
    average: dict[str, torch.Tensor] = {}

    def update(model: nn.Module) -> None:
        for fqn, p in run.named(model):
            average.setdefault(fqn, p.detach().clone()).lerp_(p.detach(), 0.1)

    trained(run, Stack(), sgd, update)
    return {fqn: run.whole(x) for fqn, x in average.items()}


@case(on=FORWARD)
def averaged_model(run: Run) -> Numbers:
    """torch.optim.swa_utils.AveragedModel of the compiled model, and its loss"""
    args = batch()
    model = run.compile(Stack(), args=args)
    average, optimizer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
        average.update_parameters(model)
    with torch.no_grad():
        loss = average(*args)
    return {"loss": loss} | {fqn.removeprefix("module."): x for fqn, x in run.parameters(average.module).items()}


@case()
def schedules(run: Run) -> Numbers:
    """A warm-up and a cosine schedule of the learning rate"""
    model, found = run.compile(Stack(), args=batch()), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
    for number, args in enumerate([batch() for _ in range(4)]):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
        schedule.step()
    return found | run.parameters(model)


@case()
def accumulated_gradients(run: Run) -> Numbers:
    """An update every two batches, the gradients divided by two"""
    model, found = run.compile(Stack(), args=batch()), {}
    optimizer = sgd(model)
    for number, args in enumerate([batch() for _ in range(4)]):
        found[f"loss {number}"] = run.step(model, *args)
        if number % 2:
            for p in model.parameters():
                p.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
    return found | run.parameters(model)


@case()
def gradients_set_to_zero(run: Run) -> Numbers:
    """zero_grad(set_to_none=False)"""
    model, args = run.compile(Stack(), args=batch()), batch()
    run.step(model, *args)
    model.zero_grad(set_to_none=False)
    zero = {f"zero {fqn}": run.whole(p.grad).clone() for fqn, p in run.named(model)}
    return zero | {"loss": run.step(model, *args)} | run.gradients(model)


@case()
def groups_by_name(run: Run) -> Numbers:
    """Weight decay of weights but not of biases, another learning rate for the last block"""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        named = run.named(model)
        groups = [
            {"params": [p for n, p in named if n.endswith("weight") and "blocks.2" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if n.endswith("bias") and "blocks.2" not in n], "weight_decay": 0.0},
            {"params": [p for n, p in named if "blocks.2" in n], "lr": 0.01},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.1, eps=1e-3)

    return trained(run, Stack(), optimizer)


@case()
def groups_by_dims(run: Run) -> Numbers:
    """Weight decay of what has two dims"""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        decayed, others = [], []
        for p in model.parameters():
            (decayed if p.ndim > 1 else others).append(p)
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.1, eps=1e-3)

    return trained(run, Stack(), optimizer)


@case()
def group_added(run: Run) -> Numbers:
    """optimizer.add_param_group after a step"""
    model, args = run.compile(Stack(), args=batch()), batch()
    named = run.named(model)
    optimizer = torch.optim.SGD([p for n, p in named if n.endswith("weight")], lr=0.1, momentum=0.9)
    for number in range(3):
        if number == 1:
            optimizer.add_param_group({"params": [p for n, p in named if n.endswith("bias")], "lr": 0.05})
        model.zero_grad()
        run.step(model, *args)
        optimizer.step()
    return run.parameters(model)


@case(on=FORWARD)
def gradient_scaler(run: Run) -> Numbers:
    """torch.amp.GradScaler with unscale_ and an update"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(*args)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return run.parameters(model)


@case(on=FORWARD)
def several_forwards_before_a_backward(run: Run) -> Numbers:
    """The sum of the losses of two batches, one backward"""
    first, second = batch(), batch()
    model = run.compile(Stack(), args=first)
    loss = model(*first) + 2 * model(*second)
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


@case(on=FORWARD)
def backwards_in_another_order(run: Run) -> Numbers:
    """Two forwards, the first one's backward last"""
    first, second = batch(), batch()
    model = run.compile(Stack(), args=first)
    losses = model(*first), model(*second)
    losses[1].backward()
    losses[0].backward()
    return run.gradients(model)


class TwoLosses(Stack):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.body(x)
        return (out - y).square().mean(), out.abs().mean()


@case(on=FORWARD)
def two_losses_and_two_backwards(run: Run) -> Numbers:
    """Two losses, backward(retain_graph=True) of the first"""
    args = batch()
    model = run.compile(TwoLosses(), args=args)
    first, second = model(*args)
    first.backward(retain_graph=True)
    second.backward()
    return {"first": first.detach(), "second": second.detach()} | run.gradients(model)


@case(on=FORWARD)
def gradients_by_autograd_grad(run: Run) -> Numbers:
    """torch.autograd.grad of the weights, for each of two losses"""
    args = batch()
    model = run.compile(TwoLosses(), args=args)
    losses, weights = model(*args), [p for _, p in run.named(model)]
    first = torch.autograd.grad(losses[0], weights, retain_graph=True)
    second = torch.autograd.grad(losses[1], weights)
    pairs = zip(run.named(model), first, second)
    return {fqn: run.whole(a) - 2 * run.whole(b) for (fqn, _), a, b in pairs}


@case(on=FORWARD, refused="backward through the graph a second time")
def backward_twice(run: Run) -> Numbers:
    """backward a second time without retain_graph: an error, as on one device"""
    args = batch()
    model = run.compile(Stack(), args=args)
    loss = model(*args)
    loss.backward()
    loss.backward()
    return run.gradients(model)


@case(on=FORWARD)
def frozen_after_a_step_in_one_block(run: Run) -> Numbers:
    """requires_grad_(False) of the first block after a step: with stages, some ranks have none of it"""
    model, args = run.compile(Stack(), args=batch()), batch()
    optimizer = sgd(model)
    found = {"first": run.step(model, *args)}
    optimizer.step()
    optimizer.zero_grad()
    run.inner(model).blocks[0].requires_grad_(False)
    found["second"] = run.step(model, *args)
    optimizer.step()
    return found | run.gradients(model) | run.parameters(model)


@case(on=FORWARD)
def frozen_last_block_after_a_step(run: Run) -> Numbers:
    """requires_grad_(False) of the last block's weights one by one"""
    model, args = run.compile(Stack(), args=batch()), batch()
    found = {"first": run.step(model, *args)}
    model.zero_grad()
    for fqn, p in run.named(model):
        if fqn.startswith("blocks.2.up"):
            p.requires_grad = False
    found["second"] = run.step(model, *args)
    return found | run.gradients(model)


@case()
def evaluated_between_steps(run: Run) -> Numbers:
    """A loss under no_grad between two steps"""
    model, args = run.compile(Stack(), args=batch()), batch()
    found = {"first": run.step(model, *args)}
    model.eval()
    with torch.no_grad():
        found["evaluated"] = model.train_step(*args) if run.setting == PP else model(*args)
    model.train()
    return found | {"second": run.step(model, *args)} | run.gradients(model)


@case()
def best_weights_kept(run: Run) -> Numbers:
    """copy.deepcopy(model.state_dict()), loaded again after further steps"""
    model, args = run.compile(Stack(), args=batch()), batch()
    optimizer = sgd(model)
    for number in range(3):
        if number == 1:
            best = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
    model.load_state_dict(best)
    return {"loss": run.step(model, *args)} | run.parameters(model)


@case()
def last_weights_kept_by_reference(run: Run) -> Numbers:
    """model.state_dict() is kept without a copy: it follows the weights"""
    model, args = run.compile(Stack(), args=batch()), batch()
    kept, optimizer = model.state_dict(), sgd(model)
    run.step(model, *args)
    optimizer.step()
    return {fqn: run.whole(x) for fqn, x in kept.items()}


def head_alone(run: Run, optimizer_of: Callable) -> Numbers:
    model = Stack()
    for block in model.blocks[:-1]:
        block.requires_grad_(False)
    return trained(run, model, optimizer_of)


@case()
def head_alone_trained(run: Run) -> Numbers:
    """All but the last block frozen before compile, the optimizer has what is not frozen"""
    return head_alone(run, lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


@case(peers=False)
def head_alone_trained_by_an_optimizer_of_all(run: Run) -> Numbers:
    """All but the last block frozen before compile, the optimizer has all parameters"""
    return head_alone(run, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3))


@case()
def heads_of_other_sizes(run: Run) -> Numbers:
    """Two heads behind the blocks, of which the second has an odd width"""

    class Heads(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, 3)})

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            return (self.heads["a"](x) - y).square().mean() + self.heads["b"](x).square().mean()

    return trained(run, Heads(), sgd)
