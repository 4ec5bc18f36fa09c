"""Counting of allocated bytes, as the storages of tensors are allocated and freed."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from autopar.torch_compat import (
    EagerDispatchMode,
    FakeTensor,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
    pytree,
)

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # types without tensors inside
_DEVICE = torch.ops.prim.device.default


class Storages:
    """A count of storages: `num_bytes` allocated now, `peak_bytes` since `restart`, and each change since then."""

    def __init__(self) -> None:
        self.num_bytes = self.peak_bytes = 0
        self.changes: list[int] = []
        self._known: dict[int, weakref.ref] = {}  # by identity of a storage, unique while it lives

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of `tensors`, each once, until they are freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = id(storage), storage.nbytes()
            if key in self._known or not size:
                continue

            def forget(_: Any, key: int = key, size: int = size) -> None:
                del self._known[key]
                self.num_bytes -= size
                self.changes.append(-size)

            self._known[key] = weakref.ref(storage, forget)
            self.num_bytes += size
            self.changes.append(size)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def restart(self) -> int:
        """Return `peak_bytes` and reset it to the bytes allocated now."""
        most, self.peak_bytes = self.peak_bytes, self.num_bytes
        self.changes.clear()
        return most

    def take_changes(self) -> np.ndarray:
        """Return i64[changes] since `restart`, bytes allocated
        (positive) and freed (negative) in order; and restart.
        """
        sizes = np.array(self.changes, dtype=np.int64)
        self.restart()
        return sizes


# Runs an op on its arguments and keyword arguments.
RunOp = Callable[[Any, tuple, dict[str, Any]], Any]


def run_plain(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of an op as it is."""
    return func(*args, **kwargs)


@contextmanager
def count_storages(held: Iterable[torch.Tensor] = (), run: RunOp = run_plain) -> Iterator[Storages]:
    """A context that counts the storages of `held` and of all tensors made inside: of any device, real, fake or meta.

    For a DTensor its local tensor counts. Memory that kernels allocate and free themselves is not seen. `run`: runs the
    ops inside.
    """
    storages = Storages()
    storages.hold(plain for tensor in held for plain in plain_tensors(tensor))
    with _StorageCounter(storages, run):
        yield storages


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with storages inside a wrapper such as DTensor, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
        if isinstance(part, torch.Tensor):
            yield from plain_tensors(part)


class _StorageCounter(EagerDispatchMode):
    def __init__(self, storages: Storages, run: RunOp) -> None:
        super().__init__()
        self.storages, self.run = storages, run

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        if func is _DEVICE:  # of a fake tensor, which autograd asks for more often than ops are run
            return args[0].device
        for kind in types:
            if kind not in _PLAIN and is_traceable_wrapper_subclass_type(kind):
                return NotImplemented  # its ops on plain tensors come through here later
        out = self.run(func, args, kwargs or {})
        if type(out) in _PLAIN or type(out) is FakeTensor:  # by far the most usual result: this is much faster
            self.storages.hold((out,))
            return out
        found = (
            x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and not is_traceable_wrapper_subclass(x)
        )
        self.storages.hold(found)
        return out
