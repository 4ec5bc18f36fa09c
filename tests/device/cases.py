"""What is run on the emulated device: cases of the journey, and models that stages and groups make hard."""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn

from tests.journey.case import Numbers, Run
from tests.journey.cases import compile, loop
from tests.journey.stack import WIDTH, Block, Stack, batch

DEPTH = 9


class Tied(Stack):
    """The first and the last block share a weight, which two stages then hold."""

    def __init__(self) -> None:
        super().__init__(depth=DEPTH)
        self.blocks[-1].up.weight = self.blocks[0].up.weight


class Normed(nn.Module):
    """Norms over the batch, dropout and a mask: buffers that are written, random numbers, and `bool`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out, self.drop = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(1.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        x = x.masked_fill((x > 0.5).any(0, keepdim=True), 0.0)
        return (self.out(x) + self.drop(x) - y).square().mean()


def _trained(run: Run, model: nn.Module) -> Numbers:
    """Two steps of AdamW, whose gradients are clipped in between."""
    model = run.compile(model, args=batch())
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), {}
    for number in range(2):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *batch())
        if run.setting == "one device":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        else:
            model.clip_grad_norm_(0.05)
        optimizer.step()
    return found | run.parameters(model)


def deep(run: Run) -> Numbers:
    """As many blocks as give each rank of a pipeline several stages."""
    return _trained(run, Stack(depth=DEPTH))


def tied(run: Run) -> Numbers:
    """A weight of two stages."""
    return _trained(run, Tied())


def without_gradient(run: Run) -> Numbers:
    """The loss alone, by stages one after the other."""
    args = batch()
    model = run.compile(Stack(depth=DEPTH), args=args)
    with torch.no_grad():
        if run.setting == "one device":
            return {"loss": model(*args)}
        return {"loss": model.train_step(*args)}


def normed(run: Run) -> Numbers:
    """Buffers that forward writes to."""
    args = batch()
    model = run.compile(Normed(), args=args)
    loss = run.step(model, *args)
    return {"loss": loss} | run.gradients(model) | run.buffers(model)


def loaded(run: Run) -> Numbers:
    """Whole tensors of the host loaded, and a state dict read."""
    args, other = batch(), Stack()
    model = run.compile(Stack(), args=args)
    model.load_state_dict({name: x.clone() for name, x in other.state_dict().items()})
    loss = run.step(model, *args)
    return {"loss": loss} | {name: run.whole(x) for name, x in model.state_dict().items()}


def other_weights(run: Run) -> Numbers:
    """Ranks that are given other weights take the first one's."""
    args, model = batch(), Stack()
    given = copy.deepcopy(model)
    if run.setting != "one device" and torch.distributed.get_rank():
        with torch.no_grad():
            for x in given.parameters():
                x.add_(1)
    model = run.compile(given, args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


def on_meta(run: Run) -> Numbers:
    """A model without data is made on the device."""
    args = batch()
    if run.setting == "one device":
        return {"one": torch.ones(())}
    with torch.device("meta"):
        model = Stack()
    model = run.compile(model, args=args)
    run.step(model, *args)
    return {"one": 1 + sum((run.whole(x).detach().sum() * 0).cpu() for _, x in run.named(model))}


def already_there(run: Run) -> Numbers:
    """A model and a batch that are on the device already."""
    args, model = batch(), Stack()
    if run.setting != "one device":
        model, args = model.to(run.mesh.device_type), tuple(x.to(run.mesh.device_type) for x in args)
    model = run.compile(model, args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


CASES: Mapping[str, Callable[[Run], Numbers]] = {
    "three steps": loop.three_steps.function,
    "clip": loop.clip_by_norm_of_the_module.function,
    "clip of torch": loop.clip_by_norm_of_torch.function,
    "full state dict": loop.full_state_dict.function,
    "copied": compile.copied.function,
    "evaluated": compile.evaluated_without_gradient.function,
    "block": lambda run: _trained(run, Stack(Block)),
    "deep": deep,
    "tied": tied,
    "without gradient": without_gradient,
    "normed": normed,
    "loaded": loaded,
    "other weights": other_weights,
    "on meta": on_meta,
    "already there": already_there,
}
