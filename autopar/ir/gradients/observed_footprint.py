"""The autograd footprint of one call, as observed by running the op on tensors without data."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.ir.function_ops import class_of
from autopar.ir.graph import Op, Slot, Value, resolve
from autopar.torch_compat import pytree

Spec = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, needs_grad


@dataclass(frozen=True, slots=True)
class Footprint:
    """The tensors that autograd saves for an op, and the memory that its outputs share with its inputs.

    `saved_inputs`, `saved_outputs`: positions of saved tensors. `internal_bytes`: of all other saved tensors, for
    global shapes. `alias_of`: for each output the input whose memory it shares, -1 for none. `is_assumed`: not observed
    by running the op.
    """

    saved_inputs: frozenset[int]
    saved_outputs: frozenset[int]
    internal_bytes: int
    alias_of: tuple[int, ...]
    is_assumed: bool = False

    @property
    def is_view(self) -> bool:
        """Whether all outputs share memory with an input, so that the op moves no bytes."""
        return bool(self.alias_of) and min(self.alias_of) >= 0


@lru_cache(maxsize=2**16)
def observe(
    target: str, args: Any, kwargs: Any, inputs: tuple[Spec, ...], gathered: tuple[int, int] | None = None
) -> Footprint:
    """The footprint as observed on tensors without data; `gathered`: a slot, and its dim that is first in memory."""
    tensors = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs) for shape, dtype, needs in inputs]
    if gathered is not None:
        (shape, dtype, needs), dim = inputs[gathered[0]], gathered[1]
        first = torch.empty((shape[dim], *shape[:dim], *shape[dim + 1 :]), dtype=dtype, device="meta")
        tensors[gathered[0]] = first.movedim(0, dim).requires_grad_(needs)
    given = fill(args, tensors), {name: fill(value, tensors) for name, value in kwargs}
    saved: list[torch.Tensor] = []
    with torch.enable_grad(), saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = pytree.tree_leaves(resolve(target)(*given[0], **given[1]))
    results = [result for result in results if isinstance(result, torch.Tensor)]
    inside, outside = storages(tensors), storages(results)
    kept = {id(t.untyped_storage()): t for t in saved}
    internal = sum(t.numel() * t.itemsize for key, t in kept.items() if key not in inside and key not in outside)
    alias_of = tuple(inside.get(id(result.untyped_storage()), -1) for result in results)
    outputs = frozenset(outside[key] for key in kept if key in outside and key not in inside)
    return Footprint(frozenset(inside[key] for key in kept if key in inside), outputs, internal, alias_of)


def saves(op: Op, values: Collection[Value]) -> bool:
    """Whether backward of `op` reads one of the `values`, its inputs or outputs; True where no run tells."""
    if op.is_no_grad or not any(value.needs_grad for value in op.outputs):
        return False
    inputs = tuple((value.shape, value.dtype, value.needs_grad) for value in op.inputs)
    try:
        found = observe(op.target, op.args, op.kwargs, inputs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, AssertionError):
        return True
    kept = [op.inputs[slot] for slot in found.saved_inputs] + [op.outputs[slot] for slot in found.saved_outputs]
    return class_of(op.target) is not None or any(value in values for value in kept)


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Identity of a tensor's storage -> its position; the tensors keep their storages alive."""
    return {id(tensor.untyped_storage()): position for position, tensor in enumerate(tensors)}


def fill(arg: Any, tensors: list[torch.Tensor]) -> Any:
    """An op's argument with `tensors` in place of its slots."""
    if isinstance(arg, Slot):
        return tensors[arg.index]
    if isinstance(arg, tuple):
        return [fill(item, tensors) for item in arg]
    return torch.device("meta") if isinstance(arg, torch.device) else arg
