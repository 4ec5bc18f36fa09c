"""Custom `torch.autograd.Function`s as ops: each call of one is an op whose forward and backward are the class's own.

`torch.ops.autograd_function.NAME.default` calls `apply` of the class with the tensors it is given and the constants of
the call. An op is defined once for a class and its constants, and lives as long as the process, as any op does.
"""

import pickle
import re
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from autopar.ir.graph import Op

NAMESPACE = "autograd_function"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, Enum)
_SAME = (type, FunctionType, BuiltinFunctionType)  # equal if they are one object
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
# Ops by which torch takes what torch.tensor makes of Python's numbers.
MADE_OF_NUMBERS = frozenset((torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default))


@dataclass(frozen=True)
class Application:
    """The call of `cls.apply` by an op: `args` has a `Tensor` in the place of each tensor.

    The tensors among its results are the op's results. `is_random`: whether it draws random numbers. `orders`: of each
    tensor the order in which `cls` gets its dims, None for its own; () if all are.
    """

    cls: type[torch.autograd.Function]
    args: tuple[Any, ...]
    num_tensors: int
    num_results: int
    is_random: bool
    orders: tuple[tuple[int, ...] | None, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        orders = self.orders or (None,) * len(tensors)
        given = iter([x if order is None else x.permute(order) for x, order in zip(tensors, orders)])
        result = self.cls.apply(*(next(given) if arg is TENSOR else arg for arg in self.args))
        results = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor)]
        return results[0] if self.num_results == 1 else tuple(results)


class _Tensor:
    def __repr__(self) -> str:
        return "TENSOR"

    def __reduce__(self) -> str:
        return "TENSOR"  # the one there is


TENSOR = _Tensor()
_APPLICATIONS: dict[str, Application] = {}  # by target
_TARGETS: dict[Any, str] = {}  # by what is the same for equal calls


class FunctionTarget(str):
    """The target of an op of this module. It takes the call along to another process, where its class can be imported
    and its constants be pickled; else only the name.
    """

    def __reduce__(self) -> Any:
        try:
            pickle.dumps(_APPLICATIONS[self])
        except Exception:  # of whatever the user's class was called with
            return str, (str(self),)
        return target_of, (_APPLICATIONS[self],)


def target_of(application: Application) -> str:
    """The op of the application, defined if it is new; ops of one class are numbered in order of their first call."""
    key = (application.cls, tuple(map(_exact, application.args)), application.num_results, application.is_random)
    key += (application.orders,)
    if key not in _TARGETS:
        stem, name, number = re.sub(r"\W+", "_", application.cls.__qualname__).strip("_"), "", 1
        while not name or f"{NAMESPACE}.{name}.default" in _APPLICATIONS:
            name, number = stem if number == 1 else f"{stem}_{number}", number + 1
        inputs = ", ".join(f"Tensor x{i}" for i in range(application.num_tensors))
        results = "Tensor" if application.num_results == 1 else f"({', '.join(['Tensor'] * application.num_results)})"
        tags = (torch.Tag.nondeterministic_seeded,) if application.is_random else ()
        _LIBRARY.define(f"{name}({inputs}) -> {results}", tags=tags)
        target = FunctionTarget(f"{NAMESPACE}.{name}.default")
        _APPLICATIONS[target] = application
        _TARGETS[key] = target
        _LIBRARY.impl(name, application, "CompositeImplicitAutograd")
    return _TARGETS[key]


def is_function(op: Op) -> bool:
    """Whether the op has a backward of its own, which need not be linear in the gradient that comes in."""
    return op.target in _APPLICATIONS


def class_of(target: str) -> type[torch.autograd.Function] | None:
    """The class that the op applies; None if it is no op of this module."""
    application = _APPLICATIONS.get(target)
    return None if application is None else application.cls


def description(target: str) -> str:
    """Words that are equal for calls that do the same: of an op of this module, its class may be made anew in each."""
    application = _APPLICATIONS.get(target)
    if application is None:
        return target
    plain = (arg if isinstance(arg, (*_PLAIN, _Tensor)) else type(arg).__name__ for arg in application.args)
    return f"{application.cls.__qualname__}{tuple(plain)}"


def known_target(target: str) -> str:
    """`target`, as it is known here if it is an op of this module."""
    application = _APPLICATIONS.get(target)
    return target if application is None else target_of(application)


def application_of(target: str) -> Application | None:
    """The call that the op makes; None if it is no op of this module."""
    return _APPLICATIONS.get(target)


def is_constant(arg: Any) -> bool:
    """Whether calls that differ in this argument can be told apart, and hold no tensor in it."""
    if isinstance(arg, tuple | list):
        return all(map(is_constant, arg))
    if isinstance(arg, dict):
        return all(is_constant(item) for pair in arg.items() for item in pair)
    if _is_frozen(arg):
        return all(is_constant(item) for item in _fields(arg))
    return isinstance(arg, (*_PLAIN, *_SAME))


def _exact(arg: Any) -> Any:
    if isinstance(arg, tuple | list):
        return type(arg), tuple(map(_exact, arg))
    if isinstance(arg, dict):
        return dict, tuple((_exact(key), _exact(value)) for key, value in arg.items())
    if _is_frozen(arg):
        return type(arg), tuple(map(_exact, _fields(arg)))
    return (type(arg), repr(arg)) if isinstance(arg, _PLAIN) else arg


def _is_frozen(arg: Any) -> bool:
    """Whether `arg` is a frozen dataclass, such as a configuration."""
    return is_dataclass(arg) and not isinstance(arg, type) and type(arg).__dataclass_params__.frozen


def _fields(arg: Any) -> tuple[Any, ...]:
    return tuple(getattr(arg, field.name) for field in fields(arg))
