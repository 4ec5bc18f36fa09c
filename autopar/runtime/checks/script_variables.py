"""`script_variables`: variables outside of a model that its code reads: `SETTINGS["scale"]` of a script, or of the
function that the model's class, or a function in an attribute, was made in.

Only code of the user is looked at, not that of installed libraries.
"""

import dis
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch.nn.functional
from torch import nn

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_OWN = __name__.partition(".")[0]
# What models call of torch. A builtin method of a tensor is in none of its own class's variables until it is replaced.
_OF_TORCH = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor}
_OF_CLASSES = (MemberDescriptorType, bool, int, float, str)  # a slot, or what an object has until its own is set
_BEHIND = (FunctionType, MethodType, property, classmethod, staticmethod, partial, cached_property)

Met = list[tuple[Any, Any]]  # what may be a function, and the class or object whose attribute it is, or None
Found = dict[tuple[str, int], tuple[str, Mapping[str, Any]]]  # by name and what tells it from others of the name


def script_variables(module: nn.Module) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, the mapping that has it) of each variable of a script or of a function around that code of `module` reads:
    methods of its classes, functions in its attributes, and functions called by their names in these. Of a module or
    class of the user's, or an object of the script, those attributes that this code names: `settings.scale`. What of
    `os.environ` it names, and which functions and methods those of torch are that it and torch's layers call.
    """
    kinds = dict.fromkeys(kind for each in module.modules() for kind in type(each).__mro__)
    waiting: Met = [(x, None) for kind in kinds if kind not in nn.Module.__mro__ for x in vars(kind).values()]
    waiting += [(x, None) for each in module.modules() for x in vars(each).values() if isinstance(x, FunctionType)]
    seen, found, called = set[tuple[FunctionType, int]](), Found(), {"scaled_dot_product_attention"}
    while waiting:
        function, owner = _behind(*waiting.pop())
        if function is None or (function, id(owner)) in seen:
            continue
        seen.add((function, id(owner)))
        is_users = not _is_installed(function)
        if not is_users and not function.__globals__.get("__name__", "").startswith("torch.nn.modules."):
            continue
        names = _attribute_names(function.__code__)
        called.update(names)
        if not is_users:
            continue
        for name, variables, place in _read_by(function):
            if name in variables:
                x = variables[name]
                found[name, place] = name, _Read(name, partial(x.get, None)) if isinstance(x, ContextVar) else variables
                waiting += [(x, None), *_named_of(x, names, found)]
        waiting += _named_of(owner, names, found)
        found.update(_environment(function.__code__, names))
    return [*found.values(), *_called_of_torch(called)]


def _called_of_torch(names: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """For each part of torch the functions and methods among `names`: which they are now."""
    for place, owner in _OF_TORCH.items():
        own = sorted(name for name in names if callable(getattr(owner, name, None)))
        yield place, _Read(place, partial(_values, vars(owner), own))


def _behind(x: Any, owner: Any) -> tuple[FunctionType | None, Any]:
    """The function that `x` is or calls, None if there is none, and what it is a method of."""
    while not isinstance(x, FunctionType):
        if isinstance(x, MethodType):
            x, owner = x.__func__, x.__self__
        elif isinstance(x, (classmethod, staticmethod)):
            x = x.__func__
        elif isinstance(x, (property, partial, cached_property)):
            x = x.fget if isinstance(x, property) else x.func
        elif (x := getattr(x, "__wrapped__", None) if callable(x) and not isinstance(x, type) else None) is None:
            return None, None
    return x, owner


def _read_by(function: FunctionType) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """(name, mapping, place) of the variables that `function` may read, and of containers that are its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        yield name, _Around(name, cell), id(cell)
    for name in _global_names(function.__code__):
        yield name, function.__globals__, id(function.__globals__)
    for x in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if isinstance(x, (list, dict, set)):
            yield function.__name__, {function.__name__: x}, id(x)


