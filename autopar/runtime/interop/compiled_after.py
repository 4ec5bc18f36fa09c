"""`CompiledAfter`: a sharded module under torch.compile, which breaks its graph and cannot be asked for one; and in
traces and function modes of others, which are refused.
"""

from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.torch_compat import function_modes, module_of_caller, wants_one_graph

_REFUSED = (
    "torch.compile(fullgraph=True) of a model that autopar.compile returned: expected fullgraph=False, the default, for"
    " autopar looks at the arguments of each call, and at what was done to the model, outside of compiled graphs. Leave"
    " fullgraph out"
)


class CompiledAfter(nn.Module):
    """Mixed into a sharded module's class."""

    @property
    def _initialize_hook(self) -> Any:
        """Asked by torch.compile as it wraps a module: whether it is lazy, which a sharded one is not.

        AutoparError if it is to be one graph.
        """
        if wants_one_graph():
            raise AutoparError(_REFUSED)
        raise AttributeError("_initialize_hook")

    @property
    def __jit_ignored_attributes__(self) -> Any:
        """Asked by torch.jit.script and trace, which would read all others as part of the model."""
        if "jit" in module_of_caller().partition("torch.")[2]:
            check_not_traced("torch.jit.script or torch.jit.trace")
        raise AttributeError("__jit_ignored_attributes__")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `nn.Module.compile`; AutoparError with `fullgraph`."""
        if kwargs.get("fullgraph"):
            raise AutoparError(_REFUSED)
        super().compile(*args, **kwargs)


def check_not_traced(by: str) -> None:
    """AutoparError where `by`, "" for nobody, traces the call: what is between collectives would be all there is."""
    if by:
        raise AutoparError(
            f"{by} of a model that autopar.compile returned, of which each rank has parts: expected the model as"
            " written for one device. Build that, give it the weights, model.full_state_dict(), by load_state_dict, and"
            " trace it"
        )


@torch.compiler.disable
def check_no_function_mode() -> None:
    """AutoparError inside somebody's `TorchFunctionMode`: a program calls other functions than the forward does."""
    modes = [type(mode) for mode in function_modes()]
    if found := next((mode for mode in modes if mode.__module__.partition(".")[0] not in ("torch", "autopar")), None):
        raise AutoparError(
            f"the compiled model was called inside {found.__qualname__}, a TorchFunctionMode, which sees, and may"
            " change, the functions that a forward calls; a compiled model runs a program, which calls others. Call the"
            " model outside of the mode, and do what it changes in the model, before autopar.compile. A"
            " TorchDispatchMode sees the ops that run"
        )
