"""Recipes of training scripts: wrappers of optimizers, averages, groups, phases, loaders."""

import copy
import itertools
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.journey.case import FORWARD, SETTINGS, Numbers, Run, case
from tests.journey.cases.modules import BatchNormed
from tests.journey.stack import BATCH, WIDTH, Stack, batch

ON = SETTINGS
ALONE = FORWARD


class Lookahead:
    """Slow weights that follow the fast ones every second step, as the wrappers that people copy do it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.number = optimizer, 0
        self.param_groups = optimizer.param_groups
        self.slow = [[p.clone().detach() for p in group["params"]] for group in self.param_groups]

    def step(self) -> None:
        self.optimizer.step()
        self.number += 1
        if self.number % 2:
            return
        for group, slow in zip(self.param_groups, self.slow):
            for p, q in zip(group["params"], slow):
                q.add_(p.data - q, alpha=0.5)
                p.data.copy_(q)


@case(on=ON)
def lookahead(run: Run) -> Numbers:
    """Lookahead around SGD: slow weights are cloned, follow every second step and are copied back"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(4):
        optimizer.optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
    return run.parameters(model)


@case(on=ALONE)
def average_of_values(run: Run) -> Numbers:
    """timm's ModelEmaV2: ema_v.copy_(decay * ema_v + (1 - decay) * model_v) over state_dict().values() of both"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    average = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
        with torch.no_grad():
            for ema_v, model_v in zip(average.state_dict().values(), model.state_dict().values()):
                ema_v.copy_(0.9 * ema_v + (1.0 - 0.9) * model_v)
    with torch.no_grad():
        loss = average(*args)
    return {"loss of the average": loss} | run.parameters(average)


@case(on=ON)
def average_without_an_update_of_the_model(run: Run) -> Numbers:
    """torch.lerp of clones by name, loaded by load_state_dict at the end"""
    args = batch()
    model = run.compile(Stack(), args=args)
    average = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
        for fqn, p in model.named_parameters():
            average[fqn] = torch.lerp(average[fqn], p.detach(), 0.3)
    model.load_state_dict(average, strict=False)
    return {"loss": run.step(model, *args)} | run.parameters(model)


@case(on=ON)
def rates_by_depth(run: Run) -> Numbers:
    """A learning rate for each layer by its name, smaller the deeper (layer-wise decay), and LambdaLR of a list"""
    args = batch()
    model = run.compile(Stack(), args=args)
    groups = [
        {"params": [p], "lr": 0.1 * 0.7 ** (3 - int(fqn.split(".")[1])), "weight_decay": 0.1 * (p.ndim > 1)}
        for fqn, p in run.named(model)
    ]
    optimizer = torch.optim.AdamW(groups)
    depths = [int(fqn.split(".")[1]) for fqn, _ in run.named(model)]
    rates = [lambda step, depth=depth: 1 / (1 + step + depth) for depth in depths]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
    for _ in range(3):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
        schedule.step()
    return run.parameters(model)


@case(on=ON)
def schedules_chained(run: Run) -> Numbers:
    """SequentialLR of a warm-up and CosineAnnealingWarmRestarts, saved and loaded in the middle of an epoch"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def made() -> torch.optim.lr_scheduler.SequentialLR:
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])

    schedule = made()
    for number in range(6):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
        schedule.step()
        if number == 3:
            state, of_optimizer = copy.deepcopy(schedule.state_dict()), optimizer.state_dict()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            schedule = made()
            optimizer.load_state_dict(of_optimizer)
            schedule.load_state_dict(state)
    return run.parameters(model)


@case(on=ON)
def two_kinds_of_optimizers(run: Run) -> Numbers:
    """SGD for matrices and AdamW for all else, stepped one after the other"""
    args = batch()
    model = run.compile(Stack(), args=args)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizers = torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)
    for _ in range(3):
        run.step(model, *args)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return run.parameters(model)


