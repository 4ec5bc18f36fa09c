"""Further ways in which models are called, changed and taken apart."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.stack import BATCH, WIDTH, Block, Stack, batch


class Outputs(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def stepped(run: Run, model: nn.Module, *args: Any) -> Numbers:
    """Loss and gradients of a step."""
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case(tolerance=0.05)
def half_precision_before_compile(run: Run) -> Numbers:
    """model.bfloat16() before compile"""
    args = tuple(x.bfloat16() for x in batch())
    return stepped(run, run.compile(Stack().bfloat16(), args=args), *args)


@case(on=FORWARD, tolerance=0.05)
def half_precision_after_compile(run: Run) -> Numbers:
    """model.to(torch.bfloat16) after a step"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    model.zero_grad()
    model.to(torch.bfloat16)
    return stepped(run, model, *(x.bfloat16() for x in args))


@case(on=(PP,), refused="changed .* after the model was cut into stages", peers=False)
def dtype_changed_with_stages(run: Run) -> Numbers:
    """model.double() after a step, with stages"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    model.double()
    return stepped(run, model, *(x.double() for x in args))


@case()
def moved_to_where_it_is(run: Run) -> Numbers:
    """model.to("cpu"), model.cpu(), model.float() after compile"""
    args = batch()
    model = run.compile(Stack(), args=args)
    model.to("cpu").cpu().float()
    return stepped(run, model, *args)


@case(on=FORWARD)
def empty_batch(run: Run) -> Numbers:
    """A batch without rows: the sum of squares is 0, gradients are 0"""

    class Summed(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.body(x) - y).square().sum()

    args = batch()
    model = run.compile(Summed(), args=args)
    run.step(model, *args)
    model.zero_grad()
    return stepped(run, model, *(x[:0] for x in args))


@case(on=FORWARD)
def batch_of_one(run: Run) -> Numbers:
    """A single row after batches of eight"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    model.zero_grad()
    return stepped(run, model, *(x[:1] for x in args))


@case(on=FORWARD)
def last_batch_smaller(run: Run) -> Numbers:
    """An epoch whose last batch has four rows of eight, twice"""
    model, found = run.compile(Stack(), args=batch()), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, rows in enumerate((8, 4, 8, 4)):
        args = batch()
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *(x[:rows].repeat(8 // rows, 1) for x in args))
        optimizer.step()
    return found | run.parameters(model)


@case(on=FORWARD)
def sequential_model(run: Run) -> Numbers:
    """An nn.Sequential, its loss outside"""
    x, y = batch()
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(inplace=True), nn.Linear(16, WIDTH), nn.Sigmoid())
    model = run.compile(model, args=(x,))
    loss = F.binary_cross_entropy(run.whole(model(x)), y.sigmoid())
    loss.backward()
    return {"loss": loss.detach(), "layer": run.whole(model[0].weight.detach())} | run.gradients(model)


@case(on=FORWARD, refused="a plain tensor beside a DTensor.*Call the model")
def part_of_the_model_called(run: Run) -> Numbers:
    """model.blocks[0](x): a submodule of the compiled model called by itself"""
    x, y = batch()
    model = run.compile(Stack(), args=(x, y))
    first = run.step(model, x, y)
    out = run.inner(model).blocks[0](x)
    return {"first": first, "out": run.whole(out.detach())}


@case(on=FORWARD, refused="a plain tensor beside a DTensor.*Call the model")
def other_method_called(run: Run) -> Numbers:
    """model.body(x): a method other than forward"""
    x, y = batch()
    model = run.compile(Stack(), args=(x, y))
    first = run.step(model, x, y)
    return {"first": first, "out": run.whole(run.inner(model).body(x).detach())}


@case(on=FORWARD)
def functional_call(run: Run) -> Numbers:
    """torch.func.functional_call with other weights"""
    args = batch()
    model = run.compile(Stack(), args=args)
    weights = {fqn: p.detach() * 0.5 for fqn, p in run.inner(model).named_parameters()}
    first = run.step(model, *args)
    loss = torch.func.functional_call(run.inner(model), weights, args)
    return {"first": first, "second": loss.detach(), "third": run.step(model, *args)} | run.gradients(model)


@case(on=FORWARD)
def generator_and_critic(run: Run) -> Numbers:
    """Two optimizers that take turns, the generator's output detached for the critic"""
    x, y = batch()
    generator = run.compile(Outputs(), args=(x,))
    critic = run.compile(Stack(), args=(x, y))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-3) for m in (generator, critic)]
    found = {}
    for number in range(2):
        fake = generator(x)
        optimizers[1].zero_grad()
        loss = critic(y, y) - critic(fake.detach(), y)
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        other = critic(generator(x), y)
        other.backward()
        optimizers[0].step()
        found |= {f"critic {number}": loss.detach(), f"generator {number}": other.detach()}
    return found | run.parameters(generator) | {f"critic {fqn}": p for fqn, p in run.parameters(critic).items()}


@case()
def plateau(run: Run) -> Numbers:
    """ReduceLROnPlateau by the loss, and the learning rate afterwards"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for _ in range(3):
        optimizer.zero_grad()
        schedule.step(run.step(model, *args) * 0 + 1)
        optimizer.step()
    return {"rate": torch.tensor(optimizer.param_groups[0]["lr"])} | run.parameters(model)


@case()
def once_a_cycle(run: Run) -> Numbers:
    """OneCycleLR, which changes momentum too, and its state saved and loaded"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=6)
    for number in range(4):
        optimizer.zero_grad()
        run.step(model, *args)
        optimizer.step()
        schedule.step()
        if number == 1:
            schedule.load_state_dict(copy.deepcopy(schedule.state_dict()))
    return run.parameters(model)


