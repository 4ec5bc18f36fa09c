"""Optimizer steps on whole parameters: for updates that need more of a weight than a rank's part of it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.checks.dtensor_writes import keep_part
from autopar.runtime.checks.plain_operands import is_of_stages, of_first
from autopar.runtime.interop.local_step import OWN_STEP
from autopar.torch_compat import pytree

_MARK = "_autopar_whole_step"
Copies = dict[DTensor, nn.Parameter]


def step_on_whole(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give `optimizer` whole plain tensors in each step, as on one device; returns the optimizer.

    For updates that need all of a weight: SOAP, Shampoo, Prodigy, D-Adaptation, Adafactor and whatever makes plain
    state of its own. A step gathers parameters, gradients and random state of the first rank, every rank computes the
    whole update, and keeps its parts of the parameters. State is whole on every rank, also in checkpoints, and so is
    loaded on one device and under any plan.

    Call it on every rank, once, right after the optimizer is made. A step takes the memory of all parameters and
    gradients besides, and its state is not split. torch.optim's but Adafactor do not need it. An optimizer of other
    tensors stays as it is.

    AutoparError if its `step` was replaced before, and in a step if the model is in stages, of which a rank has some.
    """
    if "step" in vars(optimizer):
        raise AutoparError(
            f"step_on_whole: the step of this {type(optimizer).__name__} was replaced before, by a learning rate"
            " scheduler, offload_optimizer or a step of it: call it once, right after the optimizer is made"
        )
    hooked = type(optimizer).step
    step = torch.optim.Optimizer.profile_hook_step(_on_whole(getattr(hooked, "__wrapped__", hooked)))
    for mark in (_MARK, OWN_STEP):
        setattr(step, mark, True)
    optimizer.step = MethodType(step, optimizer)  # pyrefly: ignore[bad-assignment]
    return optimizer


def is_on_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its steps are on whole parameters."""
    return hasattr(optimizer.step, _MARK)


def _on_whole(step: Callable[..., Any]) -> Callable[..., Any]:
    copies: Copies = {}

    @functools.wraps(step)
    def on_whole(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        def between(closure: Any) -> Any:
            """The closure with the DTensors in their place, which computes their gradients."""
            if not callable(closure):
                return closure

            def evaluated() -> Any:
                _give_parts(self, copies)
                try:
                    return closure()
                finally:
                    _take_wholes(self, copies)

            return evaluated

        args, kwargs = pytree.tree_map(between, (args, kwargs))
        with _random_state_of_first(self):
            _take_wholes(self, copies)
            try:
                return step(self, *args, **kwargs)
            finally:
                _give_parts(self, copies)

    return on_whole


@torch.no_grad()
def _take_wholes(optimizer: torch.optim.Optimizer, copies: Copies) -> None:
    """Put whole plain tensors in the place of DTensors, the same ones in each step, with their gradients and state."""
    for params in (group["params"] for group in optimizer.param_groups):
        for at, x in enumerate(params):  # in place: LBFGS and optimizers around others keep the list
            if not isinstance(x, DTensor):
                continue
            if is_of_stages(x.device_mesh):
                raise AutoparError(
                    "step_on_whole: this rank has the parameters of its own stages only, and an update may need all:"
                    " expected a mesh without a pipeline axis, or an optimizer that updates DTensors (torch.optim)"
                )
            copy = copies.setdefault(x, nn.Parameter(torch.empty(0), x.requires_grad))
            copy.data, copy.requires_grad = x.full_tensor().clone(), x.requires_grad
            copy.grad = _whole(x.grad)
            vars(copy).update({name: value for name, value in vars(x).items() if not name.startswith("_")})
            params[at] = copy
            if x in optimizer.state:
                optimizer.state[copy] = state = optimizer.state.pop(x)
                for name, value in state.items():  # in place, for a step goes on with it after a closure
                    if any(isinstance(item, DTensor) for item in pytree.tree_leaves(value)):
                        state[name] = pytree.tree_map(_whole, value)


@torch.no_grad()
def _give_parts(optimizer: torch.optim.Optimizer, copies: Copies) -> None:
    """Put the DTensors back, with this rank's parts of what the whole tensors have by now."""
    wholes = {copy: x for x, copy in copies.items()}
    for params in (group["params"] for group in optimizer.param_groups):
        for at, copy in enumerate(params):
            if copy not in wholes:
                continue
            params[at] = x = wholes[copy]
            keep_part(x, copy.data)
            if copy.grad is None:
                x.grad = None
            elif isinstance(x.grad, DTensor) and not any(one.is_partial() for one in x.grad.placements):
                keep_part(x.grad, copy.grad)
            copy.data, copy.grad = torch.empty(0, dtype=x.dtype), None
            if copy in optimizer.state:
                optimizer.state[x] = optimizer.state.pop(copy)


def _whole(x: Any) -> Any:
    return x.full_tensor().clone() if isinstance(x, DTensor) else x


@contextmanager
def _random_state_of_first(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context in which all ranks draw the first rank's numbers; the generators of the others are restored."""
    like = next((x for each in optimizer.param_groups for x in each["params"] if isinstance(x, DTensor)), None)
    if like is None:
        yield
        return
    generators = [torch.default_generator]
    if like.device.type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    own = [generator.get_state() for generator in generators]
    given = [of_first(state, like).to_local().cpu() for state in own]
    for generator, state in zip(generators, given):
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state, first in zip(generators, own, given):
            if not torch.equal(state, first):
                generator.set_state(state)
