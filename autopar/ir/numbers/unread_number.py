"""`unread`: a number of a forward that torch ops take, and that the forward cannot read."""

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

# What is no read of the value.
_OF_OBJECTS = frozenset(
    ("__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__setattr__", "__delattr__")
    + ("__class__", "__dir__", "__sizeof__", "__getstate__", "__reduce__", "__reduce_ex__")
)


class NumberRead(Exception):
    """Raised where a forward decides by the value or the type of a number, or computes with it."""


@dataclass
class NumberReads:
    """Whether a number was read, even if the forward caught the exception."""

    any: bool = False


def unread(number: Any, reads: NumberReads) -> Any:
    """A symbolic number of torch, such as an item of a tensor of unknown content, that only ops on tensors take.

    Everything else that a forward may do with it raises NumberRead and is noted in `reads`; torch's own machinery sees
    the symbol. Of its type, isinstance within `types_unread` is seen, and `type(number)` is not.
    """
    kind = _UnreadFloat if isinstance(number, torch.SymFloat) else _UnreadInt
    made = kind(number.node)
    made.reads = reads
    return made


def _is_of_torch(frame: Any) -> bool:
    """Whether code of torch's machinery runs in the frame: not that of its modules and functions, as models have it."""
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] == "torch" and not module.startswith(("torch.nn", "torch.functional"))


def _refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, torch.Tensor) for x in args):
            return NotImplemented  # the tensor's own operator takes the number
        if _is_of_torch(sys._getframe(1)):
            return original(self, *args, **kwargs)
        self.reads.any = True
        raise NumberRead(f"a number that is an argument is read ({name})")

    return method


@contextmanager
def types_unread(reads: NumberReads) -> Iterator[None]:
    """A context in which isinstance tells models nothing of numbers that they cannot read."""
    of_python = isinstance

    def asked(item: Any, kinds: Any) -> bool:
        if type(item) in (_UnreadFloat, _UnreadInt) and not _is_of_torch(sys._getframe(1)):
            reads.any = True
            raise NumberRead("the type of a number that is an argument is read")
        return of_python(item, kinds)

    with patch.object(builtins, "isinstance", asked):
        yield


def _members(kind: type) -> dict[str, Any]:
    named = ((name, getattr(kind, name)) for name in dir(kind) if name not in _OF_OBJECTS)
    return {name: _refusing(name, member) for name, member in named if callable(member)}


_UnreadFloat: Any = type("_UnreadFloat", (torch.SymFloat,), _members(torch.SymFloat))
_UnreadInt: Any = type("_UnreadInt", (torch.SymInt,), _members(torch.SymInt))