def _named_of(x: Any, names: Iterable[str], found: Found) -> Met:
    """The methods of `x` among `names`; its other attributes among them are `found`."""
    met: Met = []
    if not _is_looked_into(x):
        return met
    inside = getattr(x, "__dict__", None)
    for name in (name for name in names if not name.startswith("__")):
        attribute = inspect.getattr_static(x, name, None)
        if isinstance(attribute, _BEHIND):
            met.append((attribute, None if isinstance(x, ModuleType) else x))
        if type(inside) is dict and name in inside:
            found[name, id(x)] = name, inside
        elif isinstance(attribute, _OF_CLASSES) or (isinstance(x, type) and hasattr(x, name)):
            found[name, id(x)] = name, _Read(name, partial(getattr, x, name))
    return met


def _environment(code: CodeType, names: Iterable[str]) -> Found:
    """The variables of os.environ whose names `code` has, if it asks for any."""
    if not {"environ", "getenv"} & {*names, *_global_names(code)}:
        return {}
    texts = [x for x in code.co_consts if isinstance(x, str)]
    return {("os.environ", id(code)): ("os.environ", _Read("os.environ", partial(_values, os.environ, texts)))}


def _values(mapping: Mapping[str, Any], names: Iterable[str]) -> tuple[Any, ...]:
    return tuple(map(mapping.get, names))


class _Around(Mapping[str, Any]):
    """A variable of a function around the code that reads it, as a mapping of one item, or of none before it is set."""

    def __init__(self, name: str, cell: CellType) -> None:
        self.name, self.cell = name, cell

    def __getitem__(self, name: str) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError as error:
            raise KeyError(name) from error

    def __iter__(self) -> Iterator[str]:
        return iter((self.name,) if len(self) else ())

    def __len__(self) -> int:
        return int(self.name in self)


class _Read(Mapping[str, Any]):
    """The result of a function as a mapping of one item, or of none while that raises AttributeError."""

    def __init__(self, name: str, read: Callable[[], Any]) -> None:
        self.name, self.read = name, read

    def __getitem__(self, name: str) -> Any:
        try:
            return self.read()
        except AttributeError as error:
            raise KeyError(name) from error

    def __iter__(self) -> Iterator[str]:
        return iter((self.name,))

    def __len__(self) -> int:
        return 1


def _is_installed(function: FunctionType) -> bool:
    return _is_of_library(function.__globals__.get("__name__", ""), function.__code__.co_filename)


def _is_of_library(name: str, file: str) -> bool:
    return name.partition(".")[0] in (_OWN, "torch") or file.startswith((*_INSTALLED, "<"))


def is_of_user(kind: type) -> bool:
    """Whether a class is of no installed library."""
    return not _is_of_library(kind.__module__, getattr(sys.modules.get(kind.__module__), "__file__", None) or "<")


def _is_looked_into(x: Any) -> bool:
    """Whether `x` is a module, class or function of the user's, or an object that is no nn.Module."""
    if isinstance(x, ModuleType):
        return not _is_of_library(x.__name__, getattr(x, "__file__", None) or "<")
    if isinstance(x, FunctionType):
        return not _is_installed(x)
    if isinstance(x, type):
        return is_of_user(x)
    is_simple = x is None or isinstance(x, (bool, int, float, complex, str, bytes, list, tuple, dict, set, nn.Module))
    return not (is_simple or callable(x) or type(x).__module__.partition(".")[0] in ("torch", "numpy"))


@lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> tuple[str, ...]:
    return _names(code, frozenset(("LOAD_GLOBAL", "LOAD_NAME")))


@lru_cache(maxsize=4096)
def _attribute_names(code: CodeType) -> tuple[str, ...]:
    return _names(code, frozenset(("LOAD_ATTR", "LOAD_METHOD")))


def _names(code: CodeType, ops: frozenset[str]) -> tuple[str, ...]:
    own = [each.argval for each in dis.get_instructions(code) if each.opname in ops]
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each, ops)]
    return tuple(dict.fromkeys((*own, *inner)))