class Pruned(Block):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.up, "weight", 0.5)


@case()
def pruned_before_compile(run: Run) -> Numbers:
    """torch.nn.utils.prune before compile: a mask that a forward hook applies"""
    args = batch()
    return stepped(run, run.compile(Stack(Pruned), args=args), *args)


@case(on=FORWARD)
def parametrized_after_compile(run: Run) -> Numbers:
    """torch.nn.utils.parametrize.register_parametrization after a step"""

    class Symmetric(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.triu() + weight.triu(1).T

    class Square(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Linear(WIDTH, WIDTH)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.square(super().body(x))

    args = batch()
    model = run.compile(Square(), args=args)
    first = run.step(model, *args)
    model.zero_grad()
    parametrize.register_parametrization(run.inner(model).square, "weight", Symmetric())
    return {"first": first} | stepped(run, model, *args)


@case(on=FORWARD)
def tied_after_compile(run: Run) -> Numbers:
    """One layer's weight made another's after a step"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    model.zero_grad()
    inner = run.inner(model)
    inner.blocks[1].up.weight = inner.blocks[0].up.weight
    return {"first": first} | stepped(run, model, *args)


@case(on=FORWARD)
def block_removed(run: Run) -> Numbers:
    """del model.blocks[1] after a step"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    model.zero_grad()
    del run.inner(model).blocks[1]
    return {"first": first} | stepped(run, model, *args)


@case(on=FORWARD)
def blocks_swapped_and_added(run: Run) -> Numbers:
    """Blocks in another order, and a new one at the end"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = run.step(model, *args)
    model.zero_grad()
    inner = run.inner(model)
    inner.blocks = nn.ModuleList([inner.blocks[2], inner.blocks[0], inner.blocks[1]])
    torch.manual_seed(2)
    inner.blocks.append(Block())
    return {"first": first} | stepped(run, model, *args)


class Scored(Stack):
    """Returns what a trainer logs beside the loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        out = self.body(x)
        right = out.argmax(-1) == y.argmax(-1)
        return {"loss": (out - y).square().mean(), "right": right.float().mean(), "best": out.argmax(-1), "n": len(x)}


@case(on=FORWARD)
def metrics_returned(run: Run) -> Numbers:
    """Accuracy, predictions and a number beside the loss, which are logged by item() and gathered"""
    args = batch()
    model = run.compile(Scored(), args=args)
    out = model(*args)
    out["loss"].backward()
    logged = torch.tensor([out["loss"].item(), float(out["right"]), out["n"]])
    return {"logged": logged, "best": run.whole(out["best"])} | run.gradients(model)


@case(on=FORWARD)
def outputs_in_a_metric_outside(run: Run) -> Numbers:
    """(model(x).argmax(-1) == y).float().mean() outside, with y whole"""
    x, y = batch()
    model = run.compile(Outputs(), args=(x,))
    with torch.no_grad():
        out = run.whole(model(x))
    return {"right": (out.argmax(-1) == y.argmax(-1)).float().mean()}


@case(on=FORWARD)
def gradient_with_respect_to_the_input_alone(run: Run) -> Numbers:
    """torch.autograd.grad(loss, x) without gradients of weights (saliency)"""
    x, y = batch()
    x.requires_grad_()
    model = run.compile(Stack(), args=(x, y))
    (gradient,) = torch.autograd.grad(model(x, y), x)
    assert all(p.grad is None for p in model.parameters())
    return {"gradient": run.whole(gradient)}


@case(on=FORWARD)
def input_that_is_a_parameter(run: Run) -> Numbers:
    """A prompt outside the model that is trained (textual inversion)"""
    x, y = batch()
    prompt = nn.Parameter(torch.zeros(WIDTH))
    model = run.compile(Stack(), args=((x + prompt).detach().requires_grad_(), y))
    optimizer, found = torch.optim.SGD([prompt], lr=0.5), {}
    for number in range(3):
        optimizer.zero_grad()
        loss = model(x + prompt, y)
        loss.backward()
        optimizer.step()
        found[f"loss {number}"] = loss.detach()
    return found | {"prompt": prompt.detach()}


class Detaching(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x.detach()) + x)


@case(on=FORWARD)
def detached_part(run: Run) -> Numbers:
    """x.detach() in forward, of what a block makes"""
    args = batch()
    return stepped(run, run.compile(Detaching(), args=args), *args)


@case(on=FORWARD)
def gradient_mode_inside(run: Run) -> Numbers:
    """torch.no_grad, torch.enable_grad and torch.set_grad_enabled in forward"""

    class Modes(Stack):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.blocks[0](x)
                with torch.enable_grad():
                    x = self.blocks[1](x)
            with torch.set_grad_enabled(self.training):
                return self.blocks[2](x)

    args = batch()
    return stepped(run, run.compile(Modes(), args=args), *args)


@case()
def inputs_of_integers_and_booleans(run: Run) -> Numbers:
    """Integers, booleans, bytes and half precision, converted in forward"""

    class Converts(Stack):
        def forward(self, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float() / 128 * mask, y.float())

    x = torch.randint(256, (BATCH, WIDTH), dtype=torch.uint8)
    args = x, x > 100, torch.randn(BATCH, WIDTH).half()
    return stepped(run, run.compile(Converts(), args=args), *args)
