"""Nested call arguments: replacing the tensors in them by `Slot`s, and the `Slot`s by other values."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.ir.graph import Op, Slot, resolve


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to the leaves of nested lists and tuples; lists become tuples."""
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return tuple(map_leaves(item, function) for item in tree)
    return tuple(tree) if isinstance(tree, torch.Size) else function(tree)


def fill(tree: Any, inputs: Sequence[Any]) -> Any:
    """Replace every `Slot(i)` by `inputs[i]`.

    >>> fill((Slot(0), (Slot(1), 2)), ["a", "b"])
    ('a', ('b', 2))
    """
    return map_leaves(tree, lambda leaf: inputs[leaf.index] if isinstance(leaf, Slot) else leaf)


def take_slots(
    args: Any, kwargs: dict[str, Any], is_input: Callable[[Any], bool]
) -> tuple[Any, tuple[tuple[str, Any], ...], tuple[Any, ...]]:
    """(args, kwargs, inputs) with every leaf that `is_input` moved to `inputs` and a `Slot` in its place."""
    inputs: list[Any] = []

    def take(leaf: Any) -> Any:
        if not is_input(leaf):
            return leaf
        inputs.append(leaf)
        return Slot(len(inputs) - 1)

    slotted = map_leaves(args, take)
    return slotted, tuple((name, map_leaves(value, take)) for name, value in kwargs.items()), tuple(inputs)


def call(op: Op, inputs: Sequence[torch.Tensor], **extra: Any) -> tuple[torch.Tensor, ...]:
    """The outputs of `op` run on `inputs`; `extra`: further keyword arguments, such as the device of a factory op."""
    kwargs = {name: fill(value, inputs) for name, value in op.kwargs}
    with torch.set_grad_enabled(torch.is_grad_enabled() and not op.is_no_grad):
        result = resolve(op.target)(*fill(op.args, inputs), **kwargs, **extra)
    return tuple(result) if op.is_tuple else (result,)


def takes_device(op: Op) -> bool:
    """Whether `op` is a factory: it reads no tensor and takes the device of its output as an argument."""
    return not op.inputs and any(arg.name == "device" for arg in resolve(op.target)._schema.arguments)
