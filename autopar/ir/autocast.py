"""Autocast regions of a model: the casts that torch makes of the inputs of an op there, as ops of the graph.

What autocast does to an op is not looked up but seen: the op is run on fake tensors of the region's device, with
autocast, and without it on inputs cast in the same way; both runs must call the same kernels on the same dtypes.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import TraceError
from autopar.ir.call_args import fill
from autopar.ir.graph import Value, resolve
from autopar.torch_compat import FakeTensorMode, TorchDispatchMode, pytree

DEVICE_TYPES = ("cuda", "cpu")
_CAST = "aten::_to_copy"
# (op, dtypes of its tensors) of each kernel that is called, but casts, and views, which are alike before and after one
Kernels = list[tuple[Any, tuple[torch.dtype, ...]]]


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast of tensors on `device_type` to `dtype`."""

    device_type: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Casts:
    """The casts of an op under autocast: dtype of each input, and of its argument `dtype` if it is set."""

    inputs: tuple[torch.dtype, ...]
    result: torch.dtype | None = None


def autocast_on(*device_types: str) -> Autocast | None:
    """The autocast that is on here for tensors of one of these types of device, by default of any."""
    kinds = (kind for kind in DEVICE_TYPES if not device_types or kind in device_types)
    on = next((kind for kind in kinds if torch.is_autocast_enabled(kind)), None)
    return None if on is None else Autocast(on, torch.get_autocast_dtype(on))


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """A context for a program, which has the casts of autocast as ops of its own."""
    is_on = device_type in DEVICE_TYPES and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()


@contextmanager
def without_autocast(*, but: str = "") -> Iterator[None]:
    """A context without autocast, except of tensors on a device of the type `but`."""
    with ExitStack() as stack:
        for kind in DEVICE_TYPES:
            if kind != but and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def casts_of(target: str, args: Any, kwargs: Sequence[tuple[str, Any]], inputs: Sequence[Value], on: Autocast) -> Casts:
    """The casts of a call within autocast; `args` and `kwargs` as in `graph.Op`, with slots for `inputs`.

    TraceError if autocast does more than to cast the inputs: it casts within an op that is made of others.
    """
    dtypes = tuple(value.dtype for value in inputs)

    def kernels(dtypes: Sequence[torch.dtype], *more: tuple[str, Any]) -> Kernels | None:
        try:
            return _recorded(target, args, (*kwargs, *more), inputs, dtypes, on, is_on=False).kernels
        except TraceError:  # without autocast the op does not take these dtypes together
            return None

    seen = _recorded(target, args, kwargs, inputs, dtypes, on, is_on=True)
    lower, higher = (tuple(to if x.is_floating_point else x for x in dtypes) for to in (on.dtype, torch.float32))
    for cast in (dtypes, tuple(seen.cast.get(i, dtype) for i, dtype in enumerate(dtypes)), lower, higher):
        if seen.kernels == kernels(cast):
            return Casts(cast)
    has_dtype = any(arg.name == "dtype" for arg in resolve(target)._schema.arguments)
    if has_dtype and seen.kernels == kernels(dtypes, ("dtype", torch.float32)):
        return Casts(dtypes, torch.float32)
    raise TraceError(
        f"under autocast to {on.dtype}, {target} casts inside; cast its inputs by hand (x.float()), or take it out of"
        " autocast (with torch.autocast(device_type, enabled=False))"
    )


def _recorded(
    target: str,
    args: Any,
    kwargs: Sequence[tuple[str, Any]],
    inputs: Sequence[Value],
    dtypes: Sequence[torch.dtype],
    on: Autocast,
    *,
    is_on: bool,
) -> "_Recorder":
    with FakeTensorMode(), torch.no_grad():
        tensors = [torch.empty(v.shape, dtype=dtype, device=on.device_type) for v, dtype in zip(inputs, dtypes)]
        named = {name: fill(value, tensors) for name, value in kwargs}
        recorder = _Recorder(tensors)
        try:
            with recorder, _autocast(on, is_on=is_on):
                result = resolve(target)(*fill(args, tensors), **named)
            made = (x.dtype for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor))
            recorder.kernels.append(("the result", tuple(made)))
        except RuntimeError as error:
            if on.device_type == "cpu" or torch.cuda.is_available():  # else a kernel asks for a real device
                raise TraceError(f"{target} cannot run under autocast to {on.dtype}: {error}") from error
    return recorder


@contextmanager
def _autocast(on: Autocast, *, is_on: bool) -> Iterator[None]:
    """As torch.autocast, which is off where no such device is present."""
    device, before = on.device_type, (torch.is_autocast_enabled(on.device_type), torch.is_autocast_cache_enabled())
    dtype = torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, is_on)
    torch.set_autocast_dtype(device, on.dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(before[1])


class _Recorder(TorchDispatchMode):
    """The kernels that are called, and `cast`: which of `tensors` were cast themselves, and to what."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.tensors, self.kernels, self.cast = tensors, Kernels(), dict[int, torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if func._schema.name == _CAST and dtype is not None:
            self.cast.update((i, dtype) for i, x in enumerate(self.tensors) if x is args[0])
        elif func.namespace != "prim" and not _is_view(func):  # prim: what asks for the device of a tensor
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            set_to = (dtype,) if isinstance(dtype, torch.dtype) else ()
            self.kernels.append((func, (*(x.dtype for x in tensors), *set_to)))
        return func(*args, **kwargs)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
