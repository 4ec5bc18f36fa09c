"""Collectives that were started and not yet waited for, and how backward hands their results on.

A gradient that is being summed has no value yet, but autograd wants one from the node that starts the sum. It gets a
placeholder, zero, and the sum arrives at the next node (`arrived`), which must be one that waits. Autograd runs the
nodes that are ready in the reverse order of their making: a node that was made early in forward waits late in backward.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Landing = Callable[[], tuple[torch.Tensor, ...]]  # waits for a collective and gives its results


@dataclass
class Waited:
    """The seconds that this process spent in collectives, counted while somebody `is_asking`."""

    seconds: float = 0.0
    is_asking: bool = False


WAITED = Waited()


def timed(wait: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """`wait(*args, **kwargs)`, which waits for other ranks; its time is counted in `WAITED`."""
    if not WAITED.is_asking:
        return wait(*args, **kwargs)
    start_s = time.perf_counter()
    try:
        return wait(*args, **kwargs)
    finally:
        WAITED.seconds += time.perf_counter() - start_s


@dataclass(frozen=True, eq=False)
class InFlight:
    """Result number `place` of a collective, which is wanted in `dtype`."""

    landing: Landing
    place: int
    dtype: torch.dtype

    def landed(self) -> torch.Tensor:
        """The result, once it is there."""
        return self.landing()[self.place].to(self.dtype)


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


def takes_scatters(nodes: Sequence[Any]) -> bool:
    """Whether `nodes`, of `waiting_nodes`, wait for parts of sums too, not for whole sums alone."""
    return all(getattr(node, "takes_scatters", False) for node in nodes)


def placeholder(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zero of `shape`, in place of what is in flight of `gradient` to the node that gets this; it takes no memory."""
    return gradient.new_zeros(()).expand(tuple(shape))


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
