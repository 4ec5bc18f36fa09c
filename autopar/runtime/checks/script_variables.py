"""`script_variables`: variables outside of a model that its code reads: `SETTINGS["scale"]` of a script, or of the
function that the model's class, or a function in an attribute, was made in.

Only code of the user is looked at, not that of installed libraries.
"""

import dis
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_OWN = __name__.partition(".")[0]


def script_variables(module: nn.Module) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, the mapping that has it) of each variable of a script or of a function around that code of `module` reads:
    methods of its classes, functions in its attributes, and functions called by their names in these. Of a module of
    the user's, or an object of the script, those attributes that this code names: `settings.scale`.
    """
    kinds = dict.fromkeys(kind for each in module.modules() for kind in type(each).__mro__)
    waiting = [x for kind in kinds if kind not in nn.Module.__mro__ for x in vars(kind).values()]
    waiting += [x for each in module.modules() for x in vars(each).values() if isinstance(x, FunctionType)]
    seen, found = set[FunctionType](), dict[tuple[str, int], tuple[str, Mapping[str, Any]]]()
    while waiting:
        function = waiting.pop()
        function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or function in seen or _is_installed(function):
            continue
        seen.add(function)
        variables = function.__globals__
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            around = _Around(name, cell)
            if isinstance(x := around.get(name), FunctionType):
                waiting.append(x)
            elif name in around:
                found[name, id(cell)] = name, around
        for name in _global_names(function.__code__):
            if isinstance(x := variables.get(name), FunctionType):
                waiting.append(x)
            elif name in variables:
                found[name, id(variables)] = name, variables
            inside = _attributes_of(x)
            for attribute in _attribute_names(function.__code__) if inside else ():
                if isinstance(x := inside.get(attribute), FunctionType):
                    waiting.append(x)
                elif attribute in inside:
                    found[attribute, id(inside)] = attribute, inside
    return list(found.values())


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


def _is_installed(function: FunctionType) -> bool:
    return _is_of_library(function.__globals__.get("__name__", ""), function.__code__.co_filename)


def _is_of_library(name: str, file: str) -> bool:
    return name.partition(".")[0] in (_OWN, "torch") or file.startswith((*_INSTALLED, "<"))


def _attributes_of(x: Any) -> dict[str, Any]:
    """Attributes of a module of the user's, or of an object that is no class, function or nn.Module."""
    if isinstance(x, ModuleType):
        return {} if _is_of_library(x.__name__, getattr(x, "__file__", None) or "<") else vars(x)
    if isinstance(x, (type, nn.Module)) or callable(x) or type(x).__module__.partition(".")[0] == "torch":
        return {}
    inside = getattr(x, "__dict__", None)
    return inside if type(inside) is dict else {}


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
