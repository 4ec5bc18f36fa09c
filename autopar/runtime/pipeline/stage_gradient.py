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
OF_STAGES_ONLY = (
    "the gradients here are those of this rank's stages only: a norm or sum of all would differ between the stages;"
    " call model.clip_grad_norm_(max_norm) on every rank (of float('inf') it only measures), and read what is of one"
    " gradient by full_tensor()"
)
_NORM_OF_ALL, _UNSCALE = over_all_gradients()


class StageGradient(DTensor):
    """A gradient of a parameter of this rank's stages, or what was computed of it alone.

    A norm or sum of several of them is that of these stages only: it raises AutoparError, where each stage would go on
    with a number of its own. GradScaler divides gradients by a scale, which the loss must have been multiplied by.
    """

    __slots__ = ()

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> "StageGradient":  # type: ignore[override]
        """Asked by torch.compile(optimizer.step), which takes tensors of this class apart and puts them together."""
        made: Any = DTensor.__tensor_unflatten__(*args)
        made.__class__ = StageGradient
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(kind, StageGradient) for kind in types):  # what stands for gradients of other stages
            return NotImplemented
        with without_function_modes():
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if func is _UNSCALE and not all(isinstance(x, ScaledGradient) for x in args[0]):
                raise AutoparError(
                    "GradScaler would divide gradients of a loss that was not multiplied by its scale: model.train_step"
                    " runs backward itself, so give it the scaler, model.train_step(..., scaler=scaler), in place of"
                    " scaler.scale(loss).backward()"
                )
            if _is_over_several(func, [x for x in tensors if isinstance(x, StageGradient)]):
                raise AutoparError(OF_STAGES_ONLY)
            made = func(*args, **kwargs)
            of_parts = [x for x in tensors if x.ndim > 0]
            if func not in _COPIES and all(isinstance(x, StageGradient) for x in of_parts):
                is_scaled = any(isinstance(x, ScaledGradient) for x in of_parts)
                like = ScaledGradient if is_scaled else StageGradient
                is_reduced = bool(of_parts) or func in _NORMS or any(isinstance(x, StageScalar) for x in tensors)
                for x in made if isinstance(made, (list, tuple)) else (made,):
                    if type(x) is DTensor:
                        x.__class__ = StageScalar if x.ndim == 0 and is_reduced else like
        return made


class ScaledGradient(StageGradient):
    """A gradient of a loss times the scale of a GradScaler, which divides by it."""

    __slots__ = ()


class StageScalar(StageGradient):
    """A norm, sum or other value without dims of a `StageGradient`."""

    __slots__ = ()


def _is_over_several(func: Any, gradients: list[StageGradient]) -> bool:
    """Whether `func` joins what is of several gradients, or reads a value as a number, which it may be joined by."""
    has_scalar = any(isinstance(x, StageScalar) for x in gradients)
    return (
        func is _NORM_OF_ALL
        or (func in _JOINS and len(gradients) > 1)
        or (has_scalar and (func in _READS or sum(x.ndim == 0 for x in gradients) > 1))
    )


def mark_gradients(parameters: Iterable[torch.Tensor], *, is_scaled: bool) -> None:
    """Make the gradients of `parameters` those of stages, of a scaled loss or not."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and type(gradient) in (DTensor, StageGradient, ScaledGradient):
            gradient.__class__ = ScaledGradient if is_scaled else StageGradient


def take_as_single(gradients: Iterable[torch.Tensor | None]) -> None:
    """Let each of the `gradients` of stages be read by itself, for an update that joins nothing of several of them."""
    for gradient in gradients:
        if type(gradient) is StageGradient:
            gradient.__class__ = DTensor  # type: ignore[assignment]
