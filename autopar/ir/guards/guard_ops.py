"""Ops that check at every call what tracing took from the example: answers of branches, and numbers of rows.

`autopar.note_guard` marks a branch in an exported graph. `autopar.guarded` is an output itself, which reads the values
that branches depend on. Ops of `autopar_sized` are those of aten whose results have sizes that follow from values.
"""

import functools
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx.node import has_side_effect

from autopar.errors import AutoparError
from autopar.ir.graph import resolve
from autopar.torch_compat import pytree

NOTE, GUARDED = "autopar.note_guard.default", "autopar.guarded.default"
SIZED = "autopar_sized"

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("note_guard(Tensor[] values, str condition, str line) -> ()")
_LIBRARY.define("guarded(Tensor self, Tensor[] values, str[] conditions, str[] lines) -> Tensor")
_SIZED_LIBRARY = torch.library.Library(SIZED, "DEF")
has_side_effect(torch.ops.autopar.note_guard.default)
_FUNCTIONS: dict[str, Any] = {}  # of torch, in the conditions of this process: FloorDiv, IntTrueDiv, TruncToInt, ...


def _guarded(
    self: torch.Tensor, values: Sequence[torch.Tensor], conditions: Sequence[str], lines: Sequence[str]
) -> torch.Tensor:
    numbers = [None if _is_without_data(x) else _number(x) for x in values]
    if not any(number is None for number in numbers):
        for condition, line in zip(conditions, lines):
            if not holds(condition, numbers):
                raise AutoparError(
                    f"{line} goes another way than for the example that was traced, for which {_shown(condition)}: the"
                    " program has one way only. Give autopar.compile an example like the batches of training, use"
                    " torch.where or a mask, or decide it before the call"
                )
    return self.view_as(self)


@functools.lru_cache(maxsize=1024)  # an op is defined once
def sized_target(target: str) -> str:
    """The op that is `target`, "aten.nonzero.default", and checks the sizes of its results.

    They are given with the dtypes of the results, as "int64 5,1;float32 5".
    """
    op = resolve(target)
    arguments, results = str(op._schema).partition("(")[2].rsplit(") -> ", 1)
    name = target.removeprefix("aten.").replace(".", "_").lstrip("_")
    given = arguments if "*" in arguments.split(", ") else f"{arguments}, *"
    _SIZED_LIBRARY.define(f"{name}({given}, str sizes, str line) -> {results}")
    _SIZED_LIBRARY.impl(name, functools.partial(_sized, op), "CompositeImplicitAutograd")
    return f"{SIZED}.{name}.default"


def _sized(op: Any, *args: Any, sizes: str, line: str, **kwargs: Any) -> Any:
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    results = [of_one.split(" ") for of_one in sizes.split(";")]
    expected = [tuple(map(int, filter(None, shape.split(",")))) for _, shape in results]
    if any(map(_is_without_data, tensors)):
        made = [_made(shape, getattr(torch, name), tensors[0]) for shape, (name, _) in zip(expected, results)]
        return tuple(made) if gives_several(op) else made[0]
    result = op(*args, **kwargs)
    found = [tuple(x.shape) for x in (result if isinstance(result, tuple | list) else (result,))]
    if found != expected:
        raise AutoparError(
            f"{line} gives a tensor of shape {found[0]}, and gave {expected[0]} for the example that was traced: its"
            " size depends on the values of tensors, and a plan has fixed shapes. Pad to one size, or use a mask in"
            " place of an index"
        )
    return result


def gives_several(op: Any) -> bool:
    """Whether an op gives several tensors or a list, be it one of a single tensor."""
    results = op._schema.returns
    return len(results) > 1 or isinstance(results[0].type, torch.ListType)


def _made(shape: tuple[int, ...], dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """A tensor of `shape` and `dtype` with the gradient of `x`, where none has values."""
    empty = x.new_empty(shape, dtype=dtype)
    return empty + x.sum() if x.requires_grad and dtype.is_floating_point else empty


def condition_of(expression: Any) -> str:
    """The text of an expression of `v0`, `v1`, ..."""
    _FUNCTIONS.update({type(each).__name__: type(each) for each in expression.atoms(sympy.Function)})
    return str(expression)


def holds(condition: str, numbers: Sequence[Any]) -> bool:
    """Whether a condition such as "Eq(v0, 5)" is true of these numbers; it was written by `condition_of`."""
    given = {f"v{i}": sympy.sympify(number) for i, number in enumerate(numbers)}
    return bool(_parsed(condition).subs(given))


@functools.lru_cache(maxsize=1024)
def _parsed(condition: str) -> Any:
    return sympy.sympify(condition, locals=_FUNCTIONS)


def _shown(condition: str) -> str:
    return f"{condition} holds"


def _number(x: torch.Tensor) -> Any:
    number = x.item()
    return int(number) if isinstance(number, bool) else number  # sympy has no equality of truth values and numbers


def _is_without_data(x: torch.Tensor) -> bool:
    return x.is_meta or type(x) is not torch.Tensor


_LIBRARY.impl("note_guard", lambda *_: None, "CompositeExplicitAutograd")  # it is seen in a graph, and never run
_LIBRARY.impl("guarded", _guarded, "CompositeImplicitAutograd")
