"""Inference of shapes, dtypes and needs_grad of an op's outputs, by running it on the meta device under autograd."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.call_args import fill
from autopar.ir.graph import Value, resolve

# Arguments of factory ops for the placement of their result, which a graph for any device has not.
PLACEMENT_KWARGS = ("device", "pin_memory", "layout", "memory_format")


@dataclass(frozen=True, slots=True)
class Meta:
    """The properties of an output that has no name yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass(frozen=True)
class Inference:
    """A cache of inferences by call, so that repeated layers are inferred once; it lives as long as one trace."""

    known: dict[Any, tuple[tuple[Meta, ...], bool]] = field(default_factory=dict)

    def outputs(
        self, target: str, args: Any, kwargs: Sequence[tuple[str, Any]], inputs: Sequence[Value], is_no_grad: bool
    ) -> tuple[tuple[Meta, ...], bool]:
        """(outputs, whether the call returns a tuple); raises the errors of the op on such inputs."""
        # repr tells 1, 1.0 and True apart, which hashing does not.
        key = (target, repr(args), repr(kwargs), tuple((v.shape, v.dtype, v.needs_grad) for v in inputs), is_no_grad)
        if key not in self.known:
            self.known[key] = _run_on_meta(target, args, kwargs, inputs, is_no_grad)
        return self.known[key]


def _run_on_meta(
    target: str, args: Any, kwargs: Any, inputs: Sequence[Value], is_no_grad: bool
) -> tuple[tuple[Meta, ...], bool]:
    function = resolve(target)
    tensors = [torch.empty(v.shape, dtype=v.dtype, device="meta", requires_grad=v.needs_grad) for v in inputs]
    named = {name: fill(value, tensors) for name, value in kwargs if name not in PLACEMENT_KWARGS}
    if not inputs and any(arg.name == "device" for arg in function._schema.arguments):
        named["device"] = "meta"
    with torch.set_grad_enabled(not is_no_grad):
        result = function(*fill(args, tensors), **named)
    is_tuple = isinstance(result, (tuple, list))
    return tuple(_meta_of(tensor) for tensor in (result if is_tuple else (result,))), is_tuple


def _meta_of(tensor: torch.Tensor) -> Meta:
    return Meta(tuple(int(size) for size in tensor.shape), tensor.dtype, tensor.requires_grad)
