"""What a forward does besides computing its output."""

import random
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.stack import WIDTH, Block, Stack, batch


def stepped(run: Run, model: nn.Module, times: int = 1) -> Numbers:
    args = batch()
    model = run.compile(model, args=args)
    return {f"loss {i}": run.step(model, *args) for i in range(times)} | run.gradients(model)


class Auxiliary(Stack):
    """Leaves a second loss as an attribute (a router's balance)."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = torch.zeros(())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        self.auxiliary = out.square().mean()
        return (out - y).square().mean()


@case(on=FORWARD, refused=r"effects.py:\d+: the forward leaves a result in attribute auxiliary,.*: return it")
def loss_left_as_an_attribute(run: Run) -> Numbers:
    """self.auxiliary = ... in forward, added to the loss outside"""
    args = batch()
    model = run.compile(Auxiliary(), args=args)
    loss = model(*args)
    loss = loss + run.inner(model).auxiliary
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


class AuxiliaryOfBlocks(Block):
    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        self.auxiliary = hidden.square().mean()
        return x + self.down(hidden.tanh())


@case(on=FORWARD, refused=r"the forward leaves a result in attribute blocks.0.auxiliary,.*: return it")
def losses_left_in_blocks(run: Run) -> Numbers:
    """self.auxiliary of each block, a number at first, summed outside"""
    args = batch()
    model = run.compile(Stack(AuxiliaryOfBlocks), args=args)
    loss = model(*args)
    loss = loss + sum(block.auxiliary for block in run.inner(model).blocks)
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


class SumsWithin(Stack):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        return (out - y).square().mean() + sum(block.auxiliary for block in self.blocks)


@case()
def losses_left_in_blocks_and_summed_in_forward(run: Run) -> Numbers:
    """self.auxiliary of each block, summed by the model's own forward"""
    return stepped(run, SumsWithin(AuxiliaryOfBlocks))


class Configured(Block):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.config.scale *= 0.5
        return super().forward(x) * self.config.scale


@case(refused=r"the forward keeps state in attribute blocks.0.config")
def config_changed_in_forward(run: Run) -> Numbers:
    """self.config.scale *= 0.5 in forward"""
    return stepped(run, Stack(Configured), 3)


