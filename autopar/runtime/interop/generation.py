"""`for_generation`: the parts of a model that transformers' `generate` takes besides forward: device and encoder."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.ir.kept_attributes import Unannounced
from autopar.runtime.dtensor_state import gathered
from autopar.runtime.interop.full_state import all_called
from autopar.runtime.interop.stand_ins import own_parameters
from autopar.runtime.module_runtime import Runtime


def for_generation(original: type[nn.Module]) -> dict[str, Any]:
    """The `device` and the `get_encoder` of the sharded class, by these names, as far as `original` has them."""
    members: dict[str, Any] = {}
    if isinstance(device := getattr(original, "device", None), property):
        members["device"] = property(lambda self: _device_of(self, device))
    if callable(get_encoder := getattr(original, "get_encoder", None)):
        members["get_encoder"] = lambda self, *args, **kwargs: _with_whole_tensors(self, get_encoder, args, kwargs)
    return members


def _device_of(model: Any, device: property) -> torch.device:
    """The device of the tensors; before they are planned, that on which they will be."""
    runtime: Runtime = model._autopar
    return torch.device(runtime.mesh.device_type) if runtime.last is None else device.__get__(model)


def _with_whole_tensors(model: Any, get_encoder: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The encoder, which can be called under torch.no_grad(); `model` itself, where that is it, as it is."""
    encoder = get_encoder(model, *args, **kwargs)
    if encoder is model or not isinstance(encoder, nn.Module):
        return encoder
    whole = copy.copy(encoder)
    whole.__class__ = type(
        type(encoder).__name__, (_CalledWhole, type(encoder)), {"__module__": type(encoder).__module__}
    )
    vars(whole)["_of"] = model, encoder
    return whole


class _CalledWhole(Unannounced, nn.Module):
    """Mixed into the class of a part of a sharded module that is called by itself: without gradients it runs on whole
    tensors, gathered for the call, as on one device.
    """

    _of: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, part = self._of
        runtime: Runtime = model._autopar
        if torch.is_grad_enabled():
            return part(*args, **kwargs)
        if runtime.elsewhere:
            raise AutoparError(
                f"{type(part).__name__} was called alone, and this rank holds the parameters of its own stages only; to"
                " generate, compile the model for a mesh without a pipeline axis"
            )
        if runtime.last is None:  # not planned yet: its own tensors are in the place of those that are to come
            with own_parameters(model, runtime.own, runtime.mesh):
                runtime.make_equal(model, {**dict(model.named_parameters()), **dict(model.named_buffers())})
                return part(*args, **kwargs)
        all_called(runtime, "get_encoder()(...) or model.generate")
        held = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        tensors = {fqn: gathered(x) if isinstance(x, DTensor) else x for fqn, x in held.items()}
        return torch.func.functional_call(part, tensors, args, kwargs)
