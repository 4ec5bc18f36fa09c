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
from autopar.mesh import PIPELINE
from autopar.runtime.checks.saved_parts import check_saved_here
from autopar.runtime.interop.full_state import all_called, plain_copy
from autopar.runtime.interop.local_step import step_on_parts
from autopar.runtime.interop.optimizer_stages import whole_optimizer_state
from autopar.runtime.interop.plain_layers import check_plain_layers
from autopar.runtime.interop.whole_step import is_on_whole
from autopar.runtime.module_runtime import Runtime
from autopar.runtime.pipeline.stage_gradient import take_as_single
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
        `rank0_only`. `optimizer.load_state_dict` takes it back under any plan, and on one device. With stages it is the
        state of all ranks' optimizers, which have the same groups, each in the order of the model's parameters.
        """
        runtime = self._autopar
        all_called(runtime, "full_optimizer_state_dict")
        is_kept = not rank0_only or is_first(runtime.mesh)
        if runtime.elsewhere:
            group, device = runtime.mesh.get_group(PIPELINE), torch.device(runtime.mesh.device_type)
            state = whole_optimizer_state(optimizer, group, device, is_kept=is_kept)
            return state if is_kept else {}

        def whole(x: Any) -> Any:
            return plain_copy(x, is_kept=is_kept) if isinstance(x, torch.Tensor) else x

        state = pytree.tree_map(whole, optimizer.state_dict())
        return state if is_kept else {}


@functools.cache
def cut_loaded_state() -> None:
    """From now on each optimizer of the process that was given whole state has its parts before its next step, which
    is on parts if it can be, or on the whole where `step_on_whole` says so; Adafactor over weights in parts is refused,
    SparseAdam, and gradients of layers outside of a compiled model that differ between its ranks.
    """
    seen: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()

    def cut(optimizer: torch.optim.Optimizer) -> None:
        if seen.get(optimizer) is not optimizer.state:  # load_state_dict makes another dict
            seen[optimizer] = optimizer.state
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if isinstance(parameter, DTensor) and parameter in optimizer.state:
                        optimizer.state[parameter] = _in_parts(parameter, optimizer.state[parameter])

    def before_update(optimizer: torch.optim.Optimizer) -> None:
        check_plain_layers(optimizer)
        cut(optimizer)

    @torch.compiler.disable(reason="autopar looks at state and gradients outside of compiled graphs")
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_on_whole(optimizer):
            check_plain_layers(optimizer)
            return
        if isinstance(optimizer, torch.optim.Adafactor):
            _check_whole(optimizer)
            take_as_single(x.grad for group in optimizer.param_groups for x in group["params"])
        if isinstance(optimizer, torch.optim.SparseAdam):
            _check_sparse(optimizer)
        step_on_parts(optimizer, before_update)
        before_update(optimizer)

    register_optimizer_step_pre_hook(before_step)


def _check_whole(optimizer: torch.optim.Optimizer) -> None:
    """AutoparError if a rank has a part of a weight: the update divides by norms of rows, columns and whole weights."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if isinstance(parameter, DTensor) and not all(one.is_replicate() for one in parameter.placements):
            raise AutoparError(
                f"{type(optimizer).__name__} divides by means over the rows and columns of each weight, of which a rank"
                f" has a part (shape {tuple(parameter.shape)}, a DTensor of placements {tuple(parameter.placements)}):"
                " call autopar.step_on_whole(optimizer) right after it is made, take an optimizer that updates element"
                " by element (AdamW, SGD, Rprop, ...), or store weights whole by pins= of autopar.compile ('B' for each"
                " axis of the mesh)"
            )


def _check_sparse(optimizer: torch.optim.Optimizer) -> None:
    """AutoparError if the optimizer has a weight of a compiled model, whose gradients are dense."""
    if any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        raise AutoparError(
            "SparseAdam does not support dense gradients, and those of a compiled model are dense, of"
            " nn.Embedding(sparse=True) too: use torch.optim.Adam, which updates the rows that no batch had as well, or"
            " SGD or Adagrad, whose updates are the same for both"
        )


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
    check_saved_here(x, f"{name!r} of a parameter of shape {tuple(parameter.shape)}")
    return x