class Depth(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if random.random() < 0.5 else x


@case(refused="draws from Python's random", peers=False)
def layers_dropped_by_python(run: Run) -> Numbers:
    """random.random() < 0.5 in forward (stochastic depth)"""
    return stepped(run, Stack(Depth), 3)


class Jitter(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * float(np.random.uniform(0.5, 1.5)))


@case(refused="draws from numpy.random")
def scaled_by_numpy(run: Run) -> Numbers:
    """np.random.uniform() in forward"""
    return stepped(run, Stack(Jitter), 3)


@case(on=FORWARD, refused=r"blocks.1 has a forward hook that returns nothing, .*effects.py:\d+")
def features_of_a_forward_hook(run: Run) -> Numbers:
    """A forward hook that appends what a block returns to a list"""
    args, model, features = batch(), Stack(), []
    model.blocks[1].register_forward_hook(lambda module, args, output: features.append(output.detach()))
    model = run.compile(model, args=args)
    found = {"loss": run.step(model, *args)}
    run.step(model, *args)
    return found | {"features": run.whole(features[-1]), "number": torch.tensor(len(features))}


@case(on=FORWARD, refused=r"blocks.1 has a forward hook that returns nothing, .*effects.py:\d+")
def norms_of_a_forward_hook(run: Run) -> Numbers:
    """A forward hook that keeps the mean of what a block returns in a dict (a log)"""
    args, model, log = batch(), Stack(), {}

    def keep(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        log["mean"] = output.detach().mean()

    model.blocks[1].register_forward_hook(keep)
    model = run.compile(model, args=args)
    found = {"loss": run.step(model, *args)}
    return found | {"mean": run.whole(log["mean"])}


@case(on=FORWARD, refused=r"blocks.1 has a forward hook that returns nothing, .*effects.py:\d+")
def features_of_a_forward_hook_set_later(run: Run) -> Numbers:
    """A forward hook that appends what a block returns, set after compile"""
    args, features = batch(), []
    model = run.compile(Stack(), args=args)
    inner = run.inner(model)
    handle = inner.blocks[1].register_forward_hook(lambda module, args, output: features.append(output.detach()))
    found = {"loss": run.step(model, *args)}
    handle.remove()
    run.step(model, *args)
    return found | {"features": run.whole(features[-1]), "number": torch.tensor(len(features))}


@case(on=FORWARD)
def hook_of_the_module_itself_that_logs(run: Run) -> Numbers:
    """A forward hook of the module itself that counts its calls and keeps its output"""
    args, outputs = batch(), []
    model = run.compile(Stack(), args=args)
    run.inner(model).register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    for _ in range(2):
        run.step(model, *args)
    return {"output": outputs[-1], "number": torch.tensor(len(outputs))}


class Writes(Stack):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return (self.body(x) - y).square().mean()


@case(refused=r"effects.py:\d+: the forward changes argument x in place")
def argument_written(run: Run) -> Numbers:
    """x.mul_(2) of an argument, which the caller reads afterwards"""
    x, y = batch()
    x = x.clone()
    model = run.compile(Writes(), args=(x.clone(), y))
    loss = run.step(model, x, y)
    return {"loss": loss, "x": x} | run.gradients(model)


class ReturnsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.stack(x, y), x, x[:, :2], self.stack.blocks[0].up.weight


@case(on=FORWARD)
def input_and_weight_returned(run: Run) -> Numbers:
    """The input, a view of it and a weight are among the outputs"""
    args = batch()
    model = run.compile(ReturnsInput(), args=args)
    loss, x, part, weight = model(*args)
    (loss + run.whole(weight).square().sum()).backward()
    return {"loss": loss.detach(), "x": run.whole(x), "part": run.whole(part)} | run.gradients(model)


class Outputs(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@case(on=FORWARD)
def output_written(run: Run) -> Numbers:
    """out.mul_(2) of what the model returned, before the loss"""
    x, y = batch()
    model = run.compile(Outputs(), args=(x,))
    out = model(x)
    out.mul_(2)
    loss = F.mse_loss(run.whole(out), y)
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


@case(on=FORWARD)
def hook_on_the_output(run: Run) -> Numbers:
    """out.register_hook and out.retain_grad of what the model returned"""
    x, y = batch()
    model = run.compile(Outputs(), args=(x,))
    out = model(x)
    out.retain_grad()
    out.register_hook(lambda grad: 3 * grad)
    F.mse_loss(run.whole(out), y).backward()
    return {"gradient": run.whole(out.grad)} | run.gradients(model)


class Branches(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if torch.is_grad_enabled() else 0.5 * x)


@case(on=FORWARD)
def branch_on_grad_mode(run: Run) -> Numbers:
    """torch.is_grad_enabled() in forward"""
    args = batch()
    model = run.compile(Stack(Branches), args=args)
    found = {"trained": run.step(model, *args)}
    with torch.no_grad():
        found["evaluated"] = model(*args)
    return found | run.gradients(model)


@case(on=FORWARD, tolerance=1e-3)
def autocast_outside(run: Run) -> Numbers:
    """with torch.autocast("cpu", torch.bfloat16): model(...)"""
    args = batch()
    model = run.compile(Stack(), args=args)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*args)
    loss.backward()
    return {"loss": loss.detach().float()}


@case(on=FORWARD, tolerance=1e-3)
def autocast_outside_later(run: Run) -> Numbers:
    """A step without torch.autocast, then one with it"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*args)
    loss.backward()
    return {"loss": loss.detach().float()}


class Typed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.full((WIDTH,), 1 / 3).to(x.dtype))


@case(on=FORWARD)
def default_dtype_changed(run: Run) -> Numbers:
    """torch.set_default_dtype(torch.float64) after a step"""
    args = batch()
    model = run.compile(Stack(Typed).double(), args=tuple(x.double() for x in args))
    first = run.step(model, *(x.double() for x in args))
    torch.set_default_dtype(torch.float64)
    try:
        second = run.step(model, *(x.double() for x in args))
    finally:
        torch.set_default_dtype(torch.float32)
    return {"difference": (second - first) * 1e6} | run.gradients(model)


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Dropout(0.9), nn.BatchNorm1d(WIDTH), Block()])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - y).square().mean()


@case(on=FORWARD)
def modes_of_single_modules(run: Run) -> Numbers:
    """train() of all and eval() of a dropout and a batch norm, after a step in eval()"""
    args = batch()
    model = run.compile(Partial(), args=args)
    inner = run.inner(model)
    model.eval()
    found = {"evaluated": run.step(model, *args)}
    model.train()
    inner.blocks[1].eval()
    inner.blocks[2].eval()
    return found | {"trained": run.step(model, *args)} | run.gradients(model) | run.buffers(inner)


class Random(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().body(x), 0.5)


@case(on=FORWARD)
def dropout_with_seeds(run: Run) -> Numbers:
    """F.dropout: the same numbers for the same seed, others for another, about as many zeros"""
    args = batch()
    model = run.compile(Random(), args=args)
    losses = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        losses.append(model(*args).detach())
    return {"same": (losses[0] == losses[1]).float(), "other": (losses[0] != losses[2]).float()}


@case(refused={PP: "call model.apply.* before autopar.compile"})
def initialised_again(run: Run) -> Numbers:
    """model.apply of an initialisation by random numbers after compile, seeded"""
    args = batch()
    model = run.compile(Stack(), args=args)

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
            nn.init.zeros_(module.bias)

    torch.manual_seed(7)
    model.apply(initialise)
    return {"loss": run.step(model, *args)} | run.parameters(model)


@case(on=FORWARD)
def weight_initialised_again(run: Run) -> Numbers:
    """nn.init.kaiming_uniform_ of a weight, and reset_parameters() of a layer, after a step"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    model.zero_grad()
    inner = run.inner(model)
    torch.manual_seed(7)
    nn.init.kaiming_uniform_(inner.blocks[0].up.weight)
    inner.blocks[2].down.reset_parameters()
    return {"loss": run.step(model, *args)} | run.gradients(model) | run.parameters(model)


@case(on=FORWARD)
def noise_on_weights_and_gradients(run: Run) -> Numbers:
    """p.add_(torch.randn_like(p)), p.grad.add_(torch.rand_like(p.grad)), and torch.bernoulli"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p)).mul_(torch.bernoulli(torch.full_like(p, 0.5)))
            p.grad.add_(torch.rand_like(p.grad))
    return run.gradients(model) | run.parameters(model)


@case(refused="of its own stages", on=(PP,), peers=False)
def weight_initialised_again_with_stages(run: Run) -> Numbers:
    """nn.init.normal_ of this rank's weights after compile, with stages"""
    args = batch()
    model = run.compile(Stack(), args=args)
    for p in model.parameters():
        nn.init.normal_(p)
    return run.parameters(model)


@case(on=FORWARD, refused="was read as a number")
def gradient_tested_for_nan(run: Run) -> Numbers:
    """if torch.isnan(p.grad).any(): a step is skipped"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    with torch.no_grad():
        next(iter(model.parameters())).grad[0, 0] = float("nan")
    num_skipped = sum(bool(torch.isnan(p.grad).any()) for p in model.parameters())
    return {"skipped": torch.tensor(num_skipped)}
