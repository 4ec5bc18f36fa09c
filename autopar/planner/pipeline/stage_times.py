"""Times and memory of stages, from the costs of their blocks, and the cut by them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from autopar.costmodel.stage_transfer import FREE, RankLink, alone_and_cores
from autopar.planner.pipeline.partition import Blocks, Partition, Spans, cut_at, partition, stage_spans
from autopar.schedule.orders import Schedule, num_in_flight, num_waiting
from autopar.schedule.simulate import Order, StageTimes, ordered, step_s

# The most moves of a block between two stages that make a cut better, and how many stages further on it may go.
_MOST_MOVES, _FURTHEST = 32, 32


Links = Sequence[RankLink]  # of each rank of the pipeline to the next, or one for all
Limits = float | Sequence[float] | np.ndarray  # bytes of a device of any rank of the pipeline, or of each


def as_run(blocks: Blocks, schedule: Schedule) -> Blocks:
    """The costs of the blocks under `schedule`, of each stage on its own devices; with a backward in two parts where it
    has one.
    """
    if blocks.by_group:
        groups = [as_run(own, schedule) for count, own in blocks.by_group for _ in range(count)]
        each = len(groups) // schedule.num_ranks  # devices of a rank of the pipeline
        stages = tuple(groups[schedule.rank_of(stage) * each] for stage in range(schedule.num_stages))
        return replace(as_run(replace(blocks, by_group=()), schedule), of_stage=stages)
    if not schedule.is_halved:
        return blocks
    regathers = blocks.regathering_s.any()
    return replace(
        blocks,
        backward_s=blocks.backward_s + blocks.splitting_s + blocks.regathering_s,
        weight_s=blocks.weight_s + blocks.splitting_s,
        collective_s=blocks.collective_s + blocks.regathering_s,
        is_recomputable=np.zeros_like(blocks.is_recomputable) if regathers else blocks.is_recomputable,
    )


def limits_of_stages(schedule: Schedule, limit_bytes: Limits) -> tuple[float, ...]:
    """The limit of the rank of each stage."""
    limits = np.broadcast_to(limit_bytes, schedule.num_ranks).tolist()
    return tuple(limits[schedule.rank_of(stage)] for stage in range(schedule.num_stages))


def fits_ranks(partition: Partition, schedule: Schedule, limit_bytes: Limits) -> bool:
    """Whether the stages of each rank are within its limit."""
    return bool(np.all(np.array(rank_bytes(partition, schedule)) <= limit_bytes))


def rank_bytes(partition: Partition, schedule: Schedule) -> tuple[float, ...]:
    """Bytes of a device of each rank of the pipeline."""
    return tuple(
        sum(partition.memory_bytes[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks)
    )


@lru_cache(maxsize=2**16)
def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage the most microbatches between their forward and their backward."""
    return tuple(num_in_flight(schedule, stage) for stage in range(schedule.num_stages))


@lru_cache(maxsize=2**16)
def waiting(schedule: Schedule) -> tuple[int, ...]:
    """For each stage the most microbatches whose weight gradients are put off."""
    return tuple(num_waiting(schedule, stage) for stage in range(schedule.num_stages))


@lru_cache(maxsize=2**16)
def _ordered(schedule: Schedule) -> Order:
    return ordered(schedule)


def time_of(blocks: Blocks, partition: Partition, schedule: Schedule, links: Links) -> float:
    """Seconds of a step: the simulated schedule, and the most work once a step of a rank."""
    num, once_s = np.array([partition.num_recomputed]), np.array([partition.once_s])
    times_s = _times_of(blocks, _ends(blocks, partition), num, schedule, links) + _most_of_rank(once_s, schedule)
    return float(times_s[0])


def stage_times(blocks: Blocks, partition: Partition, links: Links) -> tuple[StageTimes, ...]:
    """The times of each stage for a microbatch."""
    times = _stage_times(blocks, _ends(blocks, partition), np.array([partition.num_recomputed]), links)[..., 0]
    return tuple(StageTimes(*own) for own in times.tolist())


