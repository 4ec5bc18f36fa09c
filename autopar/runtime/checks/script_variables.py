"""`script_variables`: variables outside of a model that the code of its classes reads: `SETTINGS["scale"]` of a script.

Only code of the user is looked at, not that of installed libraries.
"""

import dis
import sysconfig
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_OWN = __name__.partition(".")[0]
_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))


def script_variables(module: nn.Module) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, the dict that has it) of each global variable that a method of a class of `module`, or a function called
    by its name in one, reads.
    """
    kinds = dict.fromkeys(kind for each in module.modules() for kind in type(each).__mro__)
    waiting = [x for kind in kinds if kind not in nn.Module.__mro__ for x in vars(kind).values()]
    seen, found = set[CodeType](), dict[tuple[str, int], tuple[str, Mapping[str, Any]]]()
    while waiting:
        function = waiting.pop()
        function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or function.__code__ in seen or _is_installed(function):
            continue
        seen.add(function.__code__)
        variables = function.__globals__
        for name in _global_names(function.__code__):
            if isinstance(x := variables.get(name), FunctionType):
                waiting.append(x)
            elif name in variables:
                found[name, id(variables)] = name, variables
    return list(found.values())


def _is_installed(function: FunctionType) -> bool:
    is_own = function.__globals__.get("__name__", "").partition(".")[0] in (_OWN, "torch")
    return is_own or function.__code__.co_filename.startswith((*_INSTALLED, "<"))


@lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> tuple[str, ...]:
    own = [each.argval for each in dis.get_instructions(code) if each.opname in _READS]
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _global_names(each)]
    return tuple(dict.fromkeys((*own, *inner)))
