"""Custom `torch.autograd.Function`s: whole on each device, unless the class says how it splits.

A backward that people write need not be linear in the gradient (it clips it, or takes its sign): where it runs, the
gradient is whole or a slice, never a pending sum. So such an op is never all R.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from autopar.errors import AutoparError
from autopar.ir.function_ops import class_of
from autopar.ir.graph import Op
from autopar.sbp.placement import S
from autopar.sbp.signature import Signature

Rule = Callable[[Op], Iterable[Signature]]
Class = TypeVar("Class", bound=type[torch.autograd.Function])
_ATTRIBUTE = "autopar_rule"


def splits(how: str | Rule) -> Callable[[Class], Class]:
    """Decorator that says how a custom `torch.autograd.Function` may be split over devices.

    "elementwise": each element of what forward and backward return depends on the elements at the same place alone.
    "batch": each sample, along dim 0 of all tensors, is treated by itself. Else a rule: from the op to its signatures
    on one mesh axis (CONTRIBUTING.md, "Add an op rule").
    """
    if not callable(how) and how not in NAMED:
        raise AutoparError(f"splits expects {' or '.join(map(repr, NAMED))} or a rule, found {how!r}")

    def decorated(cls: Class) -> Class:
        if not (isinstance(cls, type) and issubclass(cls, torch.autograd.Function)):
            raise AutoparError(f"splits decorates a torch.autograd.Function, found {cls!r}")
        setattr(cls, _ATTRIBUTE, staticmethod(how if callable(how) else NAMED[how]))
        return cls

    return decorated


def rule_of(op: Op) -> Rule | None:
    """The rule that the op's class was given."""
    return getattr(class_of(op.target), _ATTRIBUTE, None)


def _elementwise(op: Op) -> Iterator[Signature]:
    shapes = {value.shape for value in (*op.inputs, *op.outputs)}
    if len(shapes) == 1:  # what is broadcast has a gradient that is a sum
        for dim in range(len(shapes.pop())):
            yield Signature((S(dim),) * len(op.inputs), (S(dim),) * len(op.outputs))


def _batch(op: Op) -> Iterator[Signature]:
    sizes = {value.shape[:1] for value in (*op.inputs, *op.outputs)}
    if len(sizes) == 1 and () not in sizes:
        yield Signature((S(0),) * len(op.inputs), (S(0),) * len(op.outputs))


NAMED: dict[str, Rule] = {"elementwise": _elementwise, "batch": _batch}
