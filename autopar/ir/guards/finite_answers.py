"""Answers of a model that asks whether its numbers are finite, `if not torch.isfinite(x).all(): x = x.clamp(...)`.

They are taken to be, whatever computes them, and each call checks that.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_OF_FINITE = {"isfinite": True, "isinf": False, "isposinf": False, "isneginf": False, "isnan": False}
_NOT = frozenset(("logical_not", "bitwise_not", "__invert__"))
_OF_TWO = {
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), any),
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), all),
}
_ASKED = "ne.Scalar"  # what `if x` compares with 0
_SAME = frozenset(("all", "any", "detach", "cpu", _ASKED))


class FiniteAnswers:
    """The truths of tensors, the same for each element, that hold if all numbers are finite."""

    def __init__(self) -> None:
        self._truths: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()

    def note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note what a call of torch or an op of aten says, if it asks for finite numbers or reads such an answer."""
        truth = self._truth(getattr(func, "__name__", ""), args)
        if truth is not None and isinstance(result, torch.Tensor):
            self._truths[result] = truth

    def of(self, x: torch.Tensor) -> bool | None:
        """The truth that all elements of `x` have, if it is such an answer."""
        return self._truths.get(x)

    def _truth(self, name: str, args: Sequence[Any]) -> bool | None:
        if name in _OF_FINITE and isinstance(args[0], torch.Tensor) and args[0].numel():
            return _OF_FINITE[name]
        if name not in _NOT | _SAME | _OF_TWO.keys() or (name == _ASKED and args[1] != 0):
            return None
        known = [self._truths.get(x) for x in args[: 1 + (name in _OF_TWO)] if isinstance(x, torch.Tensor)]
        if not known or None in known:
            return None
        return not known[0] if name in _NOT else _OF_TWO.get(name, all)(known)
