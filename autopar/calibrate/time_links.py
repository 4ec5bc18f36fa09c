"""Timed communication: collectives as plans issue them, in all groups at once, and sends between pairs of ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autopar.calibrate.call_time import block_s, calls_within
from autopar.errors import AutoparError
from autopar.runtime.rank_agreement import is_from_backend
from autopar.sbp.axis import Axis
from autopar.sbp.convert import all_gather, all_reduce, all_to_all, reduce_scatter
from autopar.sbp.uneven.dim_parts import DimParts
from autopar.units import format_bytes

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_TRIALS = 3
_SIDE = 256  # of the square matrices that are multiplied during a collective
_SOME_PRODUCTS = 20  # to see how long one takes
_TURNS_S, _LEAST_TURNS = (0.005, 0.01, 0.02), 2  # of products between all-reduces
_SLOW_S = 0.5  # a call that takes longer is timed once, and larger ones are left out


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of `size` members, `stride` ranks apart, within each `block` of ranks; each rank is in at most one."""

    size: int
    stride: int
    block: int

    def rows(self, num_ranks: int) -> list[list[int]]:
        """The ranks of each group.

        >>> Groups(2, 2, 8).rows(8), Groups(2, 1, 3).rows(6)
        ([[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1], [3, 4]])
        """
        span = self.size * self.stride
        return [
            list(range(start + first + offset, start + first + span, self.stride))
            for start in range(0, num_ranks, self.block)
            for first in range(0, self.block - span + 1, span)
            for offset in range(self.stride)
        ]

    def of_rank(self, rank: int, num_ranks: int) -> list[int]:
        """The ranks of the group of `rank`; [] if it is in none."""
        return next((row for row in self.rows(num_ranks) if rank in row), [])


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Measured seconds of a collective in all of `groups` at once; `num_bytes` as in `sbp.redistribute.Collective`, of
    a "p2p" those that are sent.
    """

    kind: str
    groups: Groups
    num_bytes: int
    seconds: float


@dataclass
class TimedLinks:
    """The world's links, over groups of their own whose waits end after `stall_s` seconds."""

    device: torch.device
    stall_s: float
    budget_s: float
    known: dict[Groups, dist.ProcessGroup | None] = field(default_factory=dict)
    _world: list[dist.ProcessGroup] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size()

    def group(self, groups: Groups) -> dist.ProcessGroup | None:
        """This rank's group; all ranks make the same groups in the same order."""
        if groups not in self.known:
            timeout = timedelta(seconds=self.stall_s)
            made: list[Any] = [(row, dist.new_group(row, timeout=timeout)) for row in groups.rows(self.num_ranks)]
            self.known[groups] = next((group for row, group in made if dist.get_rank() in row), None)
        return self.known[groups]

    @property
    def world(self) -> dist.ProcessGroup:
        """The group in which all ranks meet before each trial.

        It waits twice as long: the ranks of a stalled message, which can name it, are to be heard first.
        """
        if not self._world:
            made: Any = dist.new_group(timeout=timedelta(seconds=2 * self.stall_s))
            self._world.append(made)
        return self._world[0]

    def close(self) -> None:
        """End the groups."""
        for group in (*self.known.values(), *self._world):
            if group is not None:
                dist.destroy_process_group(group)
        self.known.clear()
        self._world.clear()

    def collective(self, kind: str, groups: Groups, sizes: Sequence[int]) -> Iterator[CollectiveTime]:
        """The collective timed for each of `sizes` bytes, until one takes long."""
        row = groups.of_rank(dist.get_rank(), self.num_ranks)
        axis = Axis("calibrate", groups.size, row.index(dist.get_rank()), self.group(groups))
        for num_bytes in sizes:
            timed = self._timed(_call_of(kind, axis, num_bytes, self.device), kind, groups, num_bytes)
            yield timed
            if timed.seconds > _SLOW_S:
                return

    def sends(self, groups: Groups, sizes: Sequence[int]) -> Iterator[CollectiveTime]:
        """Sends between the pairs of `groups`, one way in all at once, timed for each of `sizes` bytes."""
        row, group = groups.of_rank(dist.get_rank(), self.num_ranks), self.group(groups)
        for num_bytes in sizes:
            x = torch.zeros(max(1, num_bytes // 4), device=self.device)

            def there_and_back(x: torch.Tensor = x) -> None:
                for sender in row:
                    if dist.get_rank() == sender:
                        dist.send(x, dst=sum(row) - sender, group=group)
                    else:
                        dist.recv(x, src=sender, group=group)

            timed = self._timed(there_and_back, "p2p", groups, num_bytes)
            yield replace(timed, seconds=timed.seconds / 2)
            if timed.seconds > _SLOW_S:
                return

    def overlap(self, groups: Groups, num_bytes: int) -> float:
        """The share of an all-reduce in which as long a run of products goes on as fast as alone; 0 to 1.

        The same on every rank.
        """
        products, flat = self._products(), torch.zeros(max(1, num_bytes // 4), device=self.device)
        seconds = partial(self._seconds, count=1, kind="all_reduce", groups=groups, num_bytes=num_bytes)
        reduction = partial(dist.all_reduce, flat, group=self.group(groups))

        def both(num: int) -> None:
            work = reduction(async_op=True)
            products(num)
            work.wait()

        num = calls_within(seconds(partial(products, _SOME_PRODUCTS)) / _SOME_PRODUCTS, seconds(reduction))
        hidden = []
        for _ in range(_TRIALS):
            alone_s, reduced_s, both_s = map(seconds, (partial(products, num), reduction, partial(both, num)))
            hidden.append((alone_s + reduced_s - both_s) / min(alone_s, reduced_s))
        return min(1.0, max(0.0, median(hidden)))

    def lateness_s(self, groups: Groups) -> float:
        """The seconds by which products and a small all-reduce in turn take longer than each in a row: where ranks
        share cores, the last of them is late. The same on every rank.
        """
        products, flat = self._products(), torch.zeros(_SIDE, device=self.device)
        seconds = partial(self._seconds, kind="all_reduce", groups=groups, num_bytes=flat.nbytes)
        reduction = partial(dist.all_reduce, flat, group=self.group(groups))

        def in_turn(num: int) -> None:
            products(num)
            reduction()

        product_s = seconds(partial(products, _SOME_PRODUCTS), count=1) / _SOME_PRODUCTS
        late_s = []
        for turn_s in _TURNS_S:
            num, turns = calls_within(product_s, turn_s), max(_LEAST_TURNS, calls_within(turn_s, self.budget_s))
            works = partial(products, num), reduction, partial(in_turn, num)
            for _ in range(_TRIALS):
                computed_s, reduced_s, both_s = (seconds(work, count=turns) for work in works)
                late_s.append(both_s - computed_s - reduced_s)
        return max(0.0, median(late_s))

    def computing_s(self, num_ranks: int) -> float:
        """Seconds of a product of matrices while so many ranks, the first ones, compute and the others wait.

        The same on every rank.
        """
        products, groups = self._products(), Groups(num_ranks, 1, num_ranks)
        seconds = partial(self._seconds, count=1, kind="all_reduce", groups=groups, num_bytes=8)

        def called_s(num: int) -> float:
            return seconds(partial(products, num if dist.get_rank() < num_ranks else 0)) / num

        num = calls_within(called_s(_SOME_PRODUCTS), self.budget_s)
        return median(called_s(num) for _ in range(_TRIALS))

    def stay_busy(self) -> None:
        """Compute until all ranks are here, so that those that still time their ops do not have the cores alone.

        On GPUs, each of which is one rank's alone, return at once.
        """
        if self.device.type != "cpu":
            return
        met, x = dist.barrier(group=self.world, async_op=True), torch.zeros(_SIDE, _SIDE)
        assert met is not None, "work that goes on"
        while not met.is_completed():
            torch.mm(x, x)
        met.wait()

    def _timed(self, work: Callable[[], object], kind: str, groups: Groups, num_bytes: int) -> CollectiveTime:
        """A call timed: the slowest rank's seconds, the median of trials; the same on every rank."""
        timed = partial(self._seconds, work, kind=kind, groups=groups, num_bytes=num_bytes)
        timed(count=1)
        seconds = timed(count=1)
        if seconds <= _SLOW_S:
            count = calls_within(seconds, self.budget_s / _TRIALS)
            seconds = median(timed(count=count) for _ in range(_TRIALS))
        return CollectiveTime(kind, groups, num_bytes, seconds)

    def _products(self) -> Callable[[int], None]:
        """A function that makes so many products of matrices."""
        x, y = (torch.zeros(_SIDE, _SIDE, device=self.device) for _ in range(2))

        def products(num: int) -> None:
            for _ in range(num):
                torch.mm(x, x, out=y)

        return products

    def _seconds(self, work: Callable[[], object], count: int, kind: str, groups: Groups, num_bytes: int) -> float:
        """Seconds of each of `count` calls on the rank that takes longest, all starting together; a stall is named by
        the collective in `work`.
        """
        with self._stall_named(kind, range(self.num_ranks), num_bytes):
            dist.barrier(group=self.world)
        with self._stall_named(kind, groups.of_rank(dist.get_rank(), self.num_ranks), num_bytes):
            called_s = block_s(work, count, self.device)
        seconds = torch.tensor(called_s, dtype=torch.float64, device=self.device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.world)
        return seconds.item()

    @contextmanager
    def _stall_named(self, kind: str, ranks: Iterable[int], num_bytes: int) -> Iterator[None]:
        """A context in which a wait that reaches its timeout is an AutoparError that names the ranks.

        A rank that waits for all others outside of it is told this one's error.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_from_backend(error) or "timed out" not in str(error).lower():
                raise
            raise AutoparError(
                f"calibrate: expected {kind} of {format_bytes(num_bytes)} among ranks {', '.join(map(str, ranks))} to"
                f" end within {self.stall_s:g} s, found no answer: a link between them stalls, or one of them hangs;"
                f" look at these ranks, then calibrate again (the backend said: {str(error).splitlines()[0]})"
            ) from error


def _call_of(kind: str, axis: Axis, num_bytes: int, device: torch.device) -> Callable[[], object]:
    """The runtime's collective on a buffer whose larger side has `num_bytes`."""
    rows = max(1, num_bytes // 4 // axis.size**2) * axis.size
    if kind == "all_gather":
        x = torch.zeros(rows // axis.size, axis.size, device=device)
        return lambda: all_gather(x, axis, DimParts(0))
    x = torch.zeros(rows, axis.size, device=device)
    if kind == "all_reduce":
        return lambda: all_reduce(x, axis)
    if kind == "reduce_scatter":
        return lambda: reduce_scatter(x, axis, DimParts(0))
    assert kind == "all_to_all", f"unknown collective {kind!r}"
    return lambda: all_to_all(x, axis, DimParts(0), DimParts(1))
