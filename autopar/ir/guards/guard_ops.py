"""Ops that check at every call what tracing took from the example: answers of branches, and numbers of rows.

`autopar.note_guard` marks a branch in an exported graph. `autopar.guarded` is the first output itself, which reads the
values that branches depend on. `autopar.fixed_size` is its input, of which the sizes follow from the values of tensors.
"""

import functools
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx.node import has_side_effect

from autopar.errors import AutoparError

NOTE, GUARDED, FIXED = "autopar.note_guard.default", "autopar.guarded.default", "autopar.fixed_size.default"

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("note_guard(Tensor[] values, str condition, str line) -> ()")
_LIBRARY.define("guarded(Tensor self, Tensor[] values, str[] conditions, str[] lines) -> Tensor")
_LIBRARY.define("fixed_size(Tensor self, int[] sizes, str line) -> Tensor")
has_side_effect(torch.ops.autopar.note_guard.default)


def _guarded(
    self: torch.Tensor, values: Sequence[torch.Tensor], conditions: Sequence[str], lines: Sequence[str]
) -> torch.Tensor:
    numbers = [None if _is_without_data(x) else x.item() for x in values]
    if not any(number is None for number in numbers):
        for condition, line in zip(conditions, lines):
            if not holds(condition, numbers):
                raise AutoparError(
                    f"{line} goes another way than for the example that was traced, for which {_shown(condition)}: the"
                    " program has one way only. Give autopar.compile an example like the batches of training, use"
                    " torch.where or a mask, or decide it before the call"
                )
    return self.view_as(self)


def _fixed_size(self: torch.Tensor, sizes: Sequence[int], line: str) -> torch.Tensor:
    if not _is_without_data(self) and tuple(self.shape) != tuple(sizes):
        raise AutoparError(
            f"{line} gives a tensor of shape {tuple(self.shape)}, and gave {tuple(sizes)} for the example that was"
            " traced: its size depends on the values of tensors, and a plan has fixed shapes. Pad to one size, or use"
            " a mask in place of an index"
        )
    return self.view_as(self)


def holds(condition: str, numbers: Sequence[Any]) -> bool:
    """Whether a condition such as "Eq(v0, 5)" is true of these numbers; it was written by `condition_of`."""
    given = {f"v{i}": sympy.sympify(number) for i, number in enumerate(numbers)}
    return bool(_parsed(condition).subs(given))


@functools.lru_cache(maxsize=1024)
def _parsed(condition: str) -> Any:
    return sympy.sympify(condition)


def _shown(condition: str) -> str:
    return f"{condition} holds"


def _is_without_data(x: torch.Tensor) -> bool:
    return x.is_meta or type(x) is not torch.Tensor


_LIBRARY.impl("note_guard", lambda *_: None, "CompositeExplicitAutograd")  # it is seen in a graph, and never run
for _name, _function in {"guarded": _guarded, "fixed_size": _fixed_size}.items():
    _LIBRARY.impl(_name, _function, "CompositeImplicitAutograd")
