"""Answers that all draws of `torch.rand` give alike: `if torch.rand(1) > p: ...`, layers dropped with p of 0 or 1.

A draw of exactly 0, one of 2 ** 24, is taken as one above 0: that p of 0 drops nothing is what is meant.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.ir.guards.finite_answers import CertainAnswers, version_of

_FINE = (torch.float32, torch.float64)  # of bfloat16 one of 256 is 0
_DRAWS = frozenset(("rand", "rand_like"))
_SAME = frozenset(("detach", "cpu", "__getitem__"))
_IS_ABOVE = {
    **dict.fromkeys(("gt", "ge", "__gt__", "__ge__", "greater", "greater_equal"), True),
    **dict.fromkeys(("lt", "le", "__lt__", "__le__", "less", "less_equal"), False),
}


class DrawnAnswers(CertainAnswers):
    """The truths that hold of any number between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()  # its version when it was drawn

    def note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note draws, and what a call says of them."""
        name = getattr(func, "__name__", "").partition(".")[0]
        is_drawn = name in _DRAWS or (name in _SAME and self._is_drawn(args[0]))
        if is_drawn and isinstance(result, torch.Tensor) and result.dtype in _FINE and not result.is_inference():
            self._drawn[result] = version_of(result)
        super().note(func, args, result)

    def of_all(self, expression: Any, sources: dict[Any, torch.Tensor]) -> Any:
        """The value of an expression of numbers read of tensors, if all are draws compared with given numbers or
        answers of such; None for others.
        """
        truths = {symbol: self.of(source) for symbol, source in sources.items()}
        if None not in truths.values():
            return expression.xreplace({symbol: sympy.Integer(truth) for symbol, truth in truths.items()})
        is_order = isinstance(expression, sympy.Gt | sympy.Ge | sympy.Lt | sympy.Le)
        if not is_order or len(sources) != 1 or not sources.keys() & set(expression.args):
            return None
        ((symbol, source),) = sources.items()
        ends = {expression.subs(symbol, sympy.Rational(end, 1 << 64)) for end in (1, (1 << 64) - 1)}
        return ends.pop() if self._is_drawn(source) and len(ends) == 1 else None

    def _asked(self, name: str, args: Sequence[Any]) -> bool | None:
        is_above = _IS_ABOVE.get(name.partition(".")[0])
        if is_above is None or not self._is_drawn(args[0]) or not isinstance(args[1], int | float):
            return None
        if 0 < args[1] < 1 or not args[0].numel():
            return None
        return is_above == (args[1] <= 0)

    def _is_drawn(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x in self._drawn and self._drawn[x] == version_of(x)
