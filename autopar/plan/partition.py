"""Cut consecutive blocks into stages so that the slowest stage is as fast as it can be and each fits its device."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.costmodel.profile import Profile

_SUMMED = ("forward_s", "backward_s", "weight_s", "once_s", "state_bytes", "saved_bytes")


@dataclass(frozen=True, eq=False)
class Blocks:
    """f64[blocks] each, of one microbatch but for once_s and state_bytes, as in `Profile`. entering_bytes: of what is made before a block
    and read in it or later; is_recomputable: bool[blocks]. shared: (blocks that read it, bytes, seconds a step) of tied parameters."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray
    once_s: np.ndarray
    state_bytes: np.ndarray
    saved_bytes: np.ndarray
    entering_bytes: np.ndarray
    is_recomputable: np.ndarray
    shared: tuple[tuple[tuple[int, ...], float, float], ...] = ()


@dataclass(frozen=True)
class Partition:
    """Stage s has blocks starts[s] to starts[s + 1]; the first num_recomputed[s] of its blocks that can be are recomputed. times_s: forward
    and backward of a microbatch on each stage, transfers included; once_s: of the stage that takes longest once a step. memory_bytes: of
    each stage."""

    starts: tuple[int, ...]
    num_recomputed: tuple[int, ...]
    times_s: tuple[float, ...]
    once_s: float
    memory_bytes: tuple[float, ...]


def blocks_of(found: Profile, starts: Sequence[int], recomputable: Sequence[int]) -> Blocks:
    """The figures of blocks that begin at the ops numbered `starts` (the first is 0); `recomputable`: numbers of blocks."""
    sums = {name: np.add.reduceat(getattr(found, name), starts) for name in _SUMMED}
    numbers = np.searchsorted(starts, [position for one in found.shared for position in one.positions], side="right") - 1
    shared, first = [], 0
    for one in found.shared:
        readers = tuple(sorted(set(numbers[first : first + len(one.positions)].tolist())))
        shared.append((readers, one.state_bytes, one.once_s))
        first += len(one.positions)
    is_recomputable = np.zeros(len(starts), bool)
    is_recomputable[list(recomputable)] = True
    return Blocks(**sums, entering_bytes=found.crossing_bytes[list(starts)], is_recomputable=is_recomputable, shared=tuple(shared))


def partition(
    blocks: Blocks, in_flight: Sequence[int], limit_bytes: float | Sequence[float], *, transfer_s_per_byte: float = 0.0
) -> Partition | None:
    """The stages of which the slowest is fastest, None if no cut fits. in_flight: for each stage, of how many microbatches it keeps what is
    saved; limit_bytes: of each. A stage recomputes as many of its blocks as it must to fit, and no more.
    """
    num_blocks, num_stages = len(blocks.forward_s), len(in_flight)
    limits = np.broadcast_to(limit_bytes, num_stages)
    spans = [_spans(blocks, kept, limit, transfer_s_per_byte) for kept, limit in zip(in_flight, limits)]
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
    return Partition(tuple(stops[:-1]), tuple(map(int, num)), tuple(map(float, times_s)), float(once_s), tuple(map(float, used)))


def _spans(blocks: Blocks, kept: int, limit_bytes: float, transfer_s_per_byte: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """f64[start, stop]: seconds of a stage of these blocks on a microbatch, infinite where it does not fit; blocks recomputed; its bytes.

    Recomputed, a block keeps what enters it; its inside is there once, while its backward runs.
    """
    number = len(blocks.forward_s)
    can = blocks.is_recomputable
    freed = np.where(can, blocks.saved_bytes - blocks.entering_bytes, 0.0)
    again_s = np.where(can, blocks.forward_s, 0.0)
    inside = blocks.saved_bytes[can].max(initial=0.0)
    whole = _total(blocks.state_bytes, blocks.shared, 1) + kept * _sum(blocks.saved_bytes)
    need = whole - limit_bytes
    can_free, num_can = _sum(freed), _sum(can.astype(float))
    with np.errstate(divide="ignore", invalid="ignore"):
        num = np.ceil((need + inside) / (kept * can_free) * num_can)
    num = np.where(need <= 0, 0.0, np.where((can_free > 0) & (num <= num_can), num, np.inf))
    fits = np.isfinite(num)
    with np.errstate(invalid="ignore"):
        again = np.where(num > 0, num / np.maximum(num_can, 1) * _sum(again_s), 0.0)
    times_s = _sum(blocks.forward_s + blocks.backward_s) + again
    if transfer_s_per_byte:
        sent = np.append(blocks.entering_bytes, 0.0) * transfer_s_per_byte
        times_s = times_s + 2 * sent[None, :]  # values forward, gradients back
    empty = np.arange(number + 1)[:, None] >= np.arange(number + 1)[None, :]
    num = np.where(np.isfinite(num), num, 0.0)
    used = whole + np.where(num > 0, inside - num / np.maximum(num_can, 1) * kept * can_free, 0.0)
    return np.where(empty | ~fits, np.inf, times_s), num, used


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
