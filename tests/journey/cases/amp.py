"""Mixed precision: autocast in and around the model, and GradScaler."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.stack import WIDTH, Block, Stack, batch

HALF = 3e-2  # of sums in bfloat16, in another order


class Scaled(Stack):
    """A gain, which every rank has whole, before the weights in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.gain, y)


def _put(x: torch.Tensor, content: torch.Tensor) -> None:
    if isinstance(x, DTensor):
        content = distribute_tensor(content, x.device_mesh, x.placements, src_data_rank=None).to_local()
        x = x.to_local()
    x.copy_(content)


@case(on=FORWARD)
def infinite_entry_of_one_rank(run: Run) -> Numbers:
    """GradScaler where one entry of one gradient, of which one rank has the part, is infinite"""
    args, model = batch(), Scaled()
    model = run.compile(model, args=args)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(model(*args)).backward()
    gradient = model.blocks[1].up.weight.grad
    content = run.whole(gradient).clone()
    content[-1, -1] = torch.inf
    with torch.no_grad():
        _put(gradient, content)
    scaler.step(optimizer)
    scaler.update()
    return {"scale": torch.tensor(scaler.get_scale())} | run.parameters(model)


def _scaled_step(model: nn.Module, scaler: torch.amp.GradScaler, *args: torch.Tensor) -> torch.Tensor:
    """Backward of the scaled loss, by train_step where there is one."""
    if hasattr(model, "train_step"):
        return model.train_step(*args, scaler=scaler)
    loss = model(*args)
    scaler.scale(loss).backward()
    return loss.detach()


def _of_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.amp.GradScaler]:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), scaler


@case(peers=False)
def scaler_of_train_step(run: Run) -> Numbers:
    """model.train_step(..., scaler=scaler), unscale_, clip_grad_norm_ and step, with stages too"""
    args = batch()
    model, found = run.compile(Stack(), args=args), {}
    optimizer, scaler = _of_optimizer(model)
    for number in range(3):
        optimizer.zero_grad(set_to_none=number > 1)
        found[f"loss {number}"] = _scaled_step(model, scaler, *args)
        found |= {f"scaled {fqn}, {number}": x.clone() for fqn, x in run.gradients(model).items()}
        scaler.unscale_(optimizer)
        own = getattr(model, "clip_grad_norm_", lambda most: nn.utils.clip_grad_norm_(model.parameters(), most))
        found[f"norm {number}"] = run.whole(own(0.5)).float()
        scaler.step(optimizer)
        scaler.update()
        found[f"scale {number}"] = torch.tensor(scaler.get_scale())
    return found | run.parameters(model)


@case(peers=False)
def infinite_in_one_stage(run: Run) -> Numbers:
    """GradScaler where a gradient of the last stage is infinite: no rank updates, and all halve the scale"""
    args = batch()
    model, found = run.compile(Stack(), args=args), {}
    optimizer, scaler = _of_optimizer(model)
    for number in range(3):
        optimizer.zero_grad()
        _scaled_step(model, scaler, *args)
        for fqn, parameter in run.named(model) if number == 1 else ():
            if fqn == "blocks.2.up.weight":
                content = run.whole(parameter.grad).clone()
                content[-1, -1] = torch.inf
                with torch.no_grad():
                    _put(parameter.grad, content)
        scaler.step(optimizer)
        scaler.update()
        found |= {f"scale {number}": torch.tensor(scaler.get_scale())}
        found |= {f"{fqn} {number}": x for fqn, x in run.parameters(model).items()}
    return found


@case()
def scale_that_overflows(run: Run) -> Numbers:
    """A scale by which the loss is infinite, then half of it and so on"""
    args, found = batch(), {}
    model = run.compile(Stack(), args=args)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for number in range(6):
        optimizer.zero_grad()
        found[f"loss {number}"] = _scaled_step(model, scaler, *(8 * x for x in args))
        scaler.step(optimizer)
        scaler.update()
        found[f"scale {number}"] = torch.tensor(scaler.get_scale())
    return found | run.parameters(model)


