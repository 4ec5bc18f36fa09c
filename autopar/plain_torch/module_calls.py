"""`called_modules`: what each module of a model is called with and returns, of a run on fake tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.torch_compat import FakeTensorMode, pytree

Shape = tuple[int, ...]
# What a module returns: the shape of a row of a tensor, a tuple of such, or None.
Returned = list[int] | tuple[Any, ...] | None


@dataclass(frozen=True)
class ExampleRun:
    """A model with an example batch, to try layouts on; `graphs`: of its stages, or of the whole."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graphs: Sequence[Graph]


@dataclass(frozen=True)
class ModuleCall:
    """The calls of a module: their number, the shape of the first tensor that it is given (None: it is given no tensor
    first), whether that has a gradient, and what it returns; `is_plain`: if stand-ins can return the like, whatever the
    number of rows, and all of it has a gradient: what has none may be read by other stages, which would have to
    compute it.
    """

    count: int
    given: Shape | None
    is_activation: bool
    returned: Returned
    is_plain: bool


def called_modules(example: ExampleRun) -> dict[str, ModuleCall]:
    """FQN -> calls of each module that is called; PlanError if the model does not run on fake tensors."""
    calls: dict[str, ModuleCall] = {}

    def watch(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            first = next(iter((*args, *kwargs.values())), None)
            is_made = isinstance(first, torch.Tensor) and not isinstance(first, nn.Parameter)
            given = tuple(first.shape) if is_made else None
            before = calls.get(name)
            is_activation = is_made and first.requires_grad
            returned, is_plain = _returned(output, given)
            is_alike = before is None or (before.returned, before.given) == (returned, given)
            calls[name] = ModuleCall(
                (before.count if before else 0) + 1, given, is_activation, returned, is_plain and is_alike
            )

        return note

    def change(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())  # of frozen ones results are followed all the same
        for name, module in model.named_modules():
            module.register_forward_hook(watch(name), with_kwargs=True)
        return model

    try:
        fake_call(example, change)
    except Exception as error:  # whatever the model's code raises
        told = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise PlanError(f"the model does not run on tensors without contents, on the CPU: {told}") from error
    return calls


def fake_call(example: ExampleRun, change: Callable[[nn.Module], nn.Module]) -> None:
    """Call what `change` makes of a copy of the model on the CPU, whose tensors have no contents, with the batch."""
    model = skeleton(example.model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = change(model.to_empty(device="cpu"))
        args, kwargs = fake_batch(example)
        model(*args, **kwargs)


def fake_batch(example: ExampleRun) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch on the CPU without contents; within a FakeTensorMode."""
    return pytree.tree_map_only(
        torch.Tensor, lambda x: torch.empty_like(x, device="cpu"), (tuple(example.args), dict(example.kwargs))
    )


def _returned(output: Any, given: Shape | None) -> tuple[Returned, bool]:
    """(what a module returns, whether its rows are those of what it is given)."""
    if isinstance(output, torch.Tensor):
        is_plain = bool(given) and bool(output.shape) and output.shape[0] == given[0] and output.requires_grad
        return list(output.shape[1:]), is_plain
    if output is None:
        return None, True
    if type(output) is tuple:
        parts = [_returned(part, given) for part in output]
        return tuple(part for part, _ in parts), all(is_plain for _, is_plain in parts)
    return None, False
