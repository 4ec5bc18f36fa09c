"""Weights: pretrained parts, ties, averages, adapters, masks and what is written to them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.cases.modules import BatchNormed, Tied
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch

Args = tuple[torch.Tensor, ...]


def stepped(run: Run, model: nn.Module, *args: torch.Tensor) -> Numbers:
    """Loss, gradients and parameters of a step."""
    return {"loss": run.step(model, *args)} | run.gradients(model) | run.parameters(model)


def updated(run: Run, model: nn.Module, args: Args, steps: int = 2) -> torch.optim.Optimizer:
    """Some steps of SGD with momentum; its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def other_state(make: Callable[[], nn.Module] = Stack) -> dict[str, torch.Tensor]:
    """The state of a model with other weights."""
    torch.manual_seed(11)
    return {fqn: x.clone() for fqn, x in make().state_dict().items()}


def words() -> Args:
    return torch.randint(16, (BATCH,)), torch.randint(16, (BATCH,))


@case(refused={PP: r"load_state_dict of a module inside.*model.load_state_dict\(state, strict=False\)"})
def part_loaded(run: Run) -> Numbers:
    """model.blocks[1].load_state_dict(...): a submodule is given pretrained weights after compile"""
    args = batch()
    model = run.compile(Stack(), args=args)
    state = other_state()
    run.inner(model).blocks[1].load_state_dict({name: state[f"blocks.1.{name}"] for name in Block().state_dict()})
    return stepped(run, model, *args)


@case()
def backbone_loaded_without_strictness(run: Run) -> Numbers:
    """The blocks of a checkpoint that has another head, after compile: keys chosen by prefix, strict=False"""

    class Headed(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, WIDTH)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(super().body(x))

    args = batch()
    model = run.compile(Headed(), args=args)
    state = {f"backbone.{fqn}": x for fqn, x in other_state().items()} | {"head.weight": torch.zeros(3, WIDTH)}
    chosen = {fqn.removeprefix("backbone."): x for fqn, x in state.items() if fqn.startswith("backbone.")}
    found = run.inner(model).load_state_dict(chosen, strict=False)
    assert list(found.missing_keys) == ["head.weight", "head.bias"], found
    return stepped(run, model, *args)


@case()
def checkpoint_of_another_dtype(run: Run) -> Numbers:
    """load_state_dict of a bfloat16 checkpoint into a float32 model: its dtype stays"""
    args = batch()
    model = run.compile(Stack(), args=args)
    model.load_state_dict({fqn: x.bfloat16() for fqn, x in other_state().items()})
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return stepped(run, model, *args)


@case(on=FORWARD)
def assigned_with_another_dtype(run: Run) -> Numbers:
    """load_state_dict(assign=True) of a float64 checkpoint: the model is float64 then"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    model.zero_grad()
    model.load_state_dict({fqn: x.double() for fqn, x in other_state().items()}, assign=True)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    return stepped(run, model, *(x.double() for x in args))


@case()
def tied_weight_loaded_under_one_name(run: Run) -> Numbers:
    """A checkpoint without the head, which is tied to the embedding: strict=False"""
    args = words()
    model = run.compile(Tied(), args=args)
    state = other_state(Tied)
    del state["head.weight"]
    model.load_state_dict(state, strict=False)
    return stepped(run, model, *args)


@case()
def tied_weight_loaded_under_both_names(run: Run) -> Numbers:
    """A checkpoint with two contents for what is tied: the last one stays"""
    args = words()
    model = run.compile(Tied(), args=args)
    state = other_state(Tied)
    state["head.weight"] = state["head.weight"] * 2
    model.load_state_dict(state)
    return stepped(run, model, *args)


@case(on=FORWARD)
def tied_weight_assigned(run: Run) -> Numbers:
    """load_state_dict(assign=True) of two contents for what is tied: it is tied no longer"""
    args = words()
    model = run.compile(Tied(), args=args)
    run.step(model, *args)
    model.zero_grad()
    state = other_state(Tied)
    state["head.weight"] = state["head.weight"] * 2
    model.load_state_dict(state, assign=True)
    return stepped(run, model, *args)


@case(on=FORWARD)
def tied_again_after_load(run: Run) -> Numbers:
    """A head of its own is tied to the embedding after its weights were loaded"""

    class Untied(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 16, bias=False)

    args = words()
    model = run.compile(Untied(), args=args)
    model.load_state_dict(other_state(Untied))
    first = run.step(model, *args)
    model.zero_grad()
    inner = run.inner(model)
    inner.head.weight = inner.embedding.weight
    return {"first": first} | stepped(run, model, *args)


class SameMemory(Tied):
    """Tied by memory, not by object."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embedding.weight.data)