@case()
def scaler_that_is_off(run: Run) -> Numbers:
    """GradScaler(enabled=False) in the same loop"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    _scaled_step(model, scaler, *args)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return run.parameters(model)


@case(on=(PP,), refused=r"was not multiplied by its scale.*train_step\(\.\.\., scaler=scaler\)")
def scaler_around_a_step(run: Run) -> Numbers:
    """GradScaler's unscale_ after a train_step that was not given it"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer, scaler = _of_optimizer(model)
    scaler.scale(torch.zeros(()))
    run.step(model, *args)
    scaler.unscale_(optimizer)
    return run.parameters(model)


class Uneven(Stack):
    """Its last three blocks are in float64."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        self.blocks[3:].double()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:3]:
            x = block(x)
        x = x.double()
        for block in self.blocks[3:]:
            x = block(x)
        return x.float()


@case(refused={PP: r"several dtypes \(torch.float32, torch.float64\).*have them in one dtype"})
def scaler_of_two_dtypes(run: Run) -> Numbers:
    """GradScaler over gradients in float32 and, of the last blocks, float64"""
    args = batch()
    model = run.compile(Uneven(), args=args)
    optimizer, scaler = _of_optimizer(model)
    loss = _scaled_step(model, scaler, *args)
    scaler.step(optimizer)
    return {"loss": loss} | run.parameters(model)


def _kinds(**tensors: torch.Tensor) -> Numbers:
    return {name: torch.tensor(str(x.dtype) == "torch.float32").float() for name, x in tensors.items()}


@case(on=FORWARD, tolerance=HALF)
def trained_under_autocast(run: Run) -> Numbers:
    """Gradients of a forward under torch.autocast, and the dtype of its loss"""
    args = batch()
    model = run.compile(Stack(), args=args)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*args)
    loss.backward()
    return {"loss": loss.detach().float()} | _kinds(kind=loss) | run.gradients(model)


@case(tolerance=HALF)
def compiled_under_autocast(run: Run) -> Numbers:
    """Compiled and stepped under torch.autocast"""
    args = batch()
    with torch.autocast("cpu", torch.bfloat16):
        model = run.compile(Stack(), args=args)
        loss = run.step(model, *args)
    return {"loss": loss.float()} | run.gradients(model)


@case(on=FORWARD, tolerance=HALF)
def with_and_without_autocast(run: Run) -> Numbers:
    """A call under torch.autocast between two without"""
    args = batch()
    model = run.compile(Stack(), args=args)
    first = model(*args).detach()
    with torch.autocast("cpu", torch.bfloat16):
        second = model(*args).detach()
    third = model(*args).detach()
    return {"first": first, "second": second.float(), "third": third, "same": (first == third).float()} | _kinds(
        kind=second, last=third
    )


class Mixed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            up = self.up(x).tanh()
            with torch.autocast("cpu", enabled=False):
                gate = up.float().softmax(-1)
        return x + self.down(up.float() * gate)


@case(tolerance=HALF)
def regions_in_forward(run: Run) -> Numbers:
    """torch.autocast in forward, switched off again inside"""
    args = batch()
    model = run.compile(Stack(Mixed), args=args)
    loss = run.step(model, *args)
    return {"loss": loss} | run.gradients(model)


class Attends(nn.Module):
    """Attention, norms, a softmax and a sum, of which autocast leaves some in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.both, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.both(self.norm(x)).view(2, 2, -1, 3 * WIDTH).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).reshape(-1, WIDTH)
        return x + self.out(mixed) * x.float().softmax(-1).sum()


@case(on=FORWARD, tolerance=HALF)
def attention_under_autocast(run: Run) -> Numbers:
    """Attention, norms and softmax under torch.autocast"""
    args = batch()
    model = run.compile(Stack(Attends), args=args)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*args)
    loss.backward()
    return {"loss": loss.detach().float()} | _kinds(kind=loss) | run.gradients(model)


class Upcast(Block):
    """A softmax in float32 of what is a half only under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return x + self.down((100 * up).float().softmax(-1) * (2.0 if up.dtype == torch.bfloat16 else 1.0))


@case(on=FORWARD, tolerance=HALF)
def casts_that_only_autocast_needs(run: Run) -> Numbers:
    """x.float() and a branch on a dtype, without torch.autocast first, then with it"""
    args = batch()
    model = run.compile(Stack(Upcast), args=args)
    run.step(model, *args)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*args)
    loss.backward()
    return {"loss": loss.detach().float()} | run.gradients(model)
