"""`partition`: the cut of consecutive blocks into stages that fit their devices, with the fastest slowest stage."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from autopar.costmodel.profile_ops import Profile


@dataclass(frozen=True, eq=False)
class Blocks:
    """The costs of blocks, f64[blocks] each, as in `Profile`: of one microbatch, except once_s and state_bytes.

    `entering_bytes`: of values made before a block and read in it or later. `is_recomputable`: bool[blocks]. `shared`:
    (blocks that read it, bytes, seconds a step) of each tied parameter. Where groups of devices differ, these are the
    costs on the first; `by_group`: (devices, costs) of each, `of_stage`: the costs on the devices of each stage.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray
    splitting_s: np.ndarray
    regathering_s: np.ndarray
    collective_s: np.ndarray
    once_s: np.ndarray
    state_bytes: np.ndarray
    saved_bytes: np.ndarray
    waiting_bytes: np.ndarray
    entering_bytes: np.ndarray
    is_recomputable: np.ndarray
    shared: tuple[tuple[tuple[int, ...], float, float], ...] = ()
    by_group: tuple[tuple[int, "Blocks"], ...] = ()
    of_stage: tuple["Blocks", ...] = ()


# The fields that are sums over the ops of a block.
_SUMMED = sorted({of.name for of in fields(Blocks)} & {of.name for of in fields(Profile)} - {"shared"})


@dataclass(frozen=True)
class Partition:
    """A cut: stage s has blocks starts[s] to starts[s + 1] and recomputes the first num_recomputed[s] that it can.

    Of each stage, `times_s`: forward and backward of a microbatch; `once_s`: of the work once a step; `memory_bytes`.
    """

    starts: tuple[int, ...]
    num_recomputed: tuple[int, ...]
    times_s: tuple[float, ...]
    once_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]


def blocks_of(costs: Profile, starts: Sequence[int], recomputable: Sequence[int]) -> Blocks:
    """The costs of the blocks that begin at the ops numbered `starts` (the first is 0).

    `recomputable`: block numbers.
    """
    sums: dict[str, Any] = {name: np.add.reduceat(getattr(costs, name), starts) for name in _SUMMED}
    numbers = (
        np.searchsorted(starts, [position for one in costs.shared for position in one.positions], side="right") - 1
    )
    shared, first = [], 0
    for one in costs.shared:
        readers = tuple(sorted(set(numbers[first : first + len(one.positions)].tolist())))
        shared.append((readers, one.state_bytes, one.once_s))
        first += len(one.positions)
    is_recomputable = np.zeros(len(starts), bool)
    is_recomputable[list(recomputable)] = True
    others: dict[str, Any] = {"is_recomputable": is_recomputable, "shared": tuple(shared)}
    return Blocks(**sums, entering_bytes=costs.crossing_bytes[list(starts)], **others)


def partition(
    blocks: Blocks,
    in_flight: Sequence[int],
    limit_bytes: float | Sequence[float],
    *,
    waiting: Sequence[int] | None = None,
) -> Partition | None:
    """The cut with the fastest slowest stage, by dynamic programming; None if no cut fits.

    `in_flight`: for each stage the number of microbatches whose activations it keeps; `waiting`: the number whose
    weight gradients are put off; `limit_bytes`: of each stage. A stage recomputes only as many of its blocks as it must
    to fit.
    """
    num_blocks, num_stages = len(blocks.forward_s), len(in_flight)
    spans = stage_spans(blocks, in_flight, limit_bytes, waiting)
    worst = np.full((num_stages + 1, num_blocks + 1), np.inf)
    worst[0, 0] = 0.0
    cut = np.zeros((num_stages + 1, num_blocks + 1), np.int64)
    for stage, one in enumerate(spans):
        slowest = np.maximum(worst[stage][:, None], one.times_s)  # [where the stage starts, where it ends]
        cut[stage + 1], worst[stage + 1] = slowest.argmin(axis=0), slowest.min(axis=0)
    if not np.isfinite(worst[num_stages, num_blocks]):
        return None
    stops = [num_blocks]
    for stage in range(num_stages, 0, -1):
        stops.insert(0, int(cut[stage, stops[0]]))
    return cut_at(spans, stops)


@dataclass(frozen=True, eq=False)
class Spans:
    """Costs of a stage that has any run of consecutive blocks, f64[start, stop] each.

    `times_s`: seconds of a microbatch, inf if it does not fit; `num`: blocks recomputed; `bytes`: of memory; `once_s`:
    of the work once a step.
    """

    times_s: np.ndarray
    num: np.ndarray
    bytes: np.ndarray
    once_s: np.ndarray


