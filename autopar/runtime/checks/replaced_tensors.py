"""`ReplacedParameter`: a parameter that a user still holds after a sharded one replaced it in its module."""

from typing import Any, NoReturn

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.torch_compat import pytree


class ReplacedParameter(nn.Parameter):
    """A parameter that is no longer one: every use but `repr` raises AutoparError with the name it had."""

    fqn: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ReplacedParameter))
        raise AutoparError(
            f"this tensor was parameter {found.fqn!r} until autopar.compile put a sharded one in its place: an"
            " optimizer or average made of it would train and save nothing; make it of model.parameters() after"
            " autopar.compile (or compile a copy.deepcopy of the model)"
        )

    def __repr__(self, **_: Any) -> str:
        return f"<parameter {self.fqn!r}, replaced by autopar.compile>"


def mark_replaced(parameter: torch.Tensor, fqn: str) -> None:
    """Turn `parameter`, of exactly the type nn.Parameter, into a `ReplacedParameter` without memory of its own."""
    if type(parameter) is nn.Parameter:
        parameter.grad = None
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        parameter.__class__ = ReplacedParameter
        vars(parameter)["fqn"] = fqn
