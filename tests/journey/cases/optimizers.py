"""Optimizers of torch over the compiled model's parameters."""

import copy
from collections.abc import Callable
from typing import Any

import torch

import autopar
from tests.journey.case import FORWARD, PP, Numbers, Run, case
from tests.journey.cases.training import trained
from tests.journey.stack import Stack, batch

LAST = 3
EPS: dict[str, dict[str, float]] = {"ASGD": {}, "Rprop": {}}


def by(run: Run, optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Numbers:
    """Three steps with such an optimizer."""
    return trained(run, Stack(), lambda model: optimizer(model.parameters(), **options), steps=LAST)


@case()
def adam(run: Run) -> Numbers:
    """Adam with amsgrad and weight decay"""
    return by(run, torch.optim.Adam, lr=0.01, eps=1e-3, amsgrad=True, weight_decay=0.1)


@case()
def adamw_fused(run: Run) -> Numbers:
    """AdamW(fused=True)"""
    return by(run, torch.optim.AdamW, lr=0.01, eps=1e-3, fused=True)


@case()
def adamw_one_by_one(run: Run) -> Numbers:
    """AdamW(foreach=False)"""
    return by(run, torch.optim.AdamW, lr=0.01, eps=1e-3, foreach=False)


@case()
def adamw_with_a_tensor_as_learning_rate(run: Run) -> Numbers:
    """AdamW(lr=torch.tensor(0.01))"""
    return by(run, torch.optim.AdamW, lr=torch.tensor(0.01), eps=1e-3)


@case()
def sgd_with_nesterov(run: Run) -> Numbers:
    """SGD with Nesterov's momentum"""
    return by(run, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


@case(peers=False)
def sgd_fused(run: Run) -> Numbers:
    """SGD(fused=True) with momentum"""
    return by(run, torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)


@case(peers=False)
def sgd_for_each(run: Run) -> Numbers:
    """SGD(foreach=True, maximize=True) with dampened momentum"""
    return by(run, torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.1, foreach=True, maximize=True)


@case(peers=False)
def adam_fused(run: Run) -> Numbers:
    """Adam(fused=True, amsgrad=True)"""
    return by(run, torch.optim.Adam, lr=0.01, eps=1e-3, fused=True, amsgrad=True)


@case(peers=False)
def adamw_for_each(run: Run) -> Numbers:
    """AdamW(foreach=True)"""
    return by(run, torch.optim.AdamW, lr=0.01, eps=1e-3, foreach=True)


@case(peers=False)
def adagrad_fused(run: Run) -> Numbers:
    """Adagrad(fused=True)"""
    return by(run, torch.optim.Adagrad, lr=0.1, eps=1e-3, fused=True)


@case(peers=False, refused="capturable=True")
def adam_to_be_captured(run: Run) -> Numbers:
    """Adam(capturable=True) on a CPU, as one device refuses it"""
    return by(run, torch.optim.Adam, lr=0.01, eps=1e-3, capturable=True)


@case(peers=False, refused="SparseAdam does not support dense gradients")
def sparse_adam(run: Run) -> Numbers:
    """SparseAdam of dense gradients, as one device refuses it"""
    return by(run, torch.optim.SparseAdam, lr=0.01)


@case(peers=False)
def all_for_each(run: Run) -> Numbers:
    """NAdam, RAdam, Adamax, ASGD, Adadelta, RMSprop and Rprop, each with foreach=True"""
    found: Numbers = {}
    for kind in ("NAdam", "RAdam", "Adamax", "ASGD", "Adadelta", "RMSprop", "Rprop"):
        torch.manual_seed(0)
        numbers = by(run, getattr(torch.optim, kind), lr=0.01, foreach=True, **EPS.get(kind, {"eps": 1e-3}))
        found |= {f"{kind}: {name}": x for name, x in numbers.items()}
    return found


@case()
def adagrad(run: Run) -> Numbers:
    """Adagrad"""
    return by(run, torch.optim.Adagrad, lr=0.1, eps=1e-3)


@case()
def rmsprop(run: Run) -> Numbers:
    """RMSprop, centred, with momentum"""
    return by(run, torch.optim.RMSprop, lr=0.01, eps=1e-3, momentum=0.9, centered=True)


@case()
def adadelta(run: Run) -> Numbers:
    """Adadelta"""
    return by(run, torch.optim.Adadelta, lr=1.0, eps=1e-3)


@case()
def adamax(run: Run) -> Numbers:
    """Adamax"""
    return by(run, torch.optim.Adamax, lr=0.01, eps=1e-3)


@case()
def nadam(run: Run) -> Numbers:
    """NAdam"""
    return by(run, torch.optim.NAdam, lr=0.01, eps=1e-3)


@case()
def radam(run: Run) -> Numbers:
    """RAdam"""
    return by(run, torch.optim.RAdam, lr=0.01, eps=1e-3)


@case()
def averaged_sgd(run: Run) -> Numbers:
    """ASGD"""
    return by(run, torch.optim.ASGD, lr=0.1)


@case()
def rprop(run: Run) -> Numbers:
    """Rprop"""
    return by(run, torch.optim.Rprop, lr=0.01)


@case(refused="Adafactor divides by means over the rows.*step_on_whole.*pins=")
def adafactor(run: Run) -> Numbers:
    """Adafactor: row and column means of squares, and the root mean square of each weight"""
    return by(run, torch.optim.Adafactor, lr=0.1)


@case(tolerance=2e-2)
def muon(run: Run) -> Numbers:
    """Muon over the matrices, in bfloat16: the losses"""

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1)

    found = trained(run, Stack(), optimizer)
    return {key: x for key, x in found.items() if key.startswith("loss")}


@case(on=FORWARD)
def lbfgs(run: Run) -> Numbers:
    """LBFGS with a closure"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        return loss

    optimizer.step(closure)
    return {"loss": closure().detach()} | run.parameters(model)


@case(on=(PP,), refused="this rank's stages only", peers=False)
def lbfgs_with_stages(run: Run) -> Numbers:
    """LBFGS with stages, whose products are of all gradients"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return run.step(model, *args)

    optimizer.step(closure)
    return run.parameters(model)


@case()
def closure_of_sgd(run: Run) -> Numbers:
    """optimizer.step(closure)"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return run.step(model, *args)

    losses = {str(i): optimizer.step(closure) for i in range(2)}
    return losses | run.parameters(model)


@case()
def state_of_the_optimizer(run: Run) -> Numbers:
    """optimizer.state[p]: the averages of Adam"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.step(model, *args)
    optimizer.step()
    named = run.named(model)
    return {f"{key} of {fqn}": run.whole(optimizer.state[p][key]) for fqn, p in named for key in ("exp_avg", "step")}


@case()
def hooks_of_the_optimizer(run: Run) -> Numbers:
    """register_step_pre_hook that scales gradients, and a post hook that clamps weights"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: [p.grad.mul_(0.5) for p in model.parameters()] and None)
    optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.2, 0.2) for p in model.parameters()] and None)
    run.step(model, *args)
    optimizer.step()
    return run.parameters(model)


@case()
def updated_by_a_closure(run: Run) -> Numbers:
    """optimizer.step(closure) of AdamW, the closure makes forward and backward"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), {}
    for number in range(2):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            return run.step(model, *args)

        losses[f"loss {number}"] = optimizer.step(closure)
    return losses | run.parameters(model)


@case()
def copy_of_the_optimizer(run: Run) -> Numbers:
    """copy.deepcopy(optimizer.state_dict()) after a step, loaded again after two further ones"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), {}
    kept: dict[str, Any] = {}
    for number in range(4):
        optimizer.zero_grad()
        losses[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
        if number == 0:
            kept = copy.deepcopy(optimizer.state_dict())
        if number == 2:
            optimizer.load_state_dict(kept)
    return losses | run.parameters(model)


@case()
def state_of_the_optimizer_by_hand(run: Run) -> Numbers:
    """optimizer.state[p]["exp_avg"].mul_(0.5), one parameter's state deleted, and the state of all cleared"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), {}
    for number in range(5):
        optimizer.zero_grad()
        losses[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
        held = dict(run.named(model))
        if number == 1:
            for p in held.values():
                optimizer.state[p]["exp_avg"].mul_(0.5)
        if number == 2 and "blocks.0.up.weight" in held:
            del optimizer.state[held["blocks.0.up.weight"]]
        if number == 3:
            optimizer.state.clear()
    return losses | run.parameters(model)


@case()
def parameter_moved_to_another_group(run: Run) -> Numbers:
    """A parameter is taken out of the first group and added by add_param_group with another rate, after a step"""
    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {}
    for number in range(3):
        optimizer.zero_grad()
        losses[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
        if number == 0:
            moved = [p for fqn, p in model.named_parameters() if fqn.endswith("blocks.2.down.bias")]
            group = optimizer.param_groups[0]
            group["params"] = [p for p in group["params"] if all(p is not other for other in moved)]
            optimizer.add_param_group({"params": moved, "lr": 0.01})
    return losses | run.parameters(model)


@case(refused={PP: "step_on_whole: this rank has the parameters of its own stages only"}, peers=False)
def adafactor_on_whole_weights(run: Run) -> Numbers:
    """autopar.step_on_whole(Adafactor(...)), which gathers weights in each step"""

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return autopar.step_on_whole(torch.optim.Adafactor(model.parameters(), lr=0.1))

    return trained(run, Stack(), optimizer, steps=LAST)


class Shampoo(torch.optim.Optimizer):
    """Its state are products of a gradient's rows, as plain tensors of its shape."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                rows = p.grad.view(len(p), -1)
                if not self.state[p]:
                    self.state[p]["left"] = torch.eye(len(p))
                left = self.state[p]["left"].add_(rows @ rows.T)
                p.sub_(group["lr"] * torch.linalg.solve(left, rows).view_as(p))


@case(refused="call autopar.step_on_whole", peers=False)
def shampoo(run: Run) -> Numbers:
    """An optimizer with plain state of its own, as Shampoo, SOAP and Prodigy have"""
    return trained(run, Stack(), lambda model: Shampoo(model.parameters()), steps=LAST)


@case(on=FORWARD, peers=False)
def shampoo_on_whole_weights(run: Run) -> Numbers:
    """The same by autopar.step_on_whole(optimizer)"""
    return trained(run, Stack(), lambda model: autopar.step_on_whole(Shampoo(model.parameters())), steps=LAST)
