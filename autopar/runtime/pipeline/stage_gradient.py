"""Gradients of a model in stages, which know that other ranks hold the rest."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.torch_compat import over_all_gradients, pytree, without_function_modes

_NORMS = frozenset((torch.linalg.vector_norm, torch.norm, torch.Tensor.norm, torch.linalg.norm))
_JOINS = frozenset((torch.stack, torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack))
_READS = frozenset(
    (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__bool__, torch.Tensor.__format__)
)
_COPIES = frozenset((torch.clone, torch.Tensor.clone))  # what optimizers keep, and save, is no gradient
_OVER_ALL = over_all_gradients()


class StageGradient(DTensor):
    """A gradient of a parameter of this rank's stages, or what was computed of it alone.

    A norm or sum of several of them is that of these stages only, and one stage that finds an infinite entry knows
    nothing of the others: both raise AutoparError, where each stage would go on with a number of its own.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_function_modes():
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if _is_over_several(func, [x for x in tensors if isinstance(x, StageGradient)]):
                raise AutoparError(
                    "the gradients here are those of this rank's stages only: a norm or sum of all, or a test for"
                    " infinite ones, would differ between the stages; call model.clip_grad_norm_(max_norm) on every"
                    " rank (of float('inf') it only measures), read what is of one gradient by full_tensor(), and"
                    " train stages in bfloat16, without a GradScaler"
                )
            made = func(*args, **kwargs)
            of_parts = [x for x in tensors if x.ndim > 0]
            if func not in _COPIES and all(isinstance(x, StageGradient) for x in of_parts):
                is_reduced = bool(of_parts) or func in _NORMS or any(isinstance(x, StageScalar) for x in tensors)
                for x in made if isinstance(made, (list, tuple)) else (made,):
                    if type(x) is DTensor:
                        x.__class__ = StageScalar if x.ndim == 0 and is_reduced else StageGradient
        return made


class StageScalar(StageGradient):
    """A norm, sum or other value without dims of a `StageGradient`."""

    __slots__ = ()


def _is_over_several(func: Any, gradients: list[StageGradient]) -> bool:
    """Whether `func` joins what is of several gradients, or reads a value as a number, which it may be joined by."""
    has_scalar = any(isinstance(x, StageScalar) for x in gradients)
    return (
        func in _OVER_ALL
        or (func in _JOINS and len(gradients) > 1)
        or (has_scalar and (func in _READS or sum(x.ndim == 0 for x in gradients) > 1))
    )


def mark_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Make the gradients of `parameters` those of stages."""
    for parameter in parameters:
        if type(parameter.grad) is DTensor:
            parameter.grad.__class__ = StageGradient
