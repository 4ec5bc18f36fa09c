"""`assignments_kept`: scipy's `linear_sum_assignment`, by which models such as DETR match predictions with targets, is
an op while a model is exported, `autopar.linear_sum_assignment`, whose results have sizes that follow from shapes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from autopar.ir.graph import resolve
from autopar.torch_compat import FakeTensor

ASSIGNMENT = "autopar.linear_sum_assignment.default"
_NAME = "linear_sum_assignment"

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("linear_sum_assignment(Tensor cost, bool maximize) -> (Tensor, Tensor)")


def _assigned(cost: torch.Tensor, maximize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if cost.is_meta or type(cost) is not torch.Tensor:
        size = min(cost.shape)
        return cost.new_empty(size, dtype=torch.int64), cost.new_empty(size, dtype=torch.int64)
    optimize = import_module("scipy.optimize")  # which the model has: autopar needs no scipy
    rows, columns = optimize.linear_sum_assignment(cost.cpu().numpy(), maximize)
    return torch.from_numpy(rows).to(cost.device), torch.from_numpy(columns).to(cost.device)


_LIBRARY.impl("linear_sum_assignment", _assigned, "CompositeExplicitAutograd")


@contextmanager
def assignments_kept() -> Iterator[None]:
    """Inside, `linear_sum_assignment` takes tensors that have no values, also as arrays of a function that calls it."""
    optimize = sys.modules.get("scipy.optimize")
    if optimize is None:
        yield
        return
    original = vars(optimize)[_NAME]

    def matched(cost_matrix: Any, maximize: bool = False) -> Any:
        if not isinstance(cost_matrix, torch.Tensor):
            return original(cost_matrix, maximize)
        return resolve(ASSIGNMENT)(cost_matrix.detach(), maximize)

    with ExitStack() as stack:
        for module in [each for each in sys.modules.values() if isinstance(each, ModuleType)]:
            for alias in [name for name, value in list(vars(module).items()) if value is original]:
                stack.enter_context(patch.object(module, alias, matched))
        stack.enter_context(patch.object(torch.Tensor, "numpy", _array_of(torch.Tensor.numpy)))
        stack.enter_context(patch.object(torch, "from_numpy", _tensor_of(torch.from_numpy)))
        yield


def _array_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.numpy`, which gives the tensor itself, without gradient, to a function that matches."""

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_for_matching = isinstance(self, FakeTensor) and _NAME in sys._getframe(1).f_code.co_names
        return self.detach() if is_for_matching else original(self, *args, **kwargs)

    return numpy


def _tensor_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_numpy(x: Any) -> torch.Tensor:
        return x if isinstance(x, torch.Tensor) else original(x)

    return from_numpy
