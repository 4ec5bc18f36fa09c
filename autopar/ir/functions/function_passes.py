"""`LocalFunction`: the ops of a function as one rank runs them on its parts, known by a name made of their text."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from autopar.ir.functions.function_body import FunctionBody
from autopar.ir.graph import Op, Slot, Value, resolve

SUM, MAX, MIN = "sum", "max", "min"
Tensors = tuple[torch.Tensor | None, ...]
Reduce = Callable[[torch.Tensor, str, tuple[str, ...]], torch.Tensor]


@dataclass(frozen=True)
class ReducedValue:
    """The value `name` is reduced over the ranks of the axes with these roles, by "sum", "max" or "min"."""

    name: str
    kind: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class LocalFunction:
    """The `body` on a rank's parts, with sizes of these, and what is reduced where it has been computed, in order."""

    body: FunctionBody
    reductions: tuple[ReducedValue, ...]

    def reduced(self, op: Op) -> tuple[ReducedValue, ...]:
        names = {value.name for value in op.outputs}
        return tuple(one for one in self.reductions if one.name in names)


class FunctionName(str):
    """The name of a local function. It takes the function along to another process."""

    def __reduce__(self) -> Any:
        return named, (function_called(self),)


_FUNCTIONS: dict[str, LocalFunction] = {}


def named(function: LocalFunction) -> FunctionName:
    """The name by which `function_called` knows `function`; equal ones of all layers and ranks have one."""
    name = FunctionName(hashlib.sha256(repr(function).encode()).hexdigest()[:12])
    _FUNCTIONS.setdefault(name, function)
    return name


def function_called(name: str) -> LocalFunction:
    """The local function that `named` gave this name."""
    return _FUNCTIONS[name]


@lru_cache(maxsize=1024)
def passes_of(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward, from (reduce, *inputs) to (outputs, saved tensors), and backward, from (reduce, *saved, *gradients of
    the outputs that have one) to the gradients of the inputs; both free a tensor after its last use.
    """
    function = function_called(name)
    body = function.body
    saved, given = body.saved, [value for value in body.output_gradients if value is not None]
    forward = _compiled(function, body.forward, body.inputs, (body.outputs, saved), name)
    return forward, _compiled(function, body.backward, (*saved, *given), (body.input_gradients,), name)


def _compiled(
    function: LocalFunction,
    ops: Sequence[Op],
    given: Sequence[Value],
    results: Sequence[Sequence[Value | None]],
    name: str,
) -> Callable[..., Any]:
    known: dict[str, Any] = {}
    returned = [f"({''.join(f'{_name(value)}, ' for value in group)})" for group in results]
    kept = {value.name for group in results for value in group if value is not None}
    last = {value.name: op.name for op in ops for value in op.inputs}
    lines = []
    for op in ops:
        lines += _lines(op, function, known)
        dead = [x for x in dict.fromkeys(v.name for v in op.inputs) if last[x] == op.name and x not in kept]
        lines += [f"del {', '.join(map(_variable, dead))}"] if dead else []
    arguments = ", ".join(["reduce", *dict.fromkeys(_name(value) for value in given)])
    source = f"def run({arguments}):\n    " + "\n    ".join((*lines, f"return {', '.join(returned)}"))
    exec(compile(source, f"<function {name}>", "exec"), known)
    return known["run"]


def _lines(op: Op, function: LocalFunction, known: dict[str, Any]) -> Iterator[str]:
    def written(leaf: Any) -> str:
        if isinstance(leaf, tuple):
            return "[" + ", ".join(map(written, leaf)) + "]"
        if isinstance(leaf, Slot):
            return _name(op.inputs[leaf.index])
        known[constant := f"constant_{len(known)}"] = leaf
        return constant

    known[target := f"op_{len(known)}"] = resolve(op.target)
    arguments = [*map(written, op.args), *(f"{key}={written(arg)}" for key, arg in op.kwargs)]
    results = ", ".join(map(_name, op.outputs)) + ("," if op.is_tuple else "")
    yield f"{results} = {target}({', '.join(arguments)})"
    for one in function.reduced(op):
        yield f"{_variable(one.name)} = reduce({_variable(one.name)}, {one.kind!r}, {one.roles!r})"


def _name(value: Value | None) -> str:
    return "None" if value is None else _variable(value.name)


def _variable(name: str) -> str:
    return f"v_{name}"
