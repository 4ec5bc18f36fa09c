"""`autopar.append`: a tensor with rows behind it, as `torch.cat` gives it, written into room that was left behind it.

A key-value cache grows by a token in each call. `torch.cat` copies all of it each time; here it is copied when its room
is full only. What was given before stays as it was: rows are written behind all that any result of the same memory has.
"""

from dataclasses import dataclass

import torch

APPEND = "autopar.append.default"
# The room that is left behind a tensor when it is copied: a share of its rows, and at least so many. So that a cache
# that grows row by row is copied once in as many rows as an eighth of it.
_ROOM, _LEAST_ROOM = 1 / 8, 16

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("append(Tensor past, Tensor rows, int dim) -> Tensor")


@dataclass
class _Room:
    """The memory of a tensor with room behind its first `used` rows of `dim`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dim: int
    used: int

    def holds(self, past: torch.Tensor, num: int, dim: int) -> bool:
        """Whether `past` is all that is used, with room for `num` rows of `dim` behind it."""
        known = (*self.shape[:dim], self.used, *self.shape[dim + 1 :]), _strides(past.shape, self.stride), 0, self.dim
        found = tuple(past.shape), _strides(past.shape, past.stride()), past.storage_offset(), dim
        can_write = torch.is_inference_mode_enabled() or not past.is_inference()
        return known == found and self.used + num <= self.shape[dim] and can_write


def _strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """`stride` without those of dims of one element, which mean nothing and differ (DTensor computes its own)."""
    return tuple(step for size, step in zip(shape, stride) if size > 1)


def _append(past: torch.Tensor, rows: torch.Tensor, dim: int) -> torch.Tensor:
    dim, num = dim % past.ndim, rows.shape[dim]
    room: _Room | None = getattr(past.untyped_storage(), "autopar_room", None)
    if room is None or not room.holds(past, num, dim):
        used = past.shape[dim]
        size = used + num + max(int(_ROOM * (used + num)), _LEAST_ROOM)
        whole = past.new_empty((*past.shape[:dim], size, *past.shape[dim + 1 :]))
        whole.narrow(dim, 0, used).copy_(past)
        room = _Room(tuple(whole.shape), whole.stride(), dim, used)
        whole.untyped_storage().autopar_room = room  # type: ignore[attr-defined]
    else:
        whole = past.as_strided(room.shape, room.stride)
    whole.narrow(dim, room.used, num).copy_(rows)
    room.used += num
    return whole.narrow(dim, 0, room.used)


_LIBRARY.impl("append", _append, "CompositeExplicitAutograd")
