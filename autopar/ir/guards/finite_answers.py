"""Answers of a model that asks whether its numbers are finite, `if not torch.isfinite(x).all(): x = x.clamp(...)`.

They are taken to be, whatever computes them, and each call checks that.
"""

from abc import ABC, abstractmethod
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


class CertainAnswers(ABC):
    """The truths of tensors, the same for each element, that follow from questions whose answer is certain."""

    def __init__(self) -> None:
        self._truths: MutableMapping[torch.Tensor, tuple[bool, int]] = WeakTensorKeyDictionary()  # at which version

    def note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note what a call of torch or an op of aten says, if it asks for finite numbers or reads such an answer."""
        truth = self._truth(getattr(func, "__name__", ""), args)
        if truth is not None and isinstance(result, torch.Tensor):
            self._truths[result] = truth, version_of(result)

    def of(self, x: torch.Tensor) -> bool | None:
        """The truth that all elements of `x` have, if it is such an answer."""
        truth, version = self._truths.get(x, (None, 0))
        return truth if version == version_of(x) else None

    def _truth(self, name: str, args: Sequence[Any]) -> bool | None:
        asked = self._asked(name, args)
        if asked is not None:
            return asked
        if name not in _NOT | _SAME | _OF_TWO.keys() or (name == _ASKED and args[1] != 0):
            return None
        known = [self.of(x) for x in args[: 1 + (name in _OF_TWO)] if isinstance(x, torch.Tensor)]
        if not known or None in known:
            return None
        return not known[0] if name in _NOT else _OF_TWO.get(name, all)(known)

    @abstractmethod
    def _asked(self, name: str, args: Sequence[Any]) -> bool | None:
        """The certain answer of a call that asks."""


class FiniteAnswers(CertainAnswers):
    """The truths that hold if all numbers are finite."""

    def _asked(self, name: str, args: Sequence[Any]) -> bool | None:
        is_asked = name in _OF_FINITE and isinstance(args[0], torch.Tensor) and args[0].numel()
        return _OF_FINITE[name] if is_asked else None


def version_of(x: torch.Tensor) -> int:
    """How often a tensor was written to, as far as torch counts."""
    return 0 if x.is_inference() else x._version