def recut(blocks: Blocks, found: Partition, schedule: Schedule, links: Links, limit_bytes: Limits) -> Partition:
    """The cut `found`, changed by moves of a block from one stage to another as long as that shortens the simulated
    step and each rank stays within its limit.

    The cut with the fastest slowest stage may leave one rank with more work than others, and does not know which stages
    wait. Stages that recompute keep their shares of their rank's memory.
    """
    if schedule.num_stages == 1:
        return found
    spans = stage_spans(blocks, in_flight(schedule), _limits(found, schedule, limit_bytes), waiting(schedule))

    def seconds(cuts: np.ndarray) -> np.ndarray:
        num, used, once_s = (_at(spans, cuts, name) for name in ("num", "bytes", "once_s"))
        within = (_of_ranks(used, schedule) <= np.asarray(limit_bytes)).all(axis=1)
        fits = np.isfinite(_at(spans, cuts, "times_s")).all(axis=1) & within
        step = _times_of(blocks, cuts, num, schedule, links) + _most_of_rank(once_s, schedule)
        return np.where(fits, step, np.inf)

    ends = _ends(blocks, found)
    least_s = time_of(blocks, found, schedule, links)
    for _ in range(_MOST_MOVES):
        moved = _moved(ends[0])
        if not len(moved):
            break
        times_s = seconds(moved)
        if times_s.min() >= least_s * (1 - 1e-9):
            break
        least_s, ends = times_s.min(), moved[[times_s.argmin()]]
    return found if tuple(ends[0, :-1]) == found.starts else cut_at(spans, ends[0].tolist())


