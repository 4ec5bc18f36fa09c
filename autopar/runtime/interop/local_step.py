"""Optimizer steps on each rank's parts of parameters, gradients and state, as plain tensors.

An update that goes element by element is the same on parts, and a DTensor takes many times as long to dispatch as a
small part to update. Between two steps the optimizer has the DTensors it was given, its state included.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.torch_compat import has_step_hooks

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
_MARK = "_autopar_local_step"


def step_on_parts(optimizer: torch.optim.Optimizer, before: Callable[[torch.optim.Optimizer], None]) -> None:
    """From its next step on, `optimizer` updates parts, if it is one of torch's that go element by element.

    `before` is called first, with the DTensors in their place. One whose `step` was replaced by `offload_optimizer`,
    which knows parameters by their identity, stays as it is.
    """
    if type(optimizer) not in _ELEMENTWISE or hasattr(optimizer, "_autopar_step") or hasattr(optimizer.step, _MARK):
        return
    if not any(isinstance(x, DTensor) for group in optimizer.param_groups for x in group["params"]):
        return
    optimizer.step = MethodType(_on_parts(optimizer.step, before), optimizer)


def _on_parts(step: Callable[..., Any], before: Callable[[torch.optim.Optimizer], None]) -> Callable[..., Any]:
    @wraps(step)
    def on_parts(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        # a closure computes gradients of the parameters, and hooks may ask for their norms
        is_whole = (
            closure is not None or has_step_hooks(self) or any(g.get("differentiable") for g in self.param_groups)
        )
        if is_whole:
            return step() if closure is None else step(closure)
        before(self)
        with _parts(self):
            return step()

    setattr(on_parts, _MARK, True)
    return on_parts


@contextmanager
def _parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context in which the optimizer has parts in place of DTensors."""
    groups, part_of = optimizer.param_groups, dict[DTensor, torch.Tensor]()
    with torch.no_grad():
        for group in groups:
            part_of.update((x, _part(x)) for x in _with_parts(group, optimizer.state))
    whole = [(group["params"], group.get("foreach")) for group in groups]
    try:
        for group in groups:
            has_parts = any(x in part_of for x in group["params"])
            group["params"] = [part_of.get(x, x) for x in group["params"]]
            if has_parts and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = False  # as on DTensors: its temporary tensors would be those of all parameters
        with torch.no_grad():
            for x, part in part_of.items():
                if x in optimizer.state:
                    optimizer.state[part] = {name: _local(value) for name, value in optimizer.state[x].items()}
        yield
    finally:
        for group, (parameters, foreach) in zip(groups, whole):
            group["params"] = parameters
            if "foreach" in group:
                group["foreach"] = foreach
        with torch.no_grad():
            for x, part in part_of.items():
                if part in optimizer.state:
                    _take_back(optimizer.state[x], optimizer.state.pop(part), x, part)


def _with_parts(group: dict[str, Any], state: Mapping[torch.Tensor, dict[str, Any]]) -> list[DTensor]:
    """The parameters of a group whose parts are updated; none if one update of all has others in it too."""
    updated = [x for x in group["params"] if x.grad is not None]
    found = [x for x in updated if _lies_alike(x, state.get(x, {}))]
    is_together = group.get("foreach") or group.get("fused")
    return [] if is_together and len(found) < len(updated) else found


def _lies_alike(x: torch.Tensor, state: dict[str, Any]) -> bool:
    """Whether a parameter has parts, and its gradient and state lie as it does.

    One of no dims stays whole: state of no dims may be its own or a number, such as the count of steps.
    """
    if not isinstance(x, DTensor) or not x.dim() or not all(type(one) in (Shard, Replicate) for one in x.placements):
        return False
    others = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
    return x.grad is not None and all(
        isinstance(other, DTensor) and other.placements == x.placements for other in (x.grad, *others)
    )


def _part(x: DTensor) -> torch.Tensor:
    """This rank's part of a parameter, with its gradient."""
    part = x.to_local().detach()
    part.grad = _local(x.grad)
    return part


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _take_back(state: dict[str, Any], made: dict[str, Any], x: DTensor, part: torch.Tensor) -> None:
    """Take what a step made of the state of a part into that of its parameter."""
    for name, value in made.items():
        if _local(state.get(name)) is value:
            continue
        is_part = isinstance(value, torch.Tensor) and value.shape == part.shape
        state[name] = (
            DTensor.from_local(value, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
            if is_part
            else value
        )
