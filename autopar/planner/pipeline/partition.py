"""Cut consecutive blocks into stages so that the slowest stage is as fast as it can be and each fits its device."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from autopar.costmodel.profile_ops import Profile


@dataclass(frozen=True, eq=False)
class Blocks:
    """f64[blocks] each, of one microbatch but for once_s and state_bytes, as in `Profile`. entering_bytes: of what is
    made before a block and read in it or later; is_recomputable: bool[blocks]. shared: (blocks that read it, bytes,
    seconds a step) of tied parameters.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray
    split_s: np.ndarray
    once_s: np.ndarray
    state_bytes: np.ndarray
    saved_bytes: np.ndarray
    waiting_bytes: np.ndarray
    entering_bytes: np.ndarray
    is_recomputable: np.ndarray
    shared: tuple[tuple[tuple[int, ...], float, float], ...] = ()


# What a block is the sum of.
_SUMMED = sorted({of.name for of in fields(Blocks)} & {of.name for of in fields(Profile)} - {"shared"})


@dataclass(frozen=True)
class Partition:
    """Stage s has blocks starts[s] to starts[s + 1]; the first num_recomputed[s] of its blocks that can be are
    recomputed. times_s: forward and backward of a microbatch on each stage, transfers included; once_s: of the stage
    that takes longest once a step. memory_bytes: of each stage.
    """

    starts: tuple[int, ...]
    num_recomputed: tuple[int, ...]
    times_s: tuple[float, ...]
    once_s: float
    memory_bytes: tuple[float, ...]


def blocks_of(found: Profile, starts: Sequence[int], recomputable: Sequence[int]) -> Blocks:
    """The figures of blocks that begin at the ops numbered `starts` (the first is 0); `recomputable`: numbers of
    blocks.
    """
    sums = {name: np.add.reduceat(getattr(found, name), starts) for name in _SUMMED}
    numbers = (
        np.searchsorted(starts, [position for one in found.shared for position in one.positions], side="right") - 1
    )
    shared, first = [], 0
    for one in found.shared:
        readers = tuple(sorted(set(numbers[first : first + len(one.positions)].tolist())))
        shared.append((readers, one.state_bytes, one.once_s))
        first += len(one.positions)
    is_recomputable = np.zeros(len(starts), bool)
    is_recomputable[list(recomputable)] = True
    return Blocks(
        **sums, entering_bytes=found.crossing_bytes[list(starts)], is_recomputable=is_recomputable, shared=tuple(shared)
    )


def partition(
    blocks: Blocks,
    in_flight: Sequence[int],
    limit_bytes: float | Sequence[float],
    *,
    waiting: Sequence[int] | None = None,
    transfer_s_per_byte: float = 0.0,
) -> Partition | None:
    """The stages of which the slowest is fastest, None if no cut fits. in_flight: for each stage, of how many
    microbatches it keeps what is saved; waiting: of how many it keeps what their weights wait with; limit_bytes: of
    each. A stage recomputes as many of its blocks as it must to fit, and no more.
    """
    num_blocks, num_stages = len(blocks.forward_s), len(in_flight)
    limits = np.broadcast_to(limit_bytes, num_stages)
    sums = _Sums.of(blocks, transfer_s_per_byte)
    settings = list(zip(in_flight, waiting or [0] * num_stages, limits.tolist()))
    known = {setting: _spans(sums, *setting) for setting in set(settings)}
    spans = [known[setting] for setting in settings]
    worst = np.full((num_stages + 1, num_blocks + 1), np.inf)
    worst[0, 0] = 0.0
    cut = np.zeros((num_stages + 1, num_blocks + 1), np.int64)
    for stage, (times_s, _, _) in enumerate(spans):
        slowest = np.maximum(worst[stage][:, None], times_s)  # [where the stage starts, where it ends]
        cut[stage + 1], worst[stage + 1] = slowest.argmin(axis=0), slowest.min(axis=0)
    if not np.isfinite(worst[num_stages, num_blocks]):
        return None
    stops = [num_blocks]
    for stage in range(num_stages, 0, -1):
        stops.insert(0, int(cut[stage, stops[0]]))
    times_s, num, used = zip(*([column[a, b] for column in span] for span, (a, b) in zip(spans, pairwise(stops))))
    once_s = max(_total(blocks.once_s, blocks.shared, 2)[a, b] for a, b in pairwise(stops))
    return Partition(
        tuple(stops[:-1]), tuple(map(int, num)), tuple(map(float, times_s)), float(once_s), tuple(map(float, used))
    )


@dataclass(frozen=True, eq=False)
class _Sums:
    """f64[start, stop] each, of a stage of these blocks: seconds a microbatch; forward seconds of what may be
    recomputed; bytes that are there throughout, that a microbatch keeps, until its weights have their gradients too,
    and that recomputing all such blocks frees of these; their number; whether it is empty. inside_bytes: of one block
    while it is recomputed.
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
    def of(cls, blocks: Blocks, transfer_s_per_byte: float) -> "_Sums":
        can, number = blocks.is_recomputable, len(blocks.forward_s)
        times_s = _sum(blocks.forward_s + blocks.backward_s)
        if transfer_s_per_byte:
            sent = np.append(blocks.entering_bytes, 0.0) * transfer_s_per_byte
            times_s = times_s + 2 * sent[None, :]  # values forward, gradients back
        return cls(
            times_s=times_s,
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
    """f64[start, stop]: seconds of a stage of these blocks on a microbatch, infinite where it does not fit; blocks
    recomputed; its bytes.

    Recomputed, a block keeps what enters it; its inside is there once, while its backward runs, or waits for the
    gradients of weights.
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
    """f64[start, stop]: the sum over blocks start to stop."""
    ends = np.concatenate([[0.0], np.cumsum(column)])
    return ends[None, :] - ends[:, None]


def _total(column: np.ndarray, shared: Sequence[tuple], which: int) -> np.ndarray:
    """`_sum`, and what is shared counted once where any of its readers is."""
    total = _sum(column)
    number = len(column)
    for one in shared:
        marks = np.zeros(number)
        marks[list(one[0])] = 1.0
        total = total + np.where(_sum(marks) > 0.5, one[which], 0.0)
    return total