def with_all_memory(blocks: Blocks, found: Partition, schedule: Schedule, limit_bytes: Limits) -> Partition:
    """The cut `found` with as few blocks recomputed as the memory allows that its ranks have left.

    Stages of a rank that share its limit leave some of it, each less than a block; together it is enough for blocks of
    those with the fewest microbatches in flight, which keep least.
    """
    kept, waits, ends = in_flight(schedule), waiting(schedule), (*found.starts, len(blocks.forward_s))
    num, times_s, used = list(found.num_recomputed), list(found.times_s), list(found.memory_bytes)
    for rank, left in enumerate(np.asarray(limit_bytes) - np.array(rank_bytes(found, schedule))):
        for stage in sorted(schedule.stages_of(rank), key=lambda one: kept[one] - waits[one]):
            own, span = blocks.of_stage[stage] if blocks.of_stage else blocks, slice(ends[stage], ends[stage + 1])
            can = own.is_recomputable[span]
            if not num[stage] or not can.any():
                continue
            freed = (own.saved_bytes - own.entering_bytes)[span][can].mean() * (kept[stage] - waits[stage])
            inside = 0.0 if waits[stage] else own.saved_bytes[own.is_recomputable].max()
            more = num[stage] if num[stage] * freed - inside <= left else min(num[stage], int(left // freed))
            added = more * freed - (inside if more == num[stage] else 0.0)
            if more and added <= left:
                num[stage], used[stage], left = num[stage] - more, used[stage] + added, left - added
                times_s[stage] -= more * own.forward_s[span][can].mean()
    return replace(found, num_recomputed=tuple(num), times_s=tuple(times_s), memory_bytes=tuple(map(float, used)))


def _moved(ends: np.ndarray) -> np.ndarray:
    """i64[cuts, stages + 1]: the cuts with a block less on one stage and one more on another, no stage without any."""
    num_stages = len(ends) - 1
    shifts = [
        np.where((np.arange(num_stages + 1) > low) & (np.arange(num_stages + 1) <= high), by, 0)
        for low in range(num_stages)
        for high in range(low + 1, min(low + 1 + _FURTHEST, num_stages))
        for by in (-1, 1)
    ]
    cuts = ends + np.array(shifts, dtype=np.int64).reshape(-1, num_stages + 1)
    return cuts[(np.diff(cuts, axis=1) > 0).all(axis=1)]


def shared_limits(stages: Partition, schedule: Schedule, limit_bytes: Limits) -> tuple[float, ...]:
    """The limit of each stage if the stages of a rank share its limit in proportion to their memory in `stages`."""
    most, limits = rank_bytes(stages, schedule), limits_of_stages(schedule, limit_bytes)
    return tuple(
        limit if math.isinf(limit) else limit * size / most[schedule.rank_of(stage)]
        for stage, (limit, size) in enumerate(zip(limits, stages.memory_bytes, strict=True))
    )


def _limits(found: Partition, schedule: Schedule, limit_bytes: Limits) -> tuple[float, ...]:
    """The limit of each stage: that of its rank where nothing is recomputed, else its share."""
    if not any(found.num_recomputed) or schedule.num_stages == schedule.num_ranks:
        return limits_of_stages(schedule, limit_bytes)
    return shared_limits(found, schedule, limit_bytes)


def _ends(blocks: Blocks, partition: Partition) -> np.ndarray:
    """i64[1, stages + 1]: where each stage starts, and the number of blocks."""
    return np.array([[*partition.starts, len(blocks.forward_s)]])


def _at(spans: Sequence[Spans], cuts: np.ndarray, name: str) -> np.ndarray:
    """f64[cuts, stages]: a column of the spans of each stage of each cut."""
    return np.stack([getattr(one, name)[cuts[:, stage], cuts[:, stage + 1]] for stage, one in enumerate(spans)], axis=1)


def _most_of_rank(of_stage: np.ndarray, schedule: Schedule) -> np.ndarray:
    """f64[cuts]: the largest sum over the stages of a rank, from f64[cuts, stages]."""
    return _of_ranks(of_stage, schedule).max(axis=1)


def _of_ranks(of_stage: np.ndarray, schedule: Schedule) -> np.ndarray:
    """f64[cuts, ranks]: the sums over the stages of each rank, from f64[cuts, stages]."""
    return of_stage.reshape(len(of_stage), -1, schedule.num_ranks).sum(axis=1)


def _times_of(blocks: Blocks, cuts: np.ndarray, num: np.ndarray, schedule: Schedule, links: Links) -> np.ndarray:
    """f64[cuts]: seconds of the simulated schedule."""
    times = _stage_times(blocks, cuts, num, links)
    if schedule.num_stages == 1:
        return schedule.num_microbatches * times[0, :3].sum(axis=0)
    return step_s(_ordered(schedule), times)


def _stage_times(blocks: Blocks, cuts: np.ndarray, num: np.ndarray, links: Links) -> np.ndarray:
    """f64[stages, 7, cuts]: the times of each stage, as in `StageTimes`, which recomputes `num`[cut, stage] blocks."""
    if blocks.of_stage:
        each = [_stage_times(own, cuts, num, links)[stage : stage + 1] for stage, own in enumerate(blocks.of_stage)]
        return np.concatenate(each)
    starts, stops, last = cuts[:, :-1], cuts[:, 1:], len(blocks.forward_s)
    can = np.where(blocks.is_recomputable, blocks.forward_s, 0.0)

    def total(column: np.ndarray) -> np.ndarray:
        ends = np.concatenate([[0.0], np.cumsum(column)])
        return ends[stops] - ends[starts]

    weight_s, again_s = total(blocks.weight_s), total(can) * num / np.maximum(1, total(blocks.is_recomputable))
    ahead = np.resize(links, (cuts.shape[1] - 1, 5))  # stages go round the ranks
    sent_bytes, forward_s = np.append(blocks.entering_bytes, 0.0), total(blocks.forward_s)
    backward_s = total(blocks.backward_s) + again_s
    columns = (
        forward_s,
        backward_s - weight_s,
        weight_s,
        np.where(stops < last, _sends_s(ahead, sent_bytes[stops]), 0.0),
        np.where(starts > 0, _sends_s(np.roll(ahead, 1, axis=0), sent_bytes[starts]), 0.0),
        *alone_and_cores(forward_s + backward_s, total(blocks.collective_s), *ahead.T[3:]),
    )
    return np.stack(columns).transpose(2, 0, 1)


def _sends_s(links: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """f64[cuts, stages]: `RankLink.send_s` over the link of each stage."""
    latency_s, rate, least_s = links.T[:3]
    return np.maximum(least_s, latency_s + num_bytes / rate)


def cut_within(blocks: Blocks, schedule: Schedule, limit_bytes: Limits) -> Partition | None:
    """The cut with the fastest slowest stage, with the stages of each rank within the limit; None if there is none.

    It is the cut without a limit if that fits. Otherwise each stage gets an even share of its rank's memory, or the
    share that it has without a limit, and then what the others of its rank leave.
    """

    def cut(limits: float | Sequence[float]) -> Partition | None:
        return partition(blocks, in_flight(schedule), limits, waiting=waiting(schedule))

    own = limits_of_stages(schedule, limit_bytes)
    if schedule.num_stages == schedule.num_ranks:
        return cut(own)
    free = cut(math.inf)
    if free is None or fits_ranks(free, schedule, limit_bytes):
        return free
    even = [limit * schedule.num_ranks / schedule.num_stages for limit in own]
    shared = cut(even), cut(shared_limits(free, schedule, limit_bytes))
    filled = (with_all_memory(blocks, one, schedule, limit_bytes) for one in shared if one is not None)
    return min(filled, key=lambda one: _most_of_rank_s(one, schedule), default=None)


def _most_of_rank_s(cut: Partition, schedule: Schedule) -> float:
    return max(sum(cut.times_s[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks))


def busy_s(blocks: Blocks, stages: Partition, schedule: Schedule) -> float:
    """Seconds of compute of the busiest rank."""
    times = stage_times(blocks, stages, [FREE])
    ranks = ([times[stage] for stage in schedule.stages_of(rank)] for rank in range(schedule.num_ranks))
    return schedule.num_microbatches * max(
        sum(one.forward_s + one.backward_s + one.weight_s for one in own) for own in ranks
    )
