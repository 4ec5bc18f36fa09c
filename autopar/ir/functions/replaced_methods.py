"""Methods of tensors that a script replaced by functions of its own (`Tensor.tanh = ...`), while a model is traced.

torch tells a function mode a builtin method by its name in `torch.Tensor`, and so names the one that took its place,
which the mode would call again: a trace, which has several modes, would apply it as often.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def replaced_methods_called_once() -> Iterator[None]:
    """Inside, what replaces a builtin method is the builtin one where modes call it, within the replacement itself."""
    builtin = torch.Tensor.__mro__[1]
    with ExitStack() as stack:
        for name, method in tuple(vars(torch.Tensor).items()):
            is_new = isinstance(method, FunctionType) and method.__module__.partition(".")[0] not in (
                "torch",
                "autopar",
            )
            if is_new and (original := vars(builtin).get(name)) is not None:
                stack.enter_context(patch.object(torch.Tensor, name, _once(method, original)))
        yield


def _once(method: FunctionType, original: Callable[..., Any]) -> Callable[..., Any]:
    is_within = False

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_within
        if is_within:
            return original(*args, **kwargs)
        is_within = True
        try:
            return method(*args, **kwargs)
        finally:
            is_within = False

    return call