@case(refused="embedding.weight and head.weight are two parameters in the same memory.*tie them")
def tied_by_memory(run: Run) -> Numbers:
    """head.weight = nn.Parameter(embedding.weight.data): two parameters in the same memory"""
    args = words()
    model = run.compile(SameMemory(), args=args)
    updated(run, model, args)
    return stepped(run, model, *args)


class Transposed(nn.Module):
    """An autoencoder whose decoder has the encoder's weight, transposed, as a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decoder.weight = nn.Parameter(self.encoder.weight.data.t())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.decoder(self.encoder(x).tanh()) - y).square().mean()


@case(on=FORWARD, refused="are two parameters in the same memory.*tie them")
def transposed_weight_in_the_same_memory(run: Run) -> Numbers:
    """decoder.weight = nn.Parameter(encoder.weight.data.t())"""
    args = batch()
    model = run.compile(Transposed(), args=args)
    updated(run, model, args)
    return stepped(run, model, *args)


class TransposedInForward(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.linear(block.up(x).tanh(), block.up.weight.t())
        return x


@case()
def transposed_weight_in_forward(run: Run) -> Numbers:
    """F.linear(hidden, self.up.weight.t()): a decoder with the encoder's weight"""
    args = batch()
    model = run.compile(TransposedInForward(), args=args)
    updated(run, model, args)
    return stepped(run, model, *args)


@case(on=FORWARD)
def averaged_with_buffers(run: Run) -> Numbers:
    """AveragedModel(use_buffers=True) of a model with batch norm, and its loss in eval mode"""
    args = batch()
    model = run.compile(Stack(BatchNormed), args=args)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
        average.update_parameters(model)
    average.eval()
    with torch.no_grad():
        return {"loss": average(*args)} | run.parameters(average.module) | run.buffers(average.module)


@case(on=FORWARD)
def stochastic_weight_averaging(run: Run) -> Numbers:
    """AveragedModel, SWALR and update_bn, which measures the statistics of batch norms anew (momentum=None)"""
    batches = [batch() for _ in range(3)]
    model = run.compile(Predicting(), args=batches[0][:1])
    average, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(run.whole(model(x)), y).backward()
        optimizer.step()
        average.update_parameters(model)
        schedule.step()
    update_bn(batches, average)
    average.eval()
    with torch.no_grad():
        out = run.whole(average(batches[0][0]))
    return {"out": out} | run.parameters(average.module) | run.buffers(average.module)


class Predicting(Stack):
    """Gives what the blocks make of `x`."""

    def __init__(self) -> None:
        super().__init__(BatchNormed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@case()
def averages_swapped_in_and_out(run: Run) -> Numbers:
    """The average of the weights is copied in for an evaluation, and the weights back"""
    args = batch()
    model = run.compile(Stack(), args=args)
    average = {fqn: p.detach().clone() for fqn, p in run.named(model)}
    updated(run, model, args)
    with torch.no_grad():
        for fqn, p in run.named(model):
            average[fqn].mul_(0.5).add_(p, alpha=0.5)
        kept = {fqn: p.clone() for fqn, p in run.named(model)}
        for fqn, p in run.named(model):
            p.copy_(average[fqn])
        evaluated = model.train_step(*args) if run.setting == PP else model(*args)
        for fqn, p in run.named(model):
            p.copy_(kept[fqn])
    return {"evaluated": evaluated} | stepped(run, model, *args)


@case()
def averages_by_foreach(run: Run) -> Numbers:
    """torch._foreach_lerp_ and _foreach_mul_ of all weights at once"""
    args = batch()
    model = run.compile(Stack(), args=args)
    average = [p.detach().clone() for p in model.parameters()]
    updated(run, model, args)
    with torch.no_grad():
        torch._foreach_lerp_(average, list(model.parameters()), 0.25)
        torch._foreach_mul_(average, 0.5)
        for p, mean in zip(model.parameters(), average):
            p.copy_(mean)
    return stepped(run, model, *args)


@case(on=FORWARD)
def target_network(run: Run) -> Numbers:
    """Two compiled models: load_state_dict of the other's state_dict(), and a soft update afterwards"""
    args = batch()
    model, target = run.compile(Stack(), args=args), run.compile(Stack(), args=args)
    target.load_state_dict(model.state_dict())
    updated(run, model, args)
    with torch.no_grad():
        for old, new in zip(target.parameters(), model.parameters()):
            old.mul_(0.9).add_(0.1 * new)
    return {"loss": target(*args).detach()} | run.parameters(target)


@case()
def weights_of_two_runs_averaged(run: Run) -> Numbers:
    """A model soup: the mean of two state dicts is loaded"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = {fqn: x.clone() for fqn, x in model.state_dict().items()}
    updated(run, model, args)
    second = model.state_dict()
    model.load_state_dict({fqn: (x + second[fqn]) / 2 for fqn, x in first.items()})
    return stepped(run, model, *args)
