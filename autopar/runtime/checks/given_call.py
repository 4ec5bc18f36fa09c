"""Checks of the model and the example arguments that a user gives."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ddp, style
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import AutoparError
from autopar.runtime.dtensor_state import is_of_autopar, is_taken_over
from autopar.runtime.sharded_module import ShardedModule
from autopar.torch_compat import FlatParamHandle, FSDPParam, before


def checked_call(model: nn.Module, args: Any, kwargs: Any) -> tuple[tuple, dict[str, Any]]:
    """The example arguments as a tuple and a dict; AutoparError for what is no module, no tuple or no mapping."""
    if not isinstance(model, nn.Module):
        raise AutoparError(f"model expects a torch.nn.Module, found {named_type(model)}")
    if not isinstance(args, tuple | list | type(None)):
        raise AutoparError(
            f"args= expects a tuple of the model's positional arguments, found {named_type(args)}; write args=(x,)"
        )
    if not isinstance(kwargs, Mapping | type(None)):
        raise AutoparError(f"kwargs= expects a mapping of the model's keyword arguments, found {named_type(kwargs)}")
    return tuple(args or ()), dict(kwargs or {})


def named_type(x: Any) -> str:
    """The name of the type of `x`, with its module."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def check_not_parallel(model: nn.Module) -> None:
    """AutoparError if `model` or a part of it is wrapped by torch, or has parameters that are DTensors already.

    From now on torch's functions that shard a model refuse what is compiled here.
    """
    _watch_sharding()
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            part = f"the part {name!r} of the model" if name else "the model"
            raise AutoparError(f"{part} is wrapped in {type(module).__name__}; pass the module in it: model.module")
    is_compiled = any(isinstance(module, ShardedModule) for module in model.modules())
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor) and (is_compiled or not is_taken_over(tensor)):
            raise AutoparError(
                f"{fqn} is a DTensor already: the model was sharded before (autopar.compile, fully_shard,"
                " parallelize_module); expected the model as written for one device (compile shards in place: keep a"
                " copy.deepcopy to compile it twice)"
            )


@functools.cache
def _watch_sharding() -> None:
    before(FSDPParam, "_init_sharded_param", lambda _, x, *__: _check_not_compiled(x, "fully_shard"))
    before(FlatParamHandle, "__init__", lambda _, *given: _check_none_compiled(given[0], "FullyShardedDataParallel"))
    before(ddp, "_localize_dtensor", lambda module, *_: _check_none_compiled(module.parameters(), "replicate"))
    before(style, "distribute_tensor", lambda x, *_: _check_not_compiled(x, "parallelize_module"))


def _check_none_compiled(tensors: Iterable[torch.Tensor], function: str) -> None:
    for x in tensors:
        _check_not_compiled(x, function)


def _check_not_compiled(x: torch.Tensor, function: str) -> None:
    if is_of_autopar(x):
        raise AutoparError(
            f"{function} was given a parameter of shape {tuple(x.shape)} of a model that autopar.compile returned: it"
            " is sharded already and reduces its gradients itself; expected the model as written for one device. Leave"
            f" out {function} (pins= of autopar.compile fixes how parameters are stored) or autopar.compile"
        )
