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


@case(on=FORWARD, peers=False)
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


@case(refused={PP: "this rank's stages only.*without a GradScaler"}, peers=False)
def scaler_around_a_step(run: Run) -> Numbers:
    """GradScaler with stages too"""
    args, model = batch(), Stack()
    model = run.compile(model, args=args)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    run.step(model, *args)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return run.parameters(model)


def _kinds(**tensors: torch.Tensor) -> Numbers:
    return {name: torch.tensor(str(x.dtype) == "torch.float32").float() for name, x in tensors.items()}


@case(on=FORWARD, peers=False, tolerance=HALF)
def trained_under_autocast(run: Run) -> Numbers:
    """Gradients of a forward under torch.autocast, and the dtype of its loss"""
    args = batch()
    model = run.compile(Stack(), args=args)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*args)
    loss.backward()
    return {"loss": loss.detach().float()} | _kinds(kind=loss) | run.gradients(model)


@case(peers=False, tolerance=HALF)
def compiled_under_autocast(run: Run) -> Numbers:
    """Compiled and stepped under torch.autocast"""
    args = batch()
    with torch.autocast("cpu", torch.bfloat16):
        model = run.compile(Stack(), args=args)
        loss = run.step(model, *args)
    return {"loss": loss.float()} | run.gradients(model)


@case(on=FORWARD, peers=False, tolerance=HALF)
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


@case(peers=False, tolerance=HALF)
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


@case(on=FORWARD, peers=False, tolerance=HALF)
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


@case(on=FORWARD, peers=False, tolerance=HALF)
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
