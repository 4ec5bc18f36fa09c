"""Modes of torch around a call, constants of all kinds, helpers in forward, and what people build around a model."""

import copy
import functools
import os
from contextlib import ExitStack
from contextvars import ContextVar
from enum import Enum
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.journey.case import DP_TP, FORWARD, Numbers, Run, case
from tests.journey.stack import WIDTH, Block, Stack, batch


class Body(Stack):
    """The blocks alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Relu(TorchFunctionMode):
    """Takes relu for tanh."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.Tensor.relu if function is torch.Tensor.tanh else function)(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    """Counts ops."""

    num_ops = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return op(*args, **(kwargs or {}))


class Task(Enum):
    """What a forward is asked for."""

    PLAIN = 1
    DOUBLE = 2


@case(refused="Relu, a TorchFunctionMode", peers=False)
def function_mode_around_a_step(run: Run) -> Numbers:
    """A TorchFunctionMode of one's own around a step, which takes relu for tanh"""
    args = batch()
    model = run.compile(Stack(), args=args)
    with Relu():
        return {"loss": run.step(model, *args)}


@case(on=FORWARD, peers=False)
def dispatch_mode_around_steps(run: Run) -> Numbers:
    """A TorchDispatchMode of one's own around steps, which counts ops, from the first one on"""
    args, losses = batch(), []
    model = run.compile(Stack())
    for _ in range(2):
        with Counting() as counting:
            losses.append(run.step(model, *args))
        assert counting.num_ops
    return {"losses": torch.stack(losses)} | run.gradients(model)


@case(on=FORWARD, peers=False)
def constants_of_all_kinds(run: Run) -> Numbers:
    """An Enum, dtype, device, layout, bytes and a complex number among the arguments, and a dtype among the outputs"""

    class Asked(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor, task: Task = Task.PLAIN, *more: Any) -> Any:
            out = self.body(x) * (2 if task is Task.DOUBLE else 1)
            for each in more:
                assert isinstance(each, (torch.dtype, torch.device, torch.layout, bytes, complex)), each
                out = out * abs(each) if isinstance(each, complex) else out
            return (out - y).square().mean(), out.dtype, more

    args, losses = batch(), []
    model = run.compile(Asked())
    for more in ((), (Task.DOUBLE,), (Task.PLAIN, torch.float32, torch.device("cpu"), torch.strided, b"x", 2j)):
        loss, dtype, given = model(*args, *more)
        assert (dtype, given) == (torch.float32, more[1:])
        loss.backward()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | run.gradients(model)


@case(peers=False)
def small_functions_within(run: Run) -> Numbers:
    """A function by torch.jit.script, masks by lru_cache and cached_property, and record_function"""

    @torch.jit.script
    def gelu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x) + y

    @functools.lru_cache
    def mask(size: int) -> torch.Tensor:
        return torch.tril(torch.ones(size, size))

    class Helped(Stack):
        @functools.cached_property
        def scale(self) -> torch.Tensor:
            return torch.linspace(0, 1, WIDTH)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(self.blocks):
                with torch.profiler.record_function(f"block {number}"):
                    x = gelu(block(x), x)
            return x @ mask(WIDTH) * self.scale

    args = batch()
    model = run.compile(Helped())
    return {"losses": torch.stack([run.step(model, *args) for _ in range(2)])} | run.gradients(model)


class Settings:
    """As scripts have them."""

    scale = 1.0


SCALE = ContextVar("SCALE", default=1.0)


@case(on=FORWARD, peers=False)
def what_forward_reads_is_changed(run: Run) -> Numbers:
    """A class of settings, a context variable, os.environ, a method of the class and F.gelu, changed after a step"""

    class Read(Stack):
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * Settings.scale * SCALE.get() * float(os.environ.get("SCALE", "1"))

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.scaled(super().body(x)))

    args = batch()
    model = run.compile(Read(), args=args)
    losses = [run.step(model, *args)]
    with ExitStack() as changes:
        for change in (
            patch.object(Settings, "scale", 2.0),
            patch.dict(os.environ, SCALE="0.5"),
            patch.object(Read, "scaled", lambda self, x: x * Settings.scale * SCALE.get() - 1),
            patch.object(F, "gelu", F.relu),
        ):
            changes.enter_context(change)
            losses.append(run.step(model, *args))
        token = SCALE.set(3.0)
        losses.append(run.step(model, *args))
        SCALE.reset(token)
    losses.append(run.step(model, *args))
    return {"losses": torch.stack(losses)} | run.gradients(model)


@case(on=FORWARD, peers=False)
def hooks_of_the_graph(run: Run) -> Numbers:
    """register_multi_grad_hook of all weights, hooks of grad_fn, allow_mutation_on_saved_tensors"""
    x, y = batch()
    model, sizes = run.compile(Body(), args=(x,)), []
    model(x)
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda found: sizes.append(sum(run.whole(each).abs().sum() for each in found))
    )
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        out = model(x)
        out.grad_fn.register_prehook(lambda found: (found[0] * 2, *found[1:]))
        loss = (out - y).square().mean()
        out.mul_(3)
        loss.grad_fn.register_hook(lambda found, _: tuple(each * 3 for each in found))
        loss.backward()
    return {"loss": loss.detach(), "sizes": torch.stack(sizes)} | run.gradients(model)


