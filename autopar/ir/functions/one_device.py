"""While a model is traced, it is on one device: a program computes what that does with the whole batch, and its sums
over ranks are those of the plan.

A forward that asks torch whether there are other ranks is told that there are none, and so leaves out collectives of
its own; one that calls a collective nevertheless is refused.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from autopar.errors import TraceError
from autopar.ir.export.source_lines import COMMUNICATES
from autopar.ir.guards.export_hooks import fake_ops_seen_by

_ASKS = (
    "torch.distributed.{} in a custom torch.autograd.Function, which the compiled model calls itself, has another"
    " answer than on the one device whose numbers the model computes: ask in forward, and hand the answer to apply"
)
_COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d")
_ANSWERS = {"is_initialized": False, "get_rank": 0, "get_world_size": 1}
_OF_OBJECTS = tuple(f"{x}_object" for x in ("all_gather", "gather")) + tuple(
    f"{x}_object_list" for x in ("broadcast", "scatter", "send", "recv")
)
_TOLD = ("torch", "autopar")  # whose own code is told the truth
_functions = threading.local()


@contextmanager
def on_one_device(classes: Iterable[type]) -> Iterator[None]:
    """Inside, torch.distributed is not initialised for this thread's code of the packages that have the `classes`, and
    collectives of tensors without data raise TraceError: they would wait for ranks, with nothing to send.
    """
    packages = {each.__module__.split(".")[0] for each in classes} - {*_TOLD}
    with ExitStack() as stack:
        for owner, alias, name in _places(frozenset(packages), len(sys.modules)) if dist.is_available() else ():
            stack.enter_context(patch.object(owner, alias, _answered(getattr(owner, alias), name)))
        stack.enter_context(fake_ops_seen_by(_checked))
        yield


@lru_cache(maxsize=64)
def _places(packages: frozenset[str], num_modules: int) -> tuple[tuple[Any, str, str], ...]:
    """Where the functions of torch.distributed are found: (module, its name for the function, that of torch).

    `num_modules`: of all that are imported, which tells that they are the same.
    """
    originals = {getattr(dist, name): name for name in (*_ANSWERS, *_OF_OBJECTS)}
    owners = [dist, *(module for name, module in [*sys.modules.items()] if name.split(".")[0] in packages)]
    return tuple(
        (owner, alias, originals[value])
        for owner in owners
        for alias, value in [*vars(owner).items()]
        if type(value) is FunctionType and value in originals
    )


@contextmanager
def in_function() -> Iterator[None]:
    """Inside, what runs is of a custom function, which a program calls too: questions about ranks raise TraceError."""
    before, _functions.is_inside = getattr(_functions, "is_inside", False), True
    try:
        yield
    finally:
        _functions.is_inside = before


def _answered(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    thread = threading.get_ident()

    def answer(*args: Any, **kwargs: Any) -> Any:
        is_told = sys._getframe(1).f_globals.get("__name__", "").split(".")[0] in _TOLD
        if is_told or threading.get_ident() != thread:
            return original(*args, **kwargs)
        if name not in _ANSWERS:
            raise TraceError(COMMUNICATES)
        if getattr(_functions, "is_inside", False):
            raise TraceError(_ASKS.format(name))
        return _ANSWERS[name]

    return answer


def _checked(original: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> Any:
    if func.namespace in _COLLECTIVES:
        raise TraceError(COMMUNICATES)
    return original()
