"""Activation offload: a region's saved activations are copied to the host and prefetched for backward."""

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Union
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.torch_compat import StorageWeakRef


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Copy:
    """The copy of one storage on the host; `back`: its bytes on the device, from the first to the last use of a view.

    `storage`: a weak reference to the original, which keeps its address from being reused though its memory may be
    freed.
    """

    storage: StorageWeakRef
    num_bytes: int
    device: torch.device
    host: torch.Tensor
    is_there: Any = None  # CUDA event after which `back` holds the bytes
    back: torch.Tensor | None = None
    num_views: int = 0
    num_left: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _StorageView:
    """A saved tensor as a view of a storage."""

    copy: _Copy
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


# key of the copies: address of a storage; version and position of a tensor in it
_Key = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]


class Offload:
    """A scope in which tensors saved for backward are copied to the host, each storage once, and freed on the device.

    `before`: the scope of the previous region, which is the next one in backward. `stay`: tensors that are on the
    device in any case, such as parameters; neither they nor their views are copied. On a GPU the copies overlap with
    compute, on a stream of their own: when backward reaches a region, its tensors and those of the previous region are
    fetched (prefetch).
    """

    def __init__(self, before: Union["Offload", None], *stay: torch.Tensor) -> None:
        self.before = before
        self.stay = {ref.cdata: ref for ref in (StorageWeakRef(x.untyped_storage()) for x in stay)}
        # storages that earlier regions have copied are not copied again
        self.known: WeakValueDictionary[_Key, _Copy] = before.known if before else WeakValueDictionary()
        self.copies: list[_Copy] = []
        self.stream = before.stream if before else None
        self.is_fetched = False
        self.hooks: Any = None

    def __enter__(self) -> None:
        self.hooks = saved_tensors_hooks(self.pack, unpack)
        self.hooks.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The hooks refer to this scope: without this its copies would be freed only by the garbage collector.
        hooks, self.hooks, self.stay = self.hooks, None, {}
        hooks.__exit__(kind, error, trace)

    def pack(self, x: torch.Tensor) -> Any:
        """`x` itself if it stays on the device, else the view from which `unpack` restores it."""
        if x.layout != torch.strided or x.is_conj() or x.is_neg() or not x.numel():
            return x
        storage = StorageWeakRef(x.untyped_storage())
        if storage.cdata in self.stay:
            return x
        key = _key(x, storage)
        copy = self.known.get(key)
        if copy is None:
            copy = self.known[key] = _Copy(storage, x.untyped_storage().nbytes(), x.device, self._to_host(x))
            self.copies.append(copy)
        copy.num_views += 1
        return self, _StorageView(copy, x.dtype, int(x.storage_offset()), tuple(x.shape), x.stride())

    def unpack(self, view: _StorageView) -> torch.Tensor:
        """The tensor that was packed, on its device."""
        self._fetch()
        if self.before is not None:
            self.before._fetch()
        back = self._back(view.copy)
        whole = back[: back.numel() // view.dtype.itemsize * view.dtype.itemsize].view(view.dtype)
        return whole.as_strided(view.size, view.stride, view.offset)

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, 0, (storage.nbytes(),), (1,))
        if x.device.type != "cuda":
            return whole.clone()
        self.stream = self.stream or torch.cuda.Stream(x.device)
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self.stream):
            host.copy_(whole, non_blocking=True)
        whole.record_stream(self.stream)  # its memory must not be reused before it is copied
        return host

    def _fetch(self) -> None:
        """Start fetching all copies, the last first."""
        if not self.is_fetched:
            self.is_fetched = True
            for copy in reversed(self.copies):
                if copy.back is None:
                    self._begin(copy)

    def _begin(self, copy: _Copy) -> None:
        copy.back, copy.num_left = self._bring(copy), copy.num_views

    def _bring(self, copy: _Copy) -> torch.Tensor:
        if copy.device.type != "cuda":
            return copy.host
        assert self.stream is not None, "what is brought back was copied away on a stream"
        back = torch.empty_like(copy.host, device=copy.device)
        self.stream.wait_stream(torch.cuda.current_stream(copy.device))
        with torch.cuda.stream(self.stream):
            back.copy_(copy.host, non_blocking=True)
        back.record_stream(self.stream)
        copy.is_there = self.stream.record_event()
        return back

    def _back(self, copy: _Copy) -> torch.Tensor:
        """The fetched bytes on the device, for one of the views."""
        if copy.back is None:  # another backward over the same region
            self._begin(copy)
        back = copy.back
        assert back is not None, "it was begun to be brought back"
        if copy.is_there is not None:
            torch.cuda.current_stream(copy.device).wait_event(copy.is_there)
        copy.num_left -= 1
        if copy.num_left == 0:
            copy.back = None
        return back


def _key(x: torch.Tensor, storage: StorageWeakRef) -> _Key:
    """A key that is equal for tensors that may share a copy: views of one tensor without a write in between.

    Results of `unsafe_chunk` are no views of one another to autograd: recurrent cells write to each in place after
    others are saved.
    """
    base = x if x._base is None else x._base
    return storage.cdata, base._version, int(base.storage_offset()), tuple(base.shape), base.stride()


def unpack(packed: Any) -> torch.Tensor:
    """The saved tensor from the result of a hook: the tensor itself, or (object with `unpack`, its argument)."""
    return packed if isinstance(packed, torch.Tensor) else packed[0].unpack(packed[1])
