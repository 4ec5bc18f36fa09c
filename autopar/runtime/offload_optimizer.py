"""Optimizer offload: state in the host's memory that is on the device only while its parameters are updated."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from autopar.costmodel.activations.count_storages import plain_tensors
from autopar.errors import AutoparError
from autopar.runtime.pipeline.parameter_elsewhere import ParameterElsewhere


def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    names: Iterable[str] | None = None,
    *,
    bucket_bytes: int | None = None,
) -> torch.optim.Optimizer:
    """Offload `optimizer`'s state of the parameters of `module` called `names` to the host; returns the optimizer.

    `names`: by default those of the plan if the module is compiled and its plan has state on the host, else all.
    `bucket_bytes`: of the parameters of a bucket, by default those of the largest parameter. `optimizer.step()` first
    updates the parameters whose state is on the device, then the others one bucket at a time, whose state is copied to
    the device and back. The result equals one step over all parameters: this is for optimizers that update each
    parameter by itself, as all of torch.optim but LBFGS do. Hooks on `step` run once for each bucket. state_dict() is
    unchanged, with tensors on the host.

    AutoparError for a name that is no parameter, an optimizer that does not update it, an optimizer that needs a
    closure, or one offloaded before.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise AutoparError("offload_optimizer: LBFGS updates all parameters together; its state cannot be offloaded")
    if hasattr(optimizer, "_autopar_step"):
        raise AutoparError(
            "offload_optimizer: this optimizer's state is offloaded already; name all parameters in one call"
        )
    away = {id(parameter) for parameter in _chosen(optimizer, module, names)}
    vars(optimizer)["_autopar_step"] = optimizer.step
    optimizer.step = MethodType(_step_in_buckets(optimizer.step, away, bucket_bytes), optimizer)

    def send_all(optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            if id(parameter) in away:
                _send(state)

    optimizer.register_load_state_dict_post_hook(send_all)
    send_all(optimizer)
    return optimizer


def _chosen(optimizer: torch.optim.Optimizer, module: nn.Module, names: Iterable[str] | None) -> list[nn.Parameter]:
    named = module.named_parameters(remove_duplicate=False)
    known = {name: x for name, x in named if not isinstance(x, ParameterElsewhere)}
    if (runtime := getattr(module, "_autopar", None)) is not None:
        names = runtime.take_state_on_host(names) or None
    if names is None:
        return list(known.values())
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name in (names := tuple(names)):
        if name not in known:
            raise AutoparError(
                f"offload_optimizer: the module has no parameter {name!r}; names are those of named_parameters()"
            )
        if id(known[name]) not in held:
            raise AutoparError(
                f"offload_optimizer: the optimizer does not update {name!r}; give it that parameter, or leave the"
                " name out"
            )
    return [known[name] for name in names]


def _step_in_buckets(step: Callable[..., Any], away: set[int], bucket_bytes: int | None) -> Callable[..., Any]:
    @wraps(step)
    def in_buckets(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        staying = [parameter for parameter in everything if id(parameter) not in away]
        if staying:
            _step_of(self, step, staying)
        moved = [parameter for parameter in everything if id(parameter) in away and parameter.grad is not None]
        for bucket in buckets([_num_bytes(parameter) for parameter in moved], bucket_bytes):
            _step_moved(self, step, [moved[position] for position in bucket])
        return loss

    return in_buckets


def _step_moved(optimizer: torch.optim.Optimizer, step: Callable[..., Any], bucket: Sequence[nn.Parameter]) -> None:
    """Update the parameters of `bucket`, whose state is fetched before and sent back after."""
    for parameter in bucket:
        _fetch(optimizer.state.get(parameter, {}), parameter)
    try:
        _step_of(optimizer, step, bucket)
    finally:
        for parameter in bucket:
            _send(optimizer.state.get(parameter, {}))


def _step_of(optimizer: torch.optim.Optimizer, step: Callable[..., Any], some: Sequence[nn.Parameter]) -> None:
    """A step of `some` parameters only."""
    ids, groups = {id(parameter) for parameter in some}, optimizer.param_groups
    own = [[p for p in group["params"] if id(p) in ids] for group in groups]
    everything = [group["params"] for group in groups]
    try:
        for group, parameters in zip(groups, own):
            group["params"] = parameters
        optimizer.param_groups = [group for group in groups if group["params"]]
        step()
    finally:
        optimizer.param_groups = groups
        for group, parameters in zip(groups, everything):
            group["params"] = parameters


def buckets(sizes: Sequence[int], bucket_bytes: int | None = None) -> Iterator[list[int]]:
    """Buckets of consecutive positions, each within `bucket_bytes`, by default the largest size, or with one position.

    >>> list(buckets([3, 1, 5, 2, 2]))
    [[0, 1], [2], [3, 4]]
    """
    most = max(sizes, default=0) if bucket_bytes is None else bucket_bytes
    bucket: list[int] = []
    size = 0
    for position, own in enumerate(sizes):
        if bucket and size + own > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(position)
        size += own
    if bucket:
        yield bucket


def _num_bytes(parameter: nn.Parameter) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in plain_tensors(parameter.detach()))


def _send(state: dict[str, Any]) -> None:
    """Move the state's large tensors to the host; scalars such as step counts are small and may have to stay."""
    for tensor in _large(state):
        tensor.data = to_host(tensor)


def _fetch(state: dict[str, Any], parameter: nn.Parameter) -> None:
    device = next(plain_tensors(parameter.detach())).device
    for tensor in _large(state):
        tensor.data = to_device(tensor, device)


def _large(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.dim():
            yield from plain_tensors(value)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, pinned if `x` is on a GPU."""
    host = torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda")
    # Synchronous: the device's memory is reused as soon as this returns, and the next update reads the copy.
    return host.copy_(x)


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device`; on a GPU it is asynchronous: later kernels wait for it, Python does not."""
    return torch.empty_like(x, device=device, pin_memory=False).copy_(x, non_blocking=True)