@case(on=ALONE)
def phases_with_other_parts_frozen(run: Run) -> Numbers:
    """The first half frozen in odd steps, the second in even ones, with one optimizer of all weights"""
    args, found = batch(), {}
    model = run.compile(Stack(depth=4), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        for fqn, p in run.named(model):
            p.requires_grad_((int(fqn.split(".")[1]) < 2) == (number % 2 == 0))
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
        model.zero_grad()
    return found | run.parameters(model)


@case(on=ON)
def accumulated_without_synchronising(run: Run) -> Numbers:
    """getattr(model, "no_sync", nullcontext)() around all but the last of four batches"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        with nullcontext() if number == 3 else getattr(model, "no_sync", nullcontext)():
            run.step(model, *args)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(4)
    optimizer.step()
    return run.parameters(model)


@case(on=ALONE)
def loader_that_drops_nothing(run: Run) -> Numbers:
    """A DataLoader of 19 rows in batches of eight, drop_last=False, the sums of losses weighted by rows"""
    data = TensorDataset(torch.randn(19, WIDTH), torch.randn(19, WIDTH))
    model, total = run.compile(Stack()), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=BATCH):
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    return {"mean": torch.tensor(total / 19)} | run.parameters(model)


@case(on=ALONE)
def evaluated_in_the_loop(run: Run) -> Numbers:
    """model.eval() and inference_mode every step, batch norm's statistics and dropout of nothing among the layers"""
    model, args = Stack(BatchNormed), batch()
    model, found = run.compile(model, args=args), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        model.train()
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            found[f"evaluated {number}"] = model(*args).clone()
    return found | run.parameters(model) | run.buffers(model)


@case(on=ALONE)
def statistics_frozen(run: Run) -> Numbers:
    """Batch norms in eval() and their weights frozen while all else trains, and another momentum after a step"""
    model, args = Stack(BatchNormed), batch()
    model = run.compile(model, args=args)
    first = run.step(model, *args)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    for module in norms:
        module.momentum = 0.5
    second = run.step(model, *args)
    for module in norms:
        module.eval()
        module.weight.requires_grad_(False)
    model.zero_grad()
    return {"1": first, "2": second, "3": run.step(model, *args)} | run.gradients(model) | run.buffers(model)


@case(on=ALONE)
def clipped_in_part(run: Run) -> Numbers:
    """clip_grad_value_ of one block, and of a list of all weights but biases"""
    args = batch()
    model = run.compile(Stack(), args=args)
    loss = run.step(model, *args)
    nn.utils.clip_grad_value_([p for fqn, p in run.named(model) if fqn.startswith("blocks.1")], 1e-3)
    nn.utils.clip_grad_value_([p for p in model.parameters() if p.ndim > 1], 1e-2, foreach=False)
    return {"loss": loss} | run.gradients(model)


@case(on=ALONE)
def losses_stacked(run: Run) -> Numbers:
    """torch.stack of the losses of three batches, their mean plus their variance, one backward"""
    model = run.compile(Stack())
    losses = torch.stack([model(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) for _ in range(3)])
    loss = losses.mean() + losses.var()
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


@case(on=ALONE)
def weights_between_two_runs(run: Run) -> Numbers:
    """The loss along the line between two sets of weights, written by p.data.copy_(torch.lerp(...))"""
    args = batch()
    model, found = run.compile(Stack(), args=args), {}
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run.step(model, *args)
    optimizer.step()
    end = [p.detach().clone() for p in model.parameters()]
    for number in range(3):
        for p, a, b in zip(model.parameters(), start, end):
            p.data.copy_(torch.lerp(a, b, number / 2))
        with torch.no_grad():
            found[f"loss {number}"] = model(*args).clone()
    return found


@case(on=ON)
def stopped_and_best_kept(run: Run) -> Numbers:
    """Early stopping: the best state is kept on the host by {k: v.cpu().clone()}, and loaded with strict=True"""
    args, best, kept = batch(), float("inf"), {}
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    for _ in range(4):
        optimizer.zero_grad()
        loss = run.step(model, *args).item()
        if loss < best:
            best, kept = loss, {name: x.cpu().clone() for name, x in model.state_dict().items()}
        optimizer.step()
    model.load_state_dict(kept)
    return {"best": torch.tensor(best)} | run.parameters(model)


@case(on=ON)
def endless_loader(run: Run) -> Numbers:
    """next(itertools.cycle(loader)) and two batches a step, whose gradients add up"""
    data = TensorDataset(torch.randn(16, WIDTH), torch.randn(16, WIDTH))
    batches = itertools.cycle(DataLoader(data, batch_size=BATCH))
    model = run.compile(Stack(), args=next(iter(DataLoader(data, batch_size=BATCH))))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(2):
            run.step(model, *next(batches))
        optimizer.step()
    return run.parameters(model)


@case(on=ALONE)
def hook_that_returns(run: Run) -> Numbers:
    """register_forward_hook that returns another value, with_kwargs, always_call, prepend, and its handle removed"""
    args, model = batch(), Stack()
    model.blocks[0].register_forward_hook(lambda module, given, out: out * 2)
    first = model.blocks[1].register_forward_hook(lambda module, given, kwargs, out: out + 1, with_kwargs=True)
    model.blocks[1].register_forward_hook(lambda module, given, out: out.clone(), prepend=True, always_call=True)
    model.blocks[2].register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
    model = run.compile(model, args=args)
    losses = [run.step(model, *args)]
    first.remove()
    return {"before": losses[0], "after": run.step(model, *args)} | run.gradients(model)
