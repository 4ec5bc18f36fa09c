"""Messages between the ranks of an axis for attention: parts once around the ring, and halves for balanced order."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from autopar.sbp.axis import Axis
from autopar.sbp.in_flight import timed
from autopar.sbp.redistribute import Collective

Tensor = torch.Tensor


def begin_shift(tensors: Sequence[Tensor], axis: Axis) -> Callable[[], list[Tensor]]:
    """Begin to send `tensors` of one dtype to the next rank of the ring; the function that it returns waits, and gives
    those of the rank before.
    """
    flat = torch.cat([x.reshape(-1) for x in tensors])
    received = torch.empty_like(flat)
    works: list[dist.Work] = []
    if axis.group is not None:
        after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
        sent = dist.P2POp(dist.isend, flat, group=axis.group, group_peer=after)
        awaited = dist.P2POp(dist.irecv, received, group=axis.group, group_peer=before)
        works = dist.batch_isend_irecv([sent, awaited])

    def landed() -> list[Tensor]:
        for work in works:
            timed(work.wait)
        return _shaped(received, [x.shape for x in tensors])

    return landed


def around(tensors: list[Tensor], axis: Axis) -> Iterator[tuple[int, list[Tensor]]]:
    """(rank, its `tensors`) for each rank of the axis, beginning with this one, sent on while they are used."""
    for turn in range(axis.size):
        landed = begin_shift(tensors, axis) if turn + 1 < axis.size else None
        yield (axis.index - turn) % axis.size, tensors
        tensors = tensors if landed is None else landed()


class Followers:
    """Sums, such as gradients, that follow tensors `around` a ring and are at last where these are from."""

    def __init__(self, dtypes: Sequence[torch.dtype], axis: Axis) -> None:
        self.dtypes, self.axis = dtypes, axis
        self.landed: Callable[[], list[Tensor]] | None = None

    def add(self, terms: Sequence[Tensor]) -> None:
        """Add the terms by this rank, and begin to send the sums on."""
        before = self.arrived() if self.landed is not None else [0] * len(terms)
        sums = [(term + x).to(dtype) for term, x, dtype in zip(terms, before, self.dtypes)]
        self.landed = begin_shift(sums, self.axis)

    def arrived(self) -> list[Tensor]:
        """The sums that the rank before sent."""
        assert self.landed is not None, "nothing was sent"
        return self.landed()


def ring_collectives(num_bytes: int, axis: int, size: int) -> Iterator[Collective]:
    """The collectives of tensors of `num_bytes` that go around in forward and backward, and of their gradients."""
    yield from [Collective("permute", (axis,), num_bytes, "forward")] * (size - 1)
    yield from [Collective("permute", (axis,), num_bytes, "backward")] * (2 * size - 1)


def halves_of(index: int, size: int, *, is_balanced: bool) -> tuple[int, int]:
    """The two of 2 * `size` chunks of a sequence that a rank of an axis has: neighbours, or one from each end, so that
    all ranks see as many keys together where each query sees those before it (zig-zag order).

    >>> [halves_of(index, 2, is_balanced=True) for index in range(2)]
    [(0, 3), (1, 2)]
    """
    return (index, 2 * size - 1 - index) if is_balanced else (2 * index, 2 * index + 1)


def rebalance(tensors: Sequence[Tensor], axis: Axis, *, to_balanced: bool) -> list[Tensor]:
    """`tensors` of one dtype [.., tokens, features] with the chunks of `halves_of`, from those in the other order; one
    all-to-all.
    """
    if axis.size == 1:
        return list(tensors)
    halves = [x.chunk(2, -2) for x in tensors]
    have = halves_of(axis.index, axis.size, is_balanced=not to_balanced)
    want = halves_of(axis.index, axis.size, is_balanced=to_balanced)
    targets = [_holder(chunk, axis.size, is_balanced=to_balanced) for chunk in have]
    sources = [_holder(chunk, axis.size, is_balanced=not to_balanced) for chunk in want]
    sent = sorted(range(2), key=lambda half: (targets[half], have[half]))
    flat = torch.cat([x[half].reshape(-1) for half in sent for x in halves])
    size, received = flat.numel() // 2, torch.empty_like(flat)
    if axis.group is not None:
        splits = ([size * ends.count(rank) for rank in range(axis.size)] for ends in (sources, targets))
        timed(dist.all_to_all_single, received, flat, *splits, group=axis.group)
    arrived = sorted(range(2), key=lambda half: (sources[half], want[half]))
    parts = {half: _shaped(part, [x[0].shape for x in halves]) for half, part in zip(arrived, received.split(size))}
    return [torch.cat(pair, -2) for pair in zip(parts[0], parts[1])]


def _shaped(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes)]


def _holder(chunk: int, size: int, *, is_balanced: bool) -> int:
    return min(chunk, 2 * size - 1 - chunk) if is_balanced else chunk // 2
