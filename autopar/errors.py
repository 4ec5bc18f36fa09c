"""The exceptions that autopar raises on purpose, and its warnings: what failed, where, why, and what to do."""

import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable

_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages" + os.sep, "dist-packages" + os.sep)


def warn(message: str) -> None:
    """Warn with a UserWarning at the user's line, the innermost that is neither of autopar nor of torch or Python
    itself; if there is none, as in a command of autopar, at the outermost.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def warner() -> Callable[[str], None]:
    """`warn` at the user's line as it is now, for another thread."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    place = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else (__file__, 1)
    return lambda message: warnings.warn_explicit(message, UserWarning, *place)


def is_users(path: str) -> bool:
    """Whether the file is neither of autopar nor of torch or Python itself."""
    packages = (sys.modules.get(name) for name in ("autopar", "torch"))
    folders = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in packages if package is not None)
    if path.startswith((*folders, "<")):
        return False
    return not is_pythons(path)


def is_pythons(path: str) -> bool:
    """Whether the file is of Python's own library."""
    return path.startswith(_LIBRARY) and not path.removeprefix(_LIBRARY).startswith(_INSTALLED)


class AutoparError(Exception):
    """Base class of all errors that autopar raises on purpose."""


class TraceError(AutoparError):
    """The model cannot be traced; the message names the line of the model."""


class UnsupportedOp(AutoparError):
    """An op of the graph cannot be run on shards, or not on a mesh at all."""


class MeshError(AutoparError):
    """The mesh is malformed, or does not match the number of ranks or the cluster."""


class PinError(AutoparError):
    """A pin names an unknown parameter or mesh axis, or a layout that the parameter cannot have."""


class InfeasibleError(AutoparError):
    """No plan satisfies the constraints; the message says which one binds and the smallest limit that would do."""


class PlanError(AutoparError):
    """A plan does not belong to this model or mesh, or its file is damaged."""


class RankMismatch(AutoparError):
    """The ranks were given different models, inputs or plans."""


class PeerFailed(AutoparError):
    """Another rank failed or died while this rank waited for it."""


class MicrobatchError(AutoparError):
    """The batch cannot be run in this number of microbatches with the same result; the message names the op and why."""
