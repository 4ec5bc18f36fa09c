"""Numbers that a forward draws by Python's generator or NumPy's: a program draws none, so none may matter to it.

Layers are dropped by `numpy.random.uniform(0, 1) < self.layerdrop`, words of a teacher given by `random.random() <
ratio`; with 0 or 1 there all draws say the same.
"""

import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

from autopar.errors import TraceError

DRAWN = (
    "the forward draws from {}, and a program would have the same numbers in each call: draw by torch (torch.rand and"
    " torch.where; nn.Dropout), or outside and hand the number in as an argument"
)
_PYTHON, _NUMPY = "Python's random", "numpy.random"
_OTHER_USES = """abs add bool complex divmod eq float floordiv hash index int matmul mod mul ne neg pos pow radd
    rdivmod rfloordiv rmatmul rmod rmul round rpow rsub rtruediv sub truediv trunc"""


class Drawn:
    """Any number of [low, high): comparisons that all of them answer alike have that answer. TraceError for all other
    uses of it, which would keep one of them.
    """

    def __init__(self, low: float, high: float, source: str) -> None:
        self.low, self.high, self.source = low, high, source

    def __lt__(self, other: Any) -> bool:
        return self._answer(other, lambda bound: self.high <= bound, lambda bound: self.low >= bound)

    def __gt__(self, other: Any) -> bool:
        return self._answer(other, lambda bound: self.low > bound, lambda bound: self.high <= bound)

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __le__(self, other: Any) -> bool:
        return not self > other

    def _answer(self, other: Any, always: Callable[[float], bool], never: Callable[[float], bool]) -> bool:
        if isinstance(other, (int, float)) and (always(other) or never(other)):
            return always(other)
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise TraceError(DRAWN.format(self.source))


for _name in _OTHER_USES.split():
    setattr(Drawn, f"__{_name}__", Drawn._refuse)


@contextmanager
def draws_compared() -> Iterator[None]:
    """A context in which what Python and NumPy draw, one number between two, is `Drawn`, and their states stay."""
    with ExitStack() as stack:
        numpy = sys.modules.get("numpy")
        owners = [(random, ("random", "uniform"), _PYTHON)]
        owners += [(numpy.random, ("random", "random_sample", "rand", "uniform"), _NUMPY)] if numpy else []
        for owner, names, source in owners:
            for name in names:
                stack.enter_context(patch.object(owner, name, _drawing(getattr(owner, name), name, source)))
        yield


@contextmanager
def refused_by_torch() -> Iterator[None]:
    """A context in which an op's error about a `Drawn` that it is given says what that is."""
    try:
        yield
    except TraceError as error:
        if Drawn.__name__ not in str(error):
            raise
        raise TraceError(f"{error}; {DRAWN.format(f'{_PYTHON} or {_NUMPY}')}") from error


def _drawing(original: Callable[..., Any], name: str, source: str) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        bounds = args if name == "uniform" else (0.0, 1.0)
        if kwargs or len(bounds) != 2 or (name != "uniform" and args):
            return original(*args, **kwargs)
        low, high = sorted(bounds)
        return Drawn(low, high if (low, high) == (0, 1) else math.nextafter(high, math.inf), source)

    return draw
