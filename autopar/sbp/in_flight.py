"""Collectives that were started and not yet waited for, and how backward hands their results on.

A gradient that is being summed has no value yet, but autograd wants one from the node that starts the sum. It gets a
placeholder, zero, and the sum arrives at the next node (`arrived`), which must be one that waits. Autograd runs the
nodes that are ready in the reverse order of their making: a node that was made early in forward waits late in backward.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class InFlight:
    """`part` is valid when `work` has ended; it is wanted in `dtype`."""

    work: dist.Work | None
    part: torch.Tensor
    dtype: torch.dtype

    def landed(self) -> torch.Tensor:
        """The result, once it is there."""
        if self.work is not None:
            self.work.wait()
        return self.part.to(self.dtype)


_num_in_turn = 0  # scopes that are open; one for all threads, for autograd has its own


@contextmanager
def in_turn() -> Iterator[None]:
    """A scope in which backward waits for each sum where it starts it, as for timing it."""
    global _num_in_turn
    _num_in_turn += 1
    try:
        yield
    finally:
        _num_in_turn -= 1


def is_in_turn() -> bool:
    """Whether a scope of `in_turn` is open."""
    return _num_in_turn > 0


def waiting_nodes(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The nodes of autograd that made `tensors`; () unless each waits for what is in flight to it, or `in_turn`."""
    nodes = tuple(x.grad_fn for x in tensors)
    is_waited_for = not _num_in_turn and all(hasattr(node, "in_flight") for node in nodes)
    return nodes if is_waited_for else ()


def placeholder(gradient: torch.Tensor) -> torch.Tensor:
    """Zero, in place of a gradient that is in flight to the node that gets this; it takes no memory."""
    return gradient.new_zeros(()).expand(gradient.shape)


def arrived(in_flight: list[InFlight], gradient: torch.Tensor) -> torch.Tensor:
    """The whole gradient of a node, from `gradient`, which autograd hands it, and what is in flight to it.

    `in_flight` is empty afterwards.
    """
    parts = [one.landed() for one in in_flight]
    in_flight.clear()
    # what others add to a placeholder has memory of its own; of no dims it has no strides to tell it by, and is added
    is_empty = bool(parts) and gradient.dim() > 0 and not any(gradient.stride())
    for part in parts:
        gradient, is_empty = part if is_empty else gradient + part, False
    return gradient
