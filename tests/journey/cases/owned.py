"""Classes with names, calls and rules of their own, and weights beside plain tensors."""

import copy
from typing import Any, ClassVar

import torch
from torch import nn

from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.stack import BATCH, WIDTH, Stack, batch

IN_STAGES = "plain tensor was written into one of this rank's stages"


def _steps(run: Run, model: nn.Module, args: tuple[Any, ...]) -> Numbers:
    optimizer = torch.optim.SGD(run.inner(model).parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(run.step(model, *args))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses)} | run.parameters(model)


@case(peers=False)
def call_of_its_own(run: Run) -> Numbers:
    """A model whose class has a `__call__` of its own, which doubles what forward gives"""

    class Doubled(Stack):
        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return 2 * super().__call__(*args, **kwargs)

    args = batch()
    return _steps(run, run.compile(Doubled(), args=args), args)


class Holding(nn.Module):
    """A layer that reads its weights and a running mean from a list, a dict and an attribute, which hold them too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.listed, self.named, self.kept = [self.weight], {"own": (self.bias, 2.0)}, self.mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        (weight,), (bias, factor) = self.listed, self.named["own"]
        return x + (x @ weight + factor * bias - self.kept).tanh()


def _of_two_batches(run: Run, model: nn.Module, args: tuple[Any, ...]) -> Numbers:
    numbers = _steps(run, model, args)
    fewer = tuple(x[: BATCH // 2] for x in args)
    return numbers | {"fewer rows": run.step(model, *fewer)} | run.gradients(model) | run.buffers(model)


@case(on=FORWARD, peers=False)
def weights_in_a_list(run: Run) -> Numbers:
    """Weights and a buffer that forward reads from a list, a dict and an attribute of another name"""
    args = batch()
    return _of_two_batches(run, run.compile(Stack(Holding), args=args), args)


@case(on=FORWARD, peers=False)
def weights_in_a_list_unplanned(run: Run) -> Numbers:
    """The same, planned in the first call"""
    return _of_two_batches(run, run.compile(Stack(Holding)), batch())


@case(on=FORWARD, peers=False, refused=dict.fromkeys(FORWARD, "__call__ of its own"))
def call_of_its_own_with_loss_fn(run: Run) -> Numbers:
    """The same with loss_fn="""

    class Doubled(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return 2 * super().__call__(*args, **kwargs)

    model = Doubled(WIDTH, WIDTH)
    run.compile(model, args=batch(), loss_fn=nn.functional.mse_loss)
    return run.parameters(model)


@case(on=FORWARD, peers=False)
def names_that_autopar_has(run: Run) -> Numbers:
    """A model with a train_step, a clip_grad_norm_, a layer `plan` and a number `code` of its own: they stay"""

    class Named(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.plan, self.code = nn.Linear(WIDTH, WIDTH), 3.0

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.code * self.plan(super().body(x))

        def train_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return 2 * self(x, y)

        def clip_grad_norm_(self, max_norm: float) -> float:
            return -max_norm

    args = batch()
    model = run.compile(Named(), args=args)
    loss = model.train_step(*args)
    loss.backward()
    given = [model.clip_grad_norm_(1.0), model.code, float(model.plan.in_features)]
    model.code = 2.0
    return {"loss": loss, "again": model(*args), "given": torch.tensor(given)} | run.gradients(model)


class Listed(Stack):
    """Keeps a list of its subclasses, each of which says what kind it is."""

    kinds: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, kind: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kinds.append(kind)
        cls.kind = kind


class Small(Listed, kind="small"):
    """One of them."""


@case(peers=False)
def subclasses_that_are_listed(run: Run) -> Numbers:
    """`__init_subclass__` that wants an argument, and lists classes"""
    args = batch()
    numbers = _steps(run, run.compile(Small(), args=args), args)
    return numbers | {"classes": torch.tensor(len(Listed.kinds))}


@case(peers=False, refused="torch.jit.script, trace or load")
def scripted_module_inside(run: Run) -> Numbers:
    """torch.jit.script of a block, before compile"""
    args, model = batch(), Stack()
    model.blocks[1] = torch.jit.script(model.blocks[1])
    return {"loss": run.step(run.compile(model, args=args), *args)}


@case(refused={PP: IN_STAGES}, peers=False)
def distance_to_first_weights(run: Run) -> Numbers:
    """A penalty on the distance to the weights there were, plain tensors cloned before compile (L2-SP)"""
    args, model = batch(), Stack()
    first = {fqn: p.detach().clone() + 0.1 for fqn, p in model.named_parameters()}
    model = run.compile(model, args=args)
    loss = run.step(model, *args)
    penalty = sum((p - first[fqn]).square().sum() for fqn, p in run.named(model))
    penalty.backward()
    return {"loss": loss, "penalty": run.whole(penalty.detach())} | run.gradients(model)


@case(on=FORWARD, peers=False)
def masks_of_plain_tensors(run: Run) -> Numbers:
    """Lottery tickets: p.data = p.data * mask, p.grad.masked_fill_(~mask, 0), torch.where(mask, p, 0), addcmul_"""
    args, model = batch(), Stack()
    masks = {fqn: torch.rand(p.shape) > 0.5 for fqn, p in model.named_parameters()}
    model = run.compile(model, args=args)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(2):
        losses.append(run.step(model, *args))
        for fqn, p in run.named(model):
            p.grad.masked_fill_(~masks[fqn], 0)
            p.grad.addcmul_(masks[fqn].float(), torch.full(p.shape, 0.1))
        optimizer.step()
        for fqn, p in run.named(model):
            p.data = p.data * masks[fqn]
            p.data.copy_(torch.where(masks[fqn], p, 0.01))
        optimizer.zero_grad()
    return {"losses": torch.stack(losses)} | run.parameters(model)


@case(on=FORWARD, peers=False)
def noise_of_a_seed(run: Run) -> Numbers:
    """MeZO: p.data = p.data + z of torch.normal(size=p.data.size()), two losses without gradients, a step along z"""
    args, model, losses = batch(), Stack(), []
    model = run.compile(model, args=args)

    def move(scale: float) -> None:
        torch.manual_seed(7)
        for p in model.parameters():
            p.data = p.data + scale * torch.normal(0.0, 1.0, size=p.data.size())

    with torch.no_grad():
        for scale in (0.01, -0.02):
            move(scale)
            losses.append(model(*args))
        move(0.01)
        move(float(losses[1] - losses[0]))
        losses.append(model(*args))
    return {"losses": torch.stack(losses)} | run.parameters(model)


class Scaled(nn.Module):
    """Two views of rows, and a temperature that the script uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.layer(y)


