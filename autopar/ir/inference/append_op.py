"""`autopar.append`: a tensor with rows behind it, as `torch.cat` gives it, written into room that was left behind it.

A key-value cache grows by a token in each call. `torch.cat` copies all of it each time; here it is copied when its room
is full only. What was given before stays as it was: rows are written behind all that any result of the same memory has.
"""

from dataclasses import dataclass

import torch

APPEND = "autopar.append.default"
WRITE = "autopar.write.default"  # `index_copy`, into the very tensor that it is given
# The room that is left behind a tensor when it is copied: a share of its rows, and at least so many. So that a cache
# that grows row by row is copied once in as many rows as an eighth of it.
_ROOM, _LEAST_ROOM = 1 / 8, 16

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("append(Tensor past, Tensor rows, int dim) -> Tensor")


@dataclass
class _Room:
    """The memory of a tensor with room for `size` rows of `dim`, of which those of the last result, of shape `used` and
    these strides, are used.
    """

    size: int
    dim: int
    used: torch.Size
    stride: tuple[int, ...]

    def holds(self, past: torch.Tensor, num: int, dim: int) -> bool:
        """Whether `past` is all that is used, with room for `num` rows of `dim` behind it."""
        if past.shape != self.used or dim != self.dim or self.used[dim] + num > self.size or past.storage_offset():
            return False
        stride = past.stride()
        is_same = stride == self.stride or _strides(past.shape, stride) == _strides(past.shape, self.stride)
        return is_same and (not past.is_inference() or torch.is_inference_mode_enabled())


def _strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """`stride` without those of dims of one element, which mean nothing and differ (DTensor computes its own)."""
    return tuple(step for size, step in zip(shape, stride) if size > 1)


def _append(past: torch.Tensor, rows: torch.Tensor, dim: int) -> torch.Tensor:
    dim, num = dim % past.ndim, rows.shape[dim]
    used = past.shape[dim]
    room: _Room | None = getattr(past.untyped_storage(), "autopar_room", None)
    if room is None or not room.holds(past, num, dim):
        size = used + num + max(int(_ROOM * (used + num)), _LEAST_ROOM)
        whole = past.new_empty((*past.shape[:dim], size, *past.shape[dim + 1 :]))
        whole.narrow(dim, 0, used).copy_(past)
        room = _Room(size, dim, past.shape, whole.stride())
        whole.untyped_storage().autopar_room = room  # type: ignore[attr-defined]
        past = whole
    past.as_strided(rows.shape, room.stride, used * room.stride[dim]).copy_(rows)
    grown = past.as_strided((*past.shape[:dim], used + num, *past.shape[dim + 1 :]), room.stride)
    room.used = grown.shape
    return grown


def _write(past: torch.Tensor, dim: int, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return past.index_copy_(dim, index, rows)


_LIBRARY.define("write(Tensor past, int dim, Tensor index, Tensor rows) -> Tensor")
_LIBRARY.impl("write", _write, "CompositeExplicitAutograd")
_LIBRARY.impl("append", _append, "CompositeExplicitAutograd")