@case(on=FORWARD, peers=False)
def network_that_is_followed(run: Run) -> Numbers:
    """DQN: scores of actions by gather, targets of a deep copy that follows by lerp_, a Huber loss"""
    x, y = batch()
    model, actions = run.compile(Body(), args=(x,)), (y[:, :1] > 0).long()
    target, losses = copy.deepcopy(model).requires_grad_(False), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            wanted = y[:, :1] + 0.9 * target(2 * x).max(1, keepdim=True).values
        loss = F.smooth_l1_loss(model(x).gather(1, actions), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for followed, p in zip(target.parameters(), model.parameters()):
                followed.lerp_(p, 0.3)
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | run.parameters(target)


@case(on=FORWARD, peers=False)
def policy_over_permuted_rows(run: Run) -> Numbers:
    """PPO: ratios of a Normal's densities, clipped, values and entropy, rows by randperm in parts of three"""

    class Actor(Body):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.log_std = nn.Linear(WIDTH, 1), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = super().forward(x)
            return h, self.log_std.exp().expand_as(h), self.value(h).squeeze(-1)

    x, y = batch()
    model, generator, losses = run.compile(Actor()), torch.Generator().manual_seed(3), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    with torch.no_grad():
        before = torch.distributions.Normal(*model(x)[:2]).log_prob(y).sum(-1)
    for rows in torch.randperm(len(x), generator=generator).split(3):
        mean, std, value = model(x[rows])
        policy, gain = torch.distributions.Normal(mean, std), y[rows].sum(-1)
        ratio = (policy.log_prob(y[rows]).sum(-1) - before[rows]).exp()
        loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * policy.entropy().mean()
        loss = loss + (value - gain).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | run.parameters(model)


@case(on=FORWARD, peers=False)
def penalty_every_second_step(run: Run) -> Numbers:
    """R1: the squared gradient of scores in real inputs every second step, by a backward of its own"""
    x, _ = batch()
    model, losses = run.compile(Body(), args=(x,)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        loss = F.softplus(model(x)).mean()
        loss.backward()
        if step % 2 == 0:
            real = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(model(real).sum(), real, create_graph=True)
            penalty = gradient.square().sum(1).mean()
            (2 * penalty).backward()
            loss = loss + penalty
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | run.parameters(model)


@case(on=FORWARD, peers=False)
def heads_in_turn(run: Run) -> Numbers:
    """One of three heads in each step, named by an argument: AdamW leaves out those without a gradient"""

    class Headed(Body):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 3) for name in "abc"})

        def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
            return self.heads[name](super().forward(x))

    x, y = batch()
    model, losses = run.compile(Headed()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5, eps=1e-3)
    for name in "abacb":
        optimizer.zero_grad()
        loss = (model(x, name) - y[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | run.parameters(model)


@case(on=FORWARD, peers=False)
def tensors_exchanged(run: Run) -> Numbers:
    """torch.utils.swap_tensors of two weights, and set_swap_module_params_on_conversion with load_state_dict"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    blocks = run.inner(model).blocks
    torch.utils.swap_tensors(blocks[0].up.weight, blocks[1].up.weight)
    model.zero_grad()
    second = run.step(model, *args)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: run.whole(p).clone() / 2 for name, p in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model.zero_grad()
    return {"losses": torch.stack([first, second, run.step(model, *args)])} | run.gradients(model)


@case(on=FORWARD, peers=False)
def norm_fused_after_training(run: Run) -> Numbers:
    """fuse_linear_bn_eval of a trained layer and its batch norm, which nn.Identity takes the place of"""
    x, y = batch()
    model = run.compile(nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)), args=(x,))
    (model(x) - y).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    inner, before = run.inner(model), model(x).detach()
    inner[0], inner[1] = torch.nn.utils.fusion.fuse_linear_bn_eval(inner[0], inner[1]), nn.Identity()
    return {"before": before, "fused": model(x).detach()}


@case(on=FORWARD, peers=False)
def quantised_weights(run: Run) -> Numbers:
    """torch.fake_quantize_per_channel_affine of weights, by the largest entry of each row"""

    class Rounded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scales, zeros = self.weight.detach().abs().amax(1) / 127, torch.zeros(self.out_features, dtype=torch.int32)
            rounded = torch.fake_quantize_per_channel_affine(self.weight, scales, zeros, 0, -128, 127)
            return F.linear(x, rounded, self.bias)

    class RoundedBlock(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up = Rounded(WIDTH, 2 * WIDTH)

    args = batch()
    model = run.compile(Stack(RoundedBlock), args=args)
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(on=(DP_TP,), peers=False, refused="of a model that autopar.compile returned")
def derivative_kept_as_a_function(run: Run) -> Numbers:
    """torch.func.linearize of the compiled model in its input"""
    x, y = batch()
    model = run.compile(Body(), args=(x,))
    return {"along": torch.func.linearize(lambda z: model(z), x)[1](y)}
