"""The target of a command: a built-in model, or a function in the user's file."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.precision.mixed_precision import traced_in
from autopar.ir.trace_with_loss import traced
from autopar.models.catalogue import MODELS, Example, build_model
from autopar.torch_compat import pytree

NO_SIZES: Mapping[str, int] = MappingProxyType({})
_HOW = "write path.py:function, where function() returns (model, args, kwargs)"


def load_target(spec: str, dtype: torch.dtype | None = None, sizes: Mapping[str, int] = NO_SIZES) -> Example:
    """The model and batch that `spec` names, with floating tensors cast to `dtype` if given.

    `sizes`: those of `sizes_of` that are to differ. AutoparError if it cannot.
    """
    example = build_model(spec, **sizes) if ":" not in spec else _called(spec, sizes)
    if dtype is None:
        return example
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: _cast(x, dtype), (example.args, dict(example.kwargs)))
    return Example(example.model.to(dtype), args, kwargs)


def graph_of(example: Example, param_dtype: torch.dtype | None = None) -> Graph:
    """The traced model of a target, computed in `param_dtype`."""
    return traced_in(param_dtype, traced, skeleton(example.model), None, example.args, dict(example.kwargs))


def sizes_of(spec: str) -> dict[str, int]:
    """The sizes of a target that can be set, with their defaults: those of a built-in model ("layers", "batch",
    "sequence"), or the parameters of the user's function that have a whole number by default. AutoparError for no
    target.
    """
    if ":" in spec:
        parameters = inspect.signature(load_function(*_place(spec))).parameters.values()
        return {each.name: each.default for each in parameters if type(each.default) is int}
    if spec not in MODELS:
        build_model(spec)  # which says what there is
    return {name: size for name, size in MODELS[spec].keywords.items() if name in ("layers", "batch", "sequence")}


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _place(spec: str) -> tuple[str, str]:
    path, _, name = spec.rpartition(":")
    return path, name


def _called(spec: str, sizes: Mapping[str, int]) -> Example:
    if unknown := [name for name in sizes if name not in sizes_of(spec)]:
        name = unknown[0]
        raise AutoparError(
            f"{spec} has no parameter {name} with a whole number as default, which is to be {sizes[name]}: give it one,"
            f" or leave --{name} out"
        )
    result = load_function(*_place(spec))(**sizes)
    if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], nn.Module)):
        raise AutoparError(f"{spec} returned {_describe(result)}, expected (model, args, kwargs); {_HOW}")
    model, args, kwargs = result
    return Example(model, tuple(args), dict(kwargs))


def load_function(path: str, name: str, how: str = _HOW) -> Callable[..., Any]:
    """The function `name` of the user's file. AutoparError if there is none, with `how` to write it."""
    if not Path(path).is_file():
        known = f" and no built-in model of that name ({', '.join(MODELS)})" if how == _HOW else ""
        raise AutoparError(f"no file {path!r}{known}; {how}")
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for a script: the file may import its neighbours
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if module_spec is None or module_spec.loader is None:
        raise AutoparError(f"{path} is no Python file: expected its name to end in .py; {how}")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    module_spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise AutoparError(f"{path} has no function {name!r}; {how}")
    return getattr(module, name)


def _describe(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
