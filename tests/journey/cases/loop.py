"""The training loop as people write it."""

import torch
import torch.nn.functional as F

from tests.journey.case import PP, Numbers, Run, case
from tests.journey.stack import Block, Stack, batch


@case()
def three_steps(run: Run) -> Numbers:
    """Three steps of SGD with momentum"""
    model = run.compile(Stack(), args=batch())
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {}
    for number, args in enumerate([batch() for _ in range(3)]):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        optimizer.step()
    return found | run.parameters(model)


def _trained(run: Run, between, steps: int = 3) -> Numbers:
    """`steps` of SGD; `between(model, optimizer)` comes after each backward."""
    model, found = run.compile(Stack(), args=batch()), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, args in enumerate([batch() for _ in range(steps)]):
        optimizer.zero_grad()
        found[f"loss {number}"] = run.step(model, *args)
        between(model, optimizer)
        optimizer.step()
    return found | run.parameters(model)


@case(refused={PP: r"this rank's stages only.*model.clip_grad_norm_"})
def clip_by_norm_of_torch(run: Run) -> Numbers:
    """torch.nn.utils.clip_grad_norm_"""
    return _trained(run, lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))


@case(peers=False)
def clip_by_norm_of_the_module(run: Run) -> Numbers:
    """model.clip_grad_norm_"""

    def clip(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if run.setting == "one device":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        else:
            model.clip_grad_norm_(0.05)

    return _trained(run, clip)


@case()
def clip_by_value(run: Run) -> Numbers:
    """torch.nn.utils.clip_grad_value_"""
    return _trained(run, lambda model, optimizer: torch.nn.utils.clip_grad_value_(model.parameters(), 0.001))


@case(refused={PP: "this rank's stages only"})
def norm_by_hand(run: Run) -> Numbers:
    """The norm of all gradients, summed by hand, for a log"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    total = sum(p.grad.norm() ** 2 for p in model.parameters() if p is not None)
    return {"norm": run.whole(total.sqrt())}


@case()
def norms_of_single_gradients(run: Run) -> Numbers:
    """The norm of each gradient, for a log"""
    args = batch()
    model = run.compile(Stack(), args=args)
    run.step(model, *args)
    return {fqn: run.whole(p.grad.norm()) for fqn, p in run.named(model)}


@case()
def full_state_dict(run: Run) -> Numbers:
    """get_model_state_dict(full_state_dict=True) after a step"""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.step(model, *args)
    optimizer.step()
    return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))


@case(on=(PP,), refused="holds the parameters of its own stages only", peers=False)
def full_state_dict_of_the_optimizer(run: Run) -> Numbers:
    """get_optimizer_state_dict(full_state_dict=True) with stages"""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    args = batch()
    model = run.compile(Stack(), args=args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.step(model, *args)
    optimizer.step()
    get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return {}


@case(peers=False)
def numbers_drawn_after_a_step(run: Run) -> Numbers:
    """torch.randn after a step of a model without random ops"""
    args = batch()
    model = run.compile(Stack(), args=args)
    loss = run.step(model, *args)
    return {"loss": loss, "drawn": torch.randn(4)} | run.gradients(model)


@case(peers=False)
def random_op_in_the_first_block_only(run: Run) -> Numbers:
    """Dropout, of which all is dropped, in the first block only"""

    class Dropped(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + F.dropout(x, 1.0)

    args, model = batch(), Stack()
    model.blocks[0] = Dropped()
    model = run.compile(model, args=args)
    found = {f"loss {number}": run.step(model, *args) for number in range(2)}
    return found | run.gradients(model)
