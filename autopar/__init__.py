"""autopar: an unmodified model goes in, a sharded module that trains the same comes out."""

import importlib
import sys
from types import ModuleType
from typing import Any

# Loaded at first use, so that the solver's child process starts without importing torch.
_HOMES = {
    "AutoparError": "autopar.errors",
    "Cluster": "autopar.costmodel.cluster",
    "Plan": "autopar.plan.plan",
    "compile": "autopar.api",
    "offload_optimizer": "autopar.codegen.offload_optimizer",
    "plan": "autopar.api",
    "unshare": "autopar.ir.unshare",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")


class _Package(ModuleType):
    # Importing the subpackage autopar.plan would bind it here in place of the function of that name.
    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "plan" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
