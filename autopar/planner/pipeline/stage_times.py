"""Times and memory of stages, from the costs of their blocks."""

from functools import lru_cache
from itertools import pairwise

from autopar.planner.pipeline.partition import Blocks, Partition
from autopar.schedule.orders import Schedule, num_in_flight, num_waiting
from autopar.schedule.simulate import Order, StageTimes, as_array, ordered, step_s


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


def time_of(blocks: Blocks, partition: Partition, schedule: Schedule, link: tuple[float, float]) -> float:
    """Seconds of a step: the simulated schedule, and the slowest rank's work once a step."""
    times = stage_times(blocks, partition, link)
    if schedule.num_stages == 1:
        return (
            schedule.num_microbatches * (times[0].forward_s + times[0].backward_s + times[0].weight_s)
            + partition.once_s
        )
    return (
        float(step_s(_ordered(schedule), as_array(times))) + partition.once_s * schedule.num_stages / schedule.num_ranks
    )


def stage_times(blocks: Blocks, partition: Partition, link: tuple[float, float]) -> tuple[StageTimes, ...]:
    """The times of each stage for a microbatch; `link`: (latency in seconds, bytes/s) to the next stage."""
    stops = (*partition.starts, len(blocks.forward_s))
    times = []
    for (a, b), again in zip(pairwise(stops), partition.num_recomputed):
        can = blocks.is_recomputable[a:b]
        forward_s, weight_s = blocks.forward_s[a:b].sum(), blocks.weight_s[a:b].sum()
        again_s = blocks.forward_s[a:b][can].sum() * again / max(1, can.sum())
        sent_s = link[0] + blocks.entering_bytes[b] / link[1] if b < len(blocks.forward_s) else 0.0
        back_s = link[0] + blocks.entering_bytes[a] / link[1] if a else 0.0
        times.append(StageTimes(forward_s, blocks.backward_s[a:b].sum() - weight_s + again_s, weight_s, sent_s, back_s))
    return tuple(times)
