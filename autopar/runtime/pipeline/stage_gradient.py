"""Gradients of a model in stages, which know that other ranks hold the rest."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.torch_compat import over_all_gradients, pytree, without_function_modes

_NORMS = frozenset((torch.linalg.vector_norm, torch.norm, torch.Tensor.norm, torch.linalg.norm))
_JOINS = frozenset((torch.stack, torch.cat, torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__))
_OVER_ALL = over_all_gradients()


class StageGradient(DTensor):
    """A gradient, or the norm of one, of a parameter of this rank's stages.

    A norm of several of them is that of these stages only, and one stage that finds an infinite entry knows nothing of
    the others: both raise AutoparError, where each stage would go on with a number of its own.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_function_modes():
            num_norms = _num_norms((args, kwargs))
        if func in _OVER_ALL or (func in _JOINS and num_norms > 1):
            raise AutoparError(
                "the gradients here are those of this rank's stages only: a norm of all, or a test for infinite ones,"
                " would differ between the stages; call model.clip_grad_norm_(max_norm), which every rank calls, and"
                " train stages in bfloat16, without a GradScaler"
            )
        with without_function_modes():
            made = func(*args, **kwargs)
            if (func in _NORMS or num_norms) and type(made) is DTensor and made.ndim == 0:
                made.__class__ = StageGradient
        return made


def _num_norms(item: Any) -> int:
    return sum(isinstance(x, StageGradient) and x.ndim == 0 for x in pytree.tree_leaves(item))


def mark_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Make the gradients of `parameters` those of stages."""
    for parameter in parameters:
        if type(parameter.grad) is DTensor:
            parameter.grad.__class__ = StageGradient
