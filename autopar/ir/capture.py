"""Running torch.export on a model without changing the model, and saying what went wrong in the model's own words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.ir.pytrees import register_types
from autopar.ir.source import line_of_error


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """The training IR of the model's forward. Raises TraceError with the model's line."""
    register_types((args, kwargs))
    is_meta = any(tensor.is_meta for tensor in model.state_dict(keep_vars=True).values())
    args, kwargs = pytree.tree_map(lambda leaf: _separate(leaf, is_meta), (args, kwargs))
    # The fake tensors of a trace draw no random numbers, but factories with constant sizes may.
    with torch.random.fork_rng(devices=()), _outputs_registered(model):
        try:
            return torch.export.export(model, args, kwargs, strict=False)
        except GuardOnDataDependentSymNode as error:
            raise TraceError(_data_dependent(error)) from error
        except Exception as error:
            line, text = line_of_error(error)
            where = f"{line}: `{text}`" if line else type(model).__name__
            raise TraceError(f"{where} cannot be traced: {type(error).__name__}: {error}") from error


def _separate(leaf: Any, is_meta: bool) -> Any:
    """A tensor object of its own for each leaf: export takes one object passed twice for one input."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = leaf.detach().to("meta") if is_meta else leaf.detach()
    return tensor.requires_grad_(leaf.requires_grad)


def _data_dependent(error: Exception) -> str:
    line, text = line_of_error(error)
    return (
        f"{line}: `{text}` branches on the values of a tensor; a plan needs one fixed program: "
        "use torch.where or a mask, or decide it from shapes and Python values before the call"
    )


@contextmanager
def _outputs_registered(model: nn.Module) -> Iterator[None]:
    """While tracing, register the types of what the model returns before export flattens it."""
    hook = model.register_forward_hook(lambda module, args, output: register_types(output))
    try:
        yield
    finally:
        hook.remove()