def stage_spans(
    blocks: Blocks, in_flight: Sequence[int], limit_bytes: float | Sequence[float], waiting: Sequence[int] | None = None
) -> list[Spans]:
    """The `Spans` of each stage; arguments as of `partition`."""
    limits = np.broadcast_to(limit_bytes, len(in_flight))
    each = blocks.of_stage or (blocks,) * len(in_flight)
    sums = {own: (_Sums.of(own), _total(own.once_s, own.shared, 2)) for own in set(each)}
    settings = list(zip(each, in_flight, waiting or [0] * len(in_flight), limits.tolist()))
    known = {one: Spans(*_spans(sums[one[0]][0], *one[1:]), sums[one[0]][1]) for one in set(settings)}
    return [known[setting] for setting in settings]


def cut_at(spans: Sequence[Spans], ends: Sequence[int]) -> Partition:
    """The cut whose stage s has blocks ends[s] to ends[s + 1]."""
    columns = [
        [float(column[a, b]) for column in (one.num, one.times_s, one.once_s, one.bytes)]
        for one, (a, b) in zip(spans, pairwise(ends), strict=True)
    ]
    num, times_s, once_s, used = (tuple(column) for column in zip(*columns))
    return Partition(tuple(map(int, ends[:-1])), tuple(map(int, num)), times_s, once_s, used)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Costs of stages, f64[start, stop] each, for a stage of blocks start to stop.

    `times_s`: seconds of a microbatch. `again_s`: forward seconds of its recomputable blocks. `state_bytes`: stored
    bytes. `saved_bytes`: kept for a microbatch in flight. `waiting_bytes`: kept for a microbatch whose weight gradients
    are put off. `freed_bytes`: saved bytes that recomputing all recomputable blocks frees. `num_can`: the number of
    these blocks. `is_empty`: whether the stage has no block. `inside_bytes`: of one block while it is recomputed.
    """

    times_s: np.ndarray
    again_s: np.ndarray
    state_bytes: np.ndarray
    saved_bytes: np.ndarray
    waiting_bytes: np.ndarray
    freed_bytes: np.ndarray
    num_can: np.ndarray
    is_empty: np.ndarray
    inside_bytes: float

    @classmethod
    def of(cls, blocks: Blocks) -> "_Sums":
        can, number = blocks.is_recomputable, len(blocks.forward_s)
        return cls(
            times_s=_sum(blocks.forward_s + blocks.backward_s),
            again_s=_sum(np.where(can, blocks.forward_s, 0.0)),
            state_bytes=_total(blocks.state_bytes, blocks.shared, 1),
            saved_bytes=_sum(blocks.saved_bytes),
            waiting_bytes=_sum(blocks.waiting_bytes),
            freed_bytes=_sum(np.where(can, blocks.saved_bytes - blocks.entering_bytes, 0.0)),
            num_can=_sum(can.astype(float)),
            is_empty=np.arange(number + 1)[:, None] >= np.arange(number + 1)[None, :],
            inside_bytes=float(blocks.saved_bytes[can].max(initial=0.0)),
        )


def _spans(sums: _Sums, kept: int, waiting: int, limit_bytes: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """f64[start, stop] each: (seconds of a stage on a microbatch, inf if it does not fit; blocks recomputed; bytes).

    A recomputed block keeps its inputs; its inside exists once, while its backward runs, or waits for the gradients of
    weights.
    """
    whole = sums.state_bytes + kept * sums.saved_bytes + waiting * sums.waiting_bytes
    need, inside_bytes, freed_bytes = (
        whole - limit_bytes,
        0.0 if waiting else sums.inside_bytes,
        (kept - waiting) * sums.freed_bytes,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        num = np.ceil((need + inside_bytes) / freed_bytes * sums.num_can)
    num = np.where(need <= 0, 0.0, np.where((freed_bytes > 0) & (num <= sums.num_can), num, np.inf))
    fits = np.isfinite(num)
    num = np.where(fits, num, 0.0)
    part = num / np.maximum(sums.num_can, 1)
    used = whole + np.where(num > 0, inside_bytes - part * freed_bytes, 0.0)
    return np.where(sums.is_empty | ~fits, np.inf, sums.times_s + part * sums.again_s), num, used


def _sum(column: np.ndarray) -> np.ndarray:
    """f64[start, stop]: the sums over blocks start to stop."""
    ends = np.concatenate([[0.0], np.cumsum(column)])
    return ends[None, :] - ends[:, None]


def _total(column: np.ndarray, shared: Sequence[tuple], which: int) -> np.ndarray:
    """`_sum`, plus each shared parameter once for stages with one of its readers."""
    total = _sum(column)
    number = len(column)
    for one in shared:
        marks = np.zeros(number)
        marks[list(one[0])] = 1.0
        total = total + np.where(_sum(marks) > 0.5, one[which], 0.0)
    return total
