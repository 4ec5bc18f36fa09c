"""State of optimizers as whole tensors: given out by `full_optimizer_state_dict`, cut to parts before the next step."""

import functools
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import AutoparError
from autopar.runtime.interop.full_state import all_called, plain_copy
from autopar.runtime.module_runtime import Runtime
from autopar.runtime.rank_agreement import is_first
from autopar.torch_compat import pytree


class FullOptimizerState(nn.Module):
    """Mixed into a sharded module's class."""

    _autopar: Runtime

    @torch.no_grad()
    def full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
    ) -> dict[str, Any]:
        """`optimizer.state_dict()` as on one device: whole plain tensors on the CPU, on every rank.

        `optimizer` has parameters of this module; every rank calls this, as `full_state_dict`, which explains
        `rank0_only`. `optimizer.load_state_dict` takes it back under any plan, and on one device. AutoparError with
        stages, where each rank's optimizer has other parameters.
        """
        runtime = self._autopar
        if runtime.elsewhere:
            raise AutoparError(
                "the optimizer of a rank has the parameters of its own stages only, so that its state by number"
                " (optimizer.state_dict()) is not that of one device: save it by torch.distributed.checkpoint and"
                " get_optimizer_state_dict, which go by name"
            )
        all_called(runtime, "full_optimizer_state_dict")
        is_kept = not rank0_only or is_first(runtime.mesh)

        def whole(x: Any) -> Any:
            return plain_copy(x, is_kept=is_kept) if isinstance(x, torch.Tensor) else x

        state = pytree.tree_map(whole, optimizer.state_dict())
        return state if is_kept else {}


@functools.cache
def cut_loaded_state() -> None:
    """From now on each optimizer of the process that was given whole state has its parts before its next step."""
    seen: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if seen.get(optimizer) is not optimizer.state:  # load_state_dict makes another dict
            seen[optimizer] = optimizer.state
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if isinstance(parameter, DTensor) and parameter in optimizer.state:
                        optimizer.state[parameter] = _in_parts(parameter, optimizer.state[parameter])

    register_optimizer_step_pre_hook(before_step)


def _in_parts(parameter: DTensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter, what has its shape laid out as it is."""
    return {name: _like(parameter, x, name) for name, x in state.items()}


def _like(parameter: DTensor, x: Any, name: str) -> Any:
    if not isinstance(x, torch.Tensor) or x.shape != parameter.shape:
        return x
    if x.is_meta:
        raise AutoparError(
            f"optimizer state ({name!r} of a parameter of shape {tuple(parameter.shape)}) was loaded before the model"
            " was planned, while its parameters were without data, and torch dropped it: give example args= or kwargs="
            " to autopar.compile, so that the model is planned at once"
        )
    if not isinstance(x, DTensor):
        return distribute_tensor(x, parameter.device_mesh, parameter.placements, src_data_rank=None)
    here, there = parameter.device_mesh.get_coordinate(), x.device_mesh.get_coordinate()
    if here != there and not all(placement.is_replicate() for placement in x.placements):
        raise AutoparError(
            f"the loaded optimizer state has a part of {name!r} of a parameter of shape {tuple(parameter.shape)} that"
            f" another rank saved (this rank is at {here} of the mesh, that one was at {there}): a file written by one"
            " rank has that rank's parts only. Save the state of model.full_optimizer_state_dict(optimizer), called on"
            " every rank, and load that, or save by torch.distributed.checkpoint; docs/trainers.md has the lines for"
            " each trainer"
        )
    return x
