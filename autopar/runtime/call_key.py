"""The keys of a call: the parts that all ranks must agree on, and those that a program depends on; and examples."""

from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.ir.export.pytree_types import register_types
from autopar.runtime.local_batch import LocalBatch
from autopar.torch_compat import pytree

Key = tuple[Any, ...]  # what a call looks like; hashable
# Leaves that are written into a program as they are.
CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    Enum,
)


def describe_call(modes: tuple[bool, ...], args: tuple, kwargs: dict) -> tuple[Key, Key]:
    """(parts of a call that the ranks must agree on, parts that a program depends on); keywords in any order."""
    kwargs = dict(sorted(kwargs.items()))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if not all(isinstance(leaf, (torch.Tensor, *CONSTANTS)) for leaf in leaves):
        register_types((args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
    key = (tuple(map(_describe, leaves)), spec, modes)
    placements = tuple(leaf.placements if isinstance(leaf, DTensor) else None for leaf in leaves)
    return (*key, placements), key


def example_of(leaf: Any, parts: LocalBatch | None) -> Any:
    """The example for an argument in tracing; AutoparError if it is neither a tensor nor a plain constant.

    `parts`: of the batch, if each rank gives one.
    """
    if isinstance(leaf, torch.Tensor):
        shape = leaf.shape if parts is None else parts.whole_shape(leaf)
        return torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
    if isinstance(leaf, CONSTANTS):
        return leaf
    raise AutoparError(
        f"an argument of the model holds a {type(leaf).__module__}.{type(leaf).__qualname__}; expected tensors,"
        " numbers, strings, None and tuples, lists, dicts and dataclasses of these; turn it into one of them before"
        " the call"
    )


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return type(leaf), leaf if isinstance(leaf, CONSTANTS) else "not supported"
