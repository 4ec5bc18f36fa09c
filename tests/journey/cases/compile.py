"""How a model is compiled, and what is done with what comes out."""

import copy
import io
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from tests.journey.case import DP, FORWARD, FREE, PP, Numbers, Run, case
from tests.journey.stack import WIDTH, Block, Stack, batch


def stepped(run: Run, model: nn.Module, args: tuple = ()) -> Numbers:
    args = args or batch()
    return {"loss": run.step(model, *args)} | run.gradients(model)


@case()
def without_example_arguments(run: Run) -> Numbers:
    """compile(model, mesh): planned at the first call"""
    args = batch()
    return stepped(run, run.compile(Stack()), args)


@case()
def with_example_arguments(run: Run) -> Numbers:
    """compile(model, mesh, args=(x, y)): planned at once"""
    args = batch()
    return stepped(run, run.compile(Stack(), args=args), args)


class Outputs(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@case(on=(PP,), peers=False)
def loss_function(run: Run) -> Numbers:
    """compile(model, mesh, loss_fn=...) and train_step(x, y)"""
    x, y = batch()
    if run.setting == "one device":
        model = Outputs()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return {"loss": loss.detach()} | run.gradients(model)
    model = run.compile(Outputs(), args=(x, y), loss_fn=F.mse_loss)
    return {"loss": model.train_step(x, y)} | run.gradients(model)


class Warming(nn.Module):
    """A loss whose weight grows with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.calls * F.mse_loss(out, y)

    weighted = forward


class Smoothed:
    """A loss over the running mean of losses: an object with a tensor."""

    def __init__(self) -> None:
        self.mean = torch.ones(())

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(out, y)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


def with_loss(run: Run, loss_fn) -> Numbers:
    x, y = batch()
    model = run.compile(Outputs(), args=(x, y), loss_fn=loss_fn)
    return {str(i): model.train_step(x, y) for i in range(2)} | run.gradients(model)


@case(refused=r"compile.py:\d+: the forward keeps state in attribute loss_fn.calls", peers=False)
def loss_module_with_state(run: Run) -> Numbers:
    """loss_fn= of a module that counts its calls in an attribute"""
    return with_loss(run, Warming())


@case(refused=r"compile.py:\d+: the forward keeps state in attribute loss_fn.calls", peers=False)
def loss_method_with_state(run: Run) -> Numbers:
    """loss_fn= of a method of such a module"""
    return with_loss(run, Warming().weighted)


@case(refused=r"compile.py:\d+: the forward keeps state in attribute loss_fn.mean", peers=False)
def loss_object_with_state(run: Run) -> Numbers:
    """loss_fn= of an object that keeps a running mean of its losses"""
    return with_loss(run, Smoothed())


class CountedOutputs(Outputs):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x / self.calls)


@case(refused=r"compile.py:\d+: the forward keeps state in attribute calls", peers=False)
def model_with_state_and_a_loss_function(run: Run) -> Numbers:
    """A model that counts its calls in an attribute of its own, with loss_fn="""
    x, y = batch()
    model = run.compile(CountedOutputs(), args=(x, y), loss_fn=F.mse_loss)
    return {"loss": model.train_step(x, y)}


@case(on=FORWARD, peers=False)
def loss_outside(run: Run) -> Numbers:
    """The loss of what the model returns, computed outside"""
    x, y = batch()
    model = run.compile(Outputs(), args=(x,))
    loss = F.mse_loss(run.whole(model(x)), y)
    loss.backward()
    return {"loss": loss.detach()} | run.gradients(model)


class Several(Stack):
    def forward(self, x: torch.Tensor) -> dict:
        out = self.body(x)
        return {"out": out, "parts": (out.sum(), [out.mean(0), None, 3, "text"])}


@case(on=FORWARD, peers=False)
def outputs_of_all_kinds(run: Run) -> Numbers:
    """A dict of tensors, tuples, lists, None, numbers and text"""
    x, _ = batch()
    model = run.compile(Several(), args=(x,))
    out = model(x)
    total, (mean, nothing, number, text) = out["parts"]
    assert (nothing, number, text) == (None, 3, "text")
    total.backward()
    return {"out": run.whole(out["out"]), "total": total, "mean": run.whole(mean)} | run.gradients(model)


@case(peers=False)
def plan_from_a_file(run: Run) -> Numbers:
    """A plan that was saved and is read again"""
    args = batch()
    if run.setting == "one device":
        return stepped(run, Stack(), args)
    plan = run.compile(Stack(), args=args).plan
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "stack.plan.json")
        model = autopar.compile(Stack(), run.mesh, plan=Path(folder) / "stack.plan.json", args=args)
    torch.manual_seed(0)
    args = batch()
    again = Stack()
    model.load_state_dict(again.state_dict())
    return stepped(run, model, args)


@case(on=FORWARD, peers=False)
def pinned_weight(run: Run) -> Numbers:
    """pins={...}: how a weight is stored"""
    args = batch()
    pins = {"blocks.0.up.weight": {DP: "S(0)"}.get(run.setting, "S(0)S(1)")}
    return stepped(run, run.compile(Stack(), args=args, pins=pins), args)


@case(on=(FREE,), refused="blocks.9", peers=False)
def pin_of_an_unknown_weight(run: Run) -> Numbers:
    """pins={...} of a name that the model does not have"""
    args = batch()
    return stepped(run, run.compile(Stack(), args=args, pins={"blocks.9.up.weight": "S(0)B"}), args)


@case(on=(DP,), peers=False)
def no_time_to_plan(run: Run) -> Numbers:
    """time_limit_s=0"""
    args = batch()
    return stepped(run, run.compile(Stack(), args=args, time_limit_s=0), args)


@case(peers=False)
def four_microbatches(run: Run) -> Numbers:
    """num_microbatches=4 and train_step"""
    args = batch()
    model = run.compile(Stack(), args=args, num_microbatches=4)
    if run.setting == "one device":
        return stepped(run, model, args)
    return {"loss": model.train_step(*args)} | run.gradients(model)


@case(on=FORWARD, peers=False)
def copied(run: Run) -> Numbers:
    """copy.deepcopy of the compiled model: a moving average of weights"""
    args = batch()
    model = run.compile(Stack(), args=args)
    average = copy.deepcopy(model)
    run.step(model, *args)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        for mean, now in zip(average.parameters(), model.parameters()):
            mean.lerp_(now, 0.5)
    return {"loss": average(*args).detach()} | run.parameters(average)


@case(on=FORWARD, peers=False)
def two_models(run: Run) -> Numbers:
    """Two compiled models, one behind the other (a generator and a critic)"""
    x, y = batch()
    generator, critic = run.compile(Outputs(), args=(x,)), run.compile(Stack(), args=(x.clone().requires_grad_(), y))
    loss = critic(run.whole(generator(x)), y)
    loss.backward()
    found = {f"generator {key}": value for key, value in run.gradients(generator).items()}
    return found | {"loss": loss.detach()} | run.gradients(critic)


class Larger(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.head(self.inner(x)) - y).square().mean()


@case(on=(DP,), refused="DTensor already.*sharded before", peers=False)
def compiled_twice(run: Run) -> Numbers:
    """A model that was compiled already"""
    args = batch()
    return stepped(run, run.compile(run.compile(Stack(), args=args), args=args), args)


@case(on=(DP,), refused="wrapped in DistributedDataParallel", peers=False)
def wrapped_in_ddp(run: Run) -> Numbers:
    """A model that DistributedDataParallel holds"""
    return stepped(run, run.compile(nn.parallel.DistributedDataParallel(Stack())))


@case(on=(DP,), refused="args= expects a tuple", peers=False)
def arguments_not_in_a_tuple(run: Run) -> Numbers:
    """compile(model, mesh, args=x)"""
    return stepped(run, run.compile(Stack(), args=batch()[0]))


@case(on=FORWARD)
def evaluated_without_gradient(run: Run) -> Numbers:
    """model.eval() and torch.no_grad() or torch.inference_mode() between steps"""
    args = batch()
    model = run.compile(Stack(), args=args)
    found = stepped(run, model, args)
    model.eval()
    with torch.no_grad():
        found["no_grad"] = model(*args)
    with torch.inference_mode():
        found["inference"] = model(*args).clone()
    model.train()
    return found | {"again": run.step(model, *args)} | run.gradients(model)


@case(on=FORWARD)
def class_and_attributes(run: Run) -> Numbers:
    """isinstance, attributes, methods and submodules of the compiled model"""
    args, model = batch(), Stack()
    model.name = "stack"
    model = run.compile(model, args=args)
    inner = run.inner(model)
    assert isinstance(inner, Stack) and inner.name == "stack" and len(inner.blocks) == 3
    assert isinstance(inner.blocks[1], Block) and inner.training
    return stepped(run, model, args)


@case(on=FORWARD)
def saved_and_loaded(run: Run) -> Numbers:
    """torch.save and torch.load of a whole state dict"""
    args = batch()
    model, file = run.compile(Stack(), args=args), io.BytesIO()
    torch.save({fqn: run.whole(x) for fqn, x in model.state_dict().items()}, file)
    file.seek(0)
    other = run.compile(Stack(), args=args)
    other.load_state_dict(torch.load(file))
    return stepped(run, other, args)