@case(on=FORWARD, peers=False, refused=dict.fromkeys(FORWARD, "used outside of it.*full_tensor"))
def temperature_outside(run: Run) -> Numbers:
    """model.scale.exp() * (a @ b.T) of what the model returned (CLIP)"""
    model = run.compile(Scaled())
    a, b = model(*batch())
    loss = nn.functional.cross_entropy(model.scale.exp() * (a @ b.T), torch.arange(BATCH))
    loss.backward()
    return {"loss": loss} | run.gradients(model)


@case(on=FORWARD, peers=False)
def temperature_outside_whole(run: Run) -> Numbers:
    """The same with model.scale.full_tensor()"""
    model = run.compile(Scaled())
    a, b = model(*batch())
    scale = model.scale if run.setting == "one device" else model.scale.full_tensor()
    loss = nn.functional.cross_entropy(scale.exp() * (a @ b.T), torch.arange(BATCH))
    loss.backward()
    return {"loss": loss} | run.gradients(model)


@case(on=FORWARD, peers=False)
def number_in_a_text(run: Run) -> Numbers:
    """f"{model.scale.detach():.3f}" of a parameter without dims, for a log"""
    model = run.compile(Scaled(), args=batch())
    return {"scale": torch.tensor(float(f"{model.scale.detach():.3f}"))}


@case(on=FORWARD, peers=False, refused=dict.fromkeys(FORWARD, "read as a number"))
def norms_in_texts(run: Run) -> Numbers:
    """f"{p.norm():.4f}" of each weight, for a log"""
    model = run.compile(Stack(), args=batch())
    return {fqn: torch.tensor(float(f"{p.norm():.4f}")) for fqn, p in run.named(model)}


@case(on=FORWARD, peers=False, refused=dict.fromkeys(FORWARD, "__dlpack__.*full_tensor"))
def memory_of_a_weight(run: Run) -> Numbers:
    """torch.from_dlpack(p.detach())"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    return {fqn: torch.from_dlpack(p.detach()) for fqn, p in run.named(model)}


@case(peers=False, refused="share_memory_.*full_state_dict")
def shared_memory(run: Run) -> Numbers:
    """model.share_memory() after compile, for processes beside the ranks"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.inner(model).share_memory()
    return {"loss": run.step(model, *args)}


class Given(Stack):
    """Calls the function that it is given."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, act: Any = None) -> torch.Tensor:
        return super().forward(x if act is None else act(x), y)


@case(peers=False, refused="holds a builtins.builtin_function_or_method")
def function_among_the_arguments(run: Run) -> Numbers:
    """model(x, y, act=torch.tanh)"""
    return {"loss": run.step(run.compile(Given()), *batch(), act=torch.tanh)}


@case(peers=False, refused="holds a tests.journey.cases.owned.object_of_an_own_class.<locals>.Own")
def object_of_an_own_class(run: Run) -> Numbers:
    """model(x, y, act=an object of a class that a function defines)"""

    class Own:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

    return {"loss": run.step(run.compile(Given()), *batch(), act=Own())}


@case(on=FORWARD, peers=False, refused="blocks.1 has a hook on gradients.*autograd.Function")
def hook_on_gradients_of_a_block(run: Run) -> Numbers:
    """model.blocks[1].register_full_backward_hook, after a step"""
    args, seen = batch(), []
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    model.blocks[1].register_full_backward_hook(lambda module, given, taken: seen.append(taken[0]))
    return {"loss": run.step(model, *args), "seen": torch.stack(seen)}


@case(on=FORWARD, peers=False)
def hook_on_gradients_of_the_model(run: Run) -> Numbers:
    """model.register_full_backward_hook of the compiled model itself, after a step"""
    args, seen = batch(), []
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    model.register_full_backward_hook(lambda module, given, taken: seen.append(taken[0]))
    return {"loss": run.step(model, *args), "seen": torch.stack(seen)}


@case(peers=False)
def state_kept_in_inference_mode(run: Run) -> Numbers:
    """copy.deepcopy(model.state_dict()) of the best weights within an evaluation under torch.inference_mode()"""
    args = batch()
    model = run.compile(Stack(), args=args)
    numbers = _steps(run, model, args)
    with torch.inference_mode():
        best = copy.deepcopy(run.inner(model).state_dict())
    _steps(run, model, args)
    run.inner(model).load_state_dict(best)
    return {"best": numbers["losses"]} | _steps(run, model, args)
