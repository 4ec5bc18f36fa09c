"""`skeleton`: a copy of a model without data, which is traced."""

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.ir.guards.example_values import keep_value
from autopar.ir.rarely_collected import rarely_collected


@rarely_collected()
def skeleton(model: nn.Module, shared: Iterable[object] = ()) -> nn.Module:
    """A deep copy of `model` with plain meta tensors for its parameters and buffers; ties are kept, no data is copied.

    Attributes that a forward hook has computed of parameters (pruning, weight norm) are copied without their graph.
    Functions that were set on modules, and their hooks, get closures over the copy. `shared`: objects that the copy has
    too.

    Raises the errors of `copy.deepcopy` for attributes that cannot be copied.
    """
    empty: dict[int, object] = {id(x): bare(x) for x in model.parameters()}
    empty |= {id(x): _bare_buffer(x) for x in model.buffers()}
    computed = [x for module in model.modules() for x in vars(module).values() if isinstance(x, torch.Tensor)]
    empty |= {id(x): bare(x).requires_grad_(False) for x in computed if not x.is_leaf and id(x) not in empty}
    of_hooks = [
        x for module in model.modules() for hook in module._forward_pre_hooks.values() for x in _tensors_of(hook)
    ]
    empty |= {id(x): x.detach().clone() for x in of_hooks if id(x) not in empty}  # torch copies no view of a DTensor
    # Each module has several tables, of hooks above all, mostly empty, which copy.deepcopy copies slowly.
    empty |= {
        id(x): type(x)()
        for module in model.modules()
        for x in vars(module).values()
        if type(x) in (OrderedDict, dict, set) and not x
    }
    copies = empty | {id(x): x for x in shared}
    made = copy.deepcopy(model, copies)
    for module in made.modules():
        tables: tuple[dict[Any, Any], ...] = vars(module), module._forward_hooks, module._forward_pre_hooks
        for functions in tables:
            for name, function in functions.items():
                if isinstance(function, (FunctionType, MethodType, functools.partial)):
                    functions[name] = _of_copies(function, copies)
    return made


def _of_copies(x: Any, copies: dict[int, object]) -> Any:
    """`x` with what has a copy replaced by it, in closures too, which `copy.deepcopy` leaves as they are; `x` itself if
    there is nothing to replace. `copies`: id -> copy.
    """
    if id(x) in copies:
        return copies[id(x)]
    if isinstance(x, FunctionType):
        return _function(x, copies)
    if isinstance(x, MethodType):
        parts = [x.__func__, x.__self__]
    elif isinstance(x, functools.partial):
        parts = [x.func, *x.args, *x.keywords.values()]
    elif type(x) in (list, tuple):
        parts = [*x]
    else:
        return x
    moved = [_of_copies(part, copies) for part in parts]
    if all(new is old for new, old in zip(moved, parts)):
        return x
    if isinstance(x, functools.partial):
        count = 1 + len(x.args)
        return functools.partial(*moved[:count], **dict(zip(x.keywords, moved[count:])))
    return MethodType(*moved) if isinstance(x, MethodType) else type(x)(moved)


def _function(x: FunctionType, copies: dict[int, object]) -> FunctionType:
    """A function like `x`, or `x` if it encloses nothing that has a copy; cells of anything else are shared."""
    copies[id(x)] = x  # it may enclose itself
    cells = [(cell, _content(cell)) for cell in x.__closure__ or ()]
    moved = [_of_copies(content, copies) for _, content in cells]
    if all(new is old for new, (_, old) in zip(moved, cells)):
        return x
    closure = tuple(cell if new is old else CellType(new) for new, (cell, old) in zip(moved, cells))
    made = FunctionType(x.__code__, x.__globals__, x.__name__, x.__defaults__, closure)
    made.__kwdefaults__ = x.__kwdefaults__
    copies[id(x)] = functools.update_wrapper(made, x)
    made.__dict__.pop("__wrapped__")
    made.__dict__.update({name: _of_copies(value, copies) for name, value in vars(x).items()})
    return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _bare_buffer(x: torch.Tensor) -> torch.Tensor:
    """As `bare`, with what the buffer holds on every rank for branches that read it."""
    empty = bare(x)
    if not (isinstance(x, DTensor) and any(p.is_shard() for p in x.placements)):
        keep_value(empty, x.to_local() if isinstance(x, DTensor) else x)
    return empty


def bare(x: torch.Tensor) -> torch.Tensor:
    """A plain tensor or parameter like `x` without data."""
    # not empty_like: of a DTensor that would be a DTensor
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty


def _tensors_of(hook: object) -> list[torch.Tensor]:
    return [x for x in getattr(hook, "__dict__", {}).values() if isinstance(x, torch.Tensor)]
