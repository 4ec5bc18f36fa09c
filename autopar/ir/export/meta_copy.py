"""`skeleton`: a copy of a model without data, which is traced."""

import copy
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.ir.guards.example_values import keep_value


def skeleton(model: nn.Module, shared: Iterable[object] = ()) -> nn.Module:
    """A deep copy of `model` with plain meta tensors for its parameters and buffers; ties are kept, no data is copied.

    Attributes that a forward hook has computed of parameters (pruning, weight norm) are copied without their graph.
    `shared`: objects that the copy has too.

    Raises the errors of `copy.deepcopy` for attributes that cannot be copied.
    """
    empty: dict[int, object] = {id(x): bare(x) for x in model.parameters()}
    empty |= {id(x): _bare_buffer(x) for x in model.buffers()}
    computed = [x for module in model.modules() for x in vars(module).values() if isinstance(x, torch.Tensor)]
    empty |= {id(x): bare(x).requires_grad_(False) for x in computed if not x.is_leaf and id(x) not in empty}
    of_hooks = [
        x for module in model.modules() for hook in module._forward_pre_hooks.values() for x in _tensors_of(hook)
    ]
    empty |= {id(x): x.detach().clone() for x in of_hooks if id(x) not in empty}  # torch copies no view of a DTensor
    return copy.deepcopy(model, empty | {id(x): x for x in shared})


def _bare_buffer(x: torch.Tensor) -> torch.Tensor:
    """As `bare`, with what the buffer holds on every rank for branches that read it."""
    empty = bare(x)
    if not (isinstance(x, DTensor) and any(p.is_shard() for p in x.placements)):
        keep_value(empty, x.to_local() if isinstance(x, DTensor) else x)
    return empty


def bare(x: torch.Tensor) -> torch.Tensor:
    """A plain tensor or parameter like `x` without data."""
    # not empty_like: of a DTensor that would be a DTensor
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty


def _tensors_of(hook: object) -> list[torch.Tensor]:
    return [x for x in getattr(hook, "__dict__", {}).values() if isinstance(x, torch.Tensor)]
