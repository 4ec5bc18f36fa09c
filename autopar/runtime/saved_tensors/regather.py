"""Regathering: saved tensors that are views of a gathered parameter are not kept, but gathered again for backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.runtime.saved_tensors.gather_bucket import GatherBucket, Unchanged
from autopar.runtime.saved_tensors.offload_saved import Offload, unpack
from autopar.sbp.convert import move
from autopar.torch_compat import StorageWeakRef


@dataclass(frozen=True, eq=False)
class _GatheredView:
    """A saved tensor as a view of the gathered tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool

    def of(self, base: torch.Tensor) -> torch.Tensor:
        view = base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)
        return view.conj() if self.is_conj else view


class _GatheredAlone:
    """A parameter that is gathered by itself, in `steps`."""

    def __init__(self, stored: torch.Tensor, *steps: tuple[Any, ...]) -> None:
        self.stored, self.steps = Unchanged(stored), steps

    def want(self) -> None:
        pass

    def gathered(self) -> torch.Tensor:
        made = self.stored.checked()
        for step in self.steps:
            made = move(made, *step)
        return made


class _GatheredInBucket:
    """Parameter `number` of a bucket."""

    def __init__(self, bucket: GatherBucket, number: int) -> None:
        self.bucket, self.number = bucket, number

    def want(self) -> None:
        self.bucket.wanted.add(self.number)

    def gathered(self) -> torch.Tensor:
        return self.bucket.gathered(self.number)


class _GatheredTensor:
    """A gathered tensor in backward: made for the first of its views that autograd asks for, freed after the last."""

    def __init__(self, whole: torch.Tensor, source: "_GatheredAlone | _GatheredInBucket") -> None:
        # no reference to `whole` itself, since autograd keeps this object alive
        self.storage, self.dtype, self.offset = (
            StorageWeakRef(whole.untyped_storage()),
            whole.dtype,
            int(whole.storage_offset()),
        )
        self.source = source
        self.size, self.stride = whole.shape, whole.stride()
        self.has_elements = whole.numel() > 0
        self.num_views, self.num_left = 0, 0
        self.made: torch.Tensor | None = None

    def pack(self, x: torch.Tensor) -> _GatheredView | None:
        """`x` as a view of the gathered tensor; None if it is not one."""
        if (
            x.dtype != self.dtype
            or StorageWeakRef(x.untyped_storage()) != self.storage
            or x.is_neg()
            or bool(x.numel()) != self.has_elements
        ):
            return None
        self.num_views += 1
        self.source.want()
        return _GatheredView(tuple(x.shape), x.stride(), int(x.storage_offset()) - self.offset, x.is_conj())

    def unpack(self, view: _GatheredView) -> torch.Tensor:
        if self.made is None:
            self.made, self.num_left = self.make(), self.num_views
        gathered = view.of(self.made)
        self.num_left -= 1
        if self.num_left == 0:
            self.made = None
        return gathered

    def make(self) -> torch.Tensor:
        made = self.source.gathered()
        # In forward the last slice may or may not have had memory of its own; the views refer to its strides there.
        if made.stride() != self.stride:
            made = torch.empty_strided(self.size, self.stride, dtype=made.dtype, device=made.device).copy_(made)
        return made


@contextmanager
def regathered(*parameters: tuple[Any, ...], rest: Offload | None = None) -> Iterator[None]:
    """A scope in which saved tensors in the memory of a gathered parameter are not kept, but gathered again in
    backward.

    `parameters`: (gathered tensor, stored part, steps from the part to it as (axis, src, dst), of `move`, ...), or
    (gathered tensor, the bucket that gathers it, its number there).
    One scope serves all parameters of an op, since only the innermost hooks see saved tensors; `rest` packs all other
    saved tensors. RuntimeError in backward if a stored part has changed in between, as autograd raises for its own
    saved tensors.
    """
    known = [
        _GatheredTensor(
            whole, _GatheredInBucket(stored, *how) if isinstance(stored, GatherBucket) else _GatheredAlone(stored, *how)
        )
        for whole, stored, *how in parameters
    ]

    def pack(x: torch.Tensor) -> Any:
        packed = ((again, view) for again in known if (view := again.pack(x)) is not None)
        again = next(packed, None)
        return again or (rest.pack(x) if rest else x)

    with saved_tensors_hooks(pack, unpack):
        yield
