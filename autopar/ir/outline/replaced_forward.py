"""`replaced_forward`: another forward of a module for a while."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn


@contextmanager
def replaced_forward(
    module: nn.Module, called: Callable[..., Any], signature: inspect.Signature | None = None
) -> Iterator[None]:
    """A context in which the module's forward is `called`, an attribute of its own, which shows `signature`: by default
    that of the forward it takes the place of.
    """
    forward, own = module.forward, module.__dict__.get("forward")

    @wraps(forward)
    def replacing(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    # functools.wraps would show that of a method's function, with `self`
    vars(replacing)["__signature__"] = signature or inspect.signature(forward)
    module.__dict__["forward"] = replacing
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own
