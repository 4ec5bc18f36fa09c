"""An accelerator for tests: tensors of a device of its own, `emulated`, which the CPU computes.

An op that mixes them with tensors of the host raises, as it does on a GPU, and the groups of `nccl_rules` take no
others. Its streams and its memory are not emulated: a race or a copy that comes too late is not seen.
"""

import threading
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "emulated"

# Ops that read an index or a number on the host, or that copy between host and device.
_MAY_MIX = {"copy_", "_copy_from", "index", "index_put", "index_put_", "_index_put_impl_"}
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class MixedDevices(RuntimeError):
    """An op was given a tensor of the device and one of the host."""


class Emulated(torch.Tensor):
    """A tensor of the device: `content` is its memory, in the same shape and strides."""

    content: torch.Tensor

    @staticmethod
    def __new__(cls, content: torch.Tensor) -> "Emulated":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            content.size(),
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=torch.device(NAME, 0),
        )
        made.content = content.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(kind, (Emulated, torch.nn.Parameter)) or kind is torch.Tensor for kind in types):
            return NotImplemented  # DTensor and results of functional collectives have these inside
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        """As of a tensor of the host, which torch allows no subclass."""
        return self.content.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"Emulated({self.content})"


class _Collective(threading.local):
    """Whether this thread is inside a functional collective, whose tensors reach the process group as their content."""

    is_running = False


collective = _Collective()


def is_on_device(x: torch.Tensor) -> bool:
    """Whether a process group is given `x` by an op on the device."""
    return isinstance(x, Emulated) or collective.is_running


def content_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of `x`."""
    return x.content if isinstance(x, Emulated) else x


def install() -> None:
    """Make the device known to torch, for good: for processes of their own."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    _kept.append(library)
    on_host = torch.tensor

    def tensor(content: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        is_here = device is not None and torch.device(device).type == NAME
        return on_host(content, **options).to(device) if is_here else on_host(content, device=device, **options)

    torch.tensor = tensor  # itself fails an assertion where the device is one of Python's


_kept: list[torch.library.Library] = []


class _Module:
    """`torch.emulated`"""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """One device is all there is."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Its random numbers are the host's."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None:
        """The CPU is never behind."""


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`func` on the memory of its tensors; results lie on the device unless they are copied to another."""
    known: dict[int, Emulated] = {}
    hosts: list[torch.Tensor] = []

    def enter(x: Any) -> Any:
        if isinstance(x, Emulated):
            known[id(x.content)] = x
            return x.content
        if isinstance(x, torch.Tensor):
            hosts.append(x)
        return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x

    def leave(x: Any) -> Any:
        if isinstance(x, AsyncCollectiveTensor):
            x = x.wait()
        if not isinstance(x, torch.Tensor) or any(x is host for host in hosts):
            return x
        return known[id(x)] if id(x) in known else Emulated(x)  # a write returns what it was given

    entered = tree_map(enter, (args, kwargs))
    name = func._schema.name.partition("::")[2]
    if known and name not in _MAY_MIX and any(x.ndim > 0 and not x.is_meta for x in hosts):
        raise MixedDevices(f"{func} was given tensors of the device {NAME!r} and of the host, {len(hosts)} of them")
    target = kwargs.get("device")
    if name == "_to_copy" and (known or target is not None):
        entered[1]["device"] = "cpu" if target is None else entered[1]["device"]
        copied = func(*entered[0], **entered[1])
        stays = target is None or torch.device(target).type == NAME
        return Emulated(copied) if stays else copied
    before, collective.is_running = collective.is_running, collective.is_running or func.namespace in _COLLECTIVES
    try:
        return tree_map(leave, func(*entered[0], **entered[1]))
    finally:
        collective.is_running = before
