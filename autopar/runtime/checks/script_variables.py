"""`script_variables`: variables outside of a model that its code reads: `SETTINGS["scale"]` of a script, or of the
function that the model's class, or a function in an attribute, was made in.

Only code of the user is looked at, not that of installed libraries.
"""

import dis
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_OWN = __name__.partition(".")[0]
_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))


def script_variables(module: nn.Module) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, the mapping that has it) of each variable of a script or of a function around that code of `module` reads:
    methods of its classes, functions in its attributes, and functions called by their names in these.
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
    is_own = function.__globals__.get("__name__", "").partition(".")[0] in (_OWN, "torch")
    return is_own or function.__code__.co_filename.startswith((*_INSTALLED, "<"))


@lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> tuple[str, ...]:
    own = [each.argval for each in dis.get_instructions(code) if each.opname in _READS]
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _global_names(each)]
    return tuple(dict.fromkeys((*own, *inner)))
