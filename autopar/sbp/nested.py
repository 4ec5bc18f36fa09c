"""Collectives over several link levels that are run level by level, where a backend would run a flat ring.

All-reduce: reduce-scatter inside, all-reduce across, all-gather inside (Jia et al., "Highly Scalable Deep Learning
Training System with Mixed-Precision", 2018); all-gather from the outside in, reduce-scatter from the inside out. So
1 / the number of inner ranks of the bytes cross the outer links.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from autopar.sbp.in_flight import timed
from autopar.sbp.redistribute import Collective

# torch 2.13 renamed these two; 2.11 and 2.12 know only the old names.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The bytes of the largest element: all-reduces are padded so that each inner rank has as many whole elements.
_LARGEST_ELEMENT = 16

Stage = Callable[[], dist.Work | None]  # starts a collective of one level; None from a rank without peers


@dataclass(frozen=True)
class Nesting:
    """A group's members, in its order, as blocks within blocks: `sizes` of a block of each level, from the inside out.

    `ranges`: kind of collective -> (fewest, most) bytes, as of `Collective`, that are faster level by level.
    """

    sizes: tuple[int, ...]
    ranges: Mapping[str, tuple[float, float]]

    def takes(self, kind: str, num_bytes: int) -> bool:
        """Whether a collective is run level by level."""
        fewest, most = self.ranges.get(kind, (math.inf, -math.inf))
        return fewest <= num_bytes <= most

    def padded(self, num_bytes: int) -> int:
        """The bytes of an all-reduce with its padding."""
        unit = _LARGEST_ELEMENT * math.prod(self.sizes[:-1])
        return -(-num_bytes // unit) * unit

    def issued(self, collective: Collective) -> tuple[Collective, ...]:
        """The collectives of single levels that a collective is run as, in order; itself if it is run flat."""
        kind, num_bytes = collective.kind, collective.num_bytes
        if not self.takes(kind, num_bytes):
            return (collective,)
        whole = self.padded(num_bytes) if kind == "all_reduce" else num_bytes
        last = len(self.sizes) - 1
        size = [whole // math.prod(self.sizes[:level]) for level in range(len(self.sizes))]
        inside = range(last) if kind == "all_reduce" else range(last + 1)
        scatters = [("reduce_scatter", level) for level in inside] if kind != "all_gather" else []
        gathers = [("all_gather", level) for level in reversed(inside)] if kind != "reduce_scatter" else []
        across = [("all_reduce", last)] if kind == "all_reduce" else []
        return tuple(
            replace(collective, kind=one, num_bytes=size[level], level=level)
            for one, level in (*scatters, *across, *gathers)
        )


@dataclass(frozen=True, eq=False)
class Nest:
    """A rank's groups of each level of a nesting, and its collectives under way, oldest first.

    The groups are None if the rank has no peers (a dry run), which allocates the same buffers.
    """

    nesting: Nesting
    groups: tuple[dist.ProcessGroup | None, ...]
    under_way: list["Chain"] = field(default_factory=list)

    def takes(self, kind: str, x: torch.Tensor) -> bool:
        """Whether a collective whose larger side is `x` is run level by level."""
        return self.nesting.takes(kind, x.numel() * x.itemsize)

    def padding(self, x: torch.Tensor) -> int:
        """The elements by which an all-reduce of `x` is padded."""
        num_bytes = x.numel() * x.itemsize
        return (self.nesting.padded(num_bytes) - num_bytes) // x.itemsize

    def begin_sum(self, flat: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> "Chain":
        """Begin to all-reduce the padded `flat` in place."""
        buffers = self._scattered(flat, len(self.groups) - 1)
        first, (last,) = self._scatters(buffers, op), buffers[-1:]

        def across() -> dist.Work | None:
            group = self.groups[-1]
            return None if group is None else dist.all_reduce(last, op=op, group=group, async_op=True)

        return self._begin([*first, across, *self._gathers(buffers)])

    def begin_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> "Chain":
        """Begin to reduce-scatter `whole` into `out`; its parts lie in the order of `scattered`."""
        buffers = [*self._scattered(whole, len(self.groups) - 1), out]
        return self._begin(self._scatters(buffers, dist.ReduceOp.SUM))

    def begin_gather(self, whole: torch.Tensor, part: torch.Tensor) -> "Chain":
        """Begin to all-gather `part` into `whole`, where the parts lie in an order that `in_turn` undoes."""
        buffers = [*self._scattered(whole, len(self.groups) - 1), part]
        return self._begin(self._gathers(buffers))

    def in_turn(self, whole: torch.Tensor) -> torch.Tensor:
        """[..., elements of a part]: a view of `whole` as gathered, with the parts in the order of the group."""
        last = len(self.groups)
        return whole.view(*self.nesting.sizes, -1).permute(*reversed(range(last)), last)

    def scattered(self, parts: torch.Tensor) -> torch.Tensor:
        """[..., elements of a part]: a view of [parts, elements] with the parts in the order of `begin_scatter`."""
        sizes, last = self.nesting.sizes, len(self.groups)
        return parts.reshape(*reversed(sizes), -1).permute(*reversed(range(last)), last)

    def _scattered(self, whole: torch.Tensor, num_levels: int) -> list[torch.Tensor]:
        """`whole`, and a buffer for what each of the inner levels leaves of it."""
        buffers = [whole]
        for size in self.nesting.sizes[:num_levels]:
            buffers.append(whole.new_empty(buffers[-1].numel() // size))
        return buffers

    def _scatters(self, buffers: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType) -> list[Stage]:
        def scatter(level: int) -> dist.Work | None:
            group = self.groups[level]
            ends = buffers[level + 1], buffers[level]
            return None if group is None else scatter_into(*ends, op=op, group=group, async_op=True)

        return [lambda level=level: scatter(level) for level in range(len(buffers) - 1)]

    def _gathers(self, buffers: Sequence[torch.Tensor]) -> list[Stage]:
        def gather(level: int) -> dist.Work | None:
            group = self.groups[level]
            return None if group is None else gather_into(*buffers[level : level + 2], group=group, async_op=True)

        return [lambda level=level: gather(level) for level in reversed(range(len(buffers) - 1))]

    def _begin(self, stages: list[Stage]) -> "Chain":
        """Begin a chain, and bring those under way one level further, so that the outer links are always in use.

        That all is issued at points of the program, and not when something has ended, gives all ranks one order.
        """
        chain = Chain(self, stages)
        for other in reversed(self.under_way):
            other.advance()
        self.under_way[:] = [*(other for other in self.under_way if not other.is_done), chain]
        return chain


class Chain:
    """The collectives of several levels for one collective: each is started when the one before has ended."""

    def __init__(self, nest: Nest, stages: list[Stage]) -> None:
        first, *self.stages = stages
        self.nest, self.num_ended, self.is_done = nest, 0, False
        self.work = first()

    def advance(self) -> None:
        """Wait for the level that is under way, and start the next one."""
        if self.is_done:
            return
        if self.work is not None:
            timed(self.work.wait)
        self.num_ended += 1
        self.is_done = not self.stages
        self.work = self.stages.pop(0)() if self.stages else None

    def wait(self) -> None:
        """Wait for all levels, as a collective's work does."""
        under_way = self.nest.under_way
        for other in reversed(under_way):
            if not other.num_ended:
                other.advance()
        while not self.is_done:
            for other in reversed(under_way[: under_way.index(self) + 1]):
                other.advance()
        under_way[:] = [other for other in under_way if not other.is_done]
