"""Cuts into stages against every cut there is."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.costmodel.stage_transfer import FREE, RankLink
from autopar.planner.pipeline.partition import Blocks, cut_at, partition, stage_spans
from autopar.planner.pipeline.stage_times import (
    in_flight,
    rank_bytes,
    recut,
    stage_times,
    time_of,
    waiting,
    with_all_memory,
)
from autopar.schedule.orders import Schedule
from autopar.schedule.simulate import simulate


def _random_blocks(rng: np.random.Generator, number: int) -> Blocks:
    forward_s = rng.uniform(1, 2) * np.ones(number)
    forward_s[[0, -1]] = rng.uniform(0.1, 3, 2)
    saved, entering = np.full(number, rng.uniform(5, 10)), np.full(number, 1.0)
    can = np.ones(number, bool)
    can[[0, -1]] = False
    shared = (((0, number - 1), 4.0, 0.5),)
    once, state, waiting, none = (np.full(number, x) for x in (0.1, 3.0, 0.7, 0.0))
    collective = rng.uniform(0, 1, number)
    return Blocks(
        forward_s, 2 * forward_s, forward_s, none, none, collective, once, state, saved, waiting, entering, can, shared
    )


def _stage(blocks: Blocks, a: int, b: int, kept: int, limit: float, waits: int = 0) -> float:
    """Seconds of a stage with as few blocks recomputed as fit, one after the other; infinite if all are not enough."""
    state = blocks.state_bytes[a:b].sum() + sum(
        size for readers, size, _ in blocks.shared if any(a <= i < b for i in readers)
    )
    time_s = (blocks.forward_s + blocks.backward_s)[a:b].sum()
    can = [i for i in range(a, b) if blocks.is_recomputable[i]]
    state += waits * blocks.waiting_bytes[a:b].sum()
    for num in range(len(can) + 1):
        # the inside of one while its backward runs, or of all that wait for the gradients of weights
        inside = waits * sum(blocks.saved_bytes[i] - blocks.entering_bytes[i] for i in can[:num])
        inside = blocks.saved_bytes[1] if num and not waits else inside
        saved = sum(blocks.entering_bytes[i] if i in can[:num] else blocks.saved_bytes[i] for i in range(a, b))
        if state + kept * saved + inside <= limit + 1e-9:
            return time_s + sum(blocks.forward_s[i] for i in can[:num])
    return math.inf


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("limit", [60.0, 100.0, math.inf])
@pytest.mark.parametrize(("in_flight", "waiting"), [((3, 2, 1), (0, 0, 0)), ((3, 3, 3), (0, 1, 2))])
def test_equals_brute_force(seed: int, limit: float, in_flight: tuple[int, ...], waiting: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    blocks = _random_blocks(rng, 9)
    blocks.saved_bytes[[0, -1]] = 0.5
    best = math.inf
    for cuts in itertools.combinations(range(1, 9), 2):
        ends = (0, *cuts, 9)
        times = [
            _stage(blocks, a, b, kept, limit, waits) for a, b, kept, waits in zip(ends, ends[1:], in_flight, waiting)
        ]
        best = min(best, max(times))
    found = partition(blocks, in_flight, limit, waiting=waiting)
    if found is None:
        assert best == math.inf
        return
    ends = (*found.starts, 9)
    times = [_stage(blocks, a, b, kept, limit, waits) for a, b, kept, waits in zip(ends, ends[1:], in_flight, waiting)]
    assert math.isclose(max(found.times_s), best, rel_tol=1e-9)
    assert max(times) <= best * (1 + 1e-9)


def test_what_weights_wait_with_takes_memory() -> None:
    blocks = _random_blocks(np.random.default_rng(0), 9)
    ample, waiting = partition(blocks, (3, 2, 1), math.inf), partition(blocks, (3, 2, 1), math.inf, waiting=(0, 1, 2))
    ends = (*ample.starts, 9)
    more = [a - b for a, b in zip(waiting.memory_bytes, ample.memory_bytes)]
    assert more == pytest.approx([num * 0.7 * (b - a) for num, a, b in zip((0, 1, 2), ends, ends[1:])])


def test_no_cut_fits() -> None:
    assert partition(_random_blocks(np.random.default_rng(0), 9), (3, 2, 1), 5.0) is None


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("limit", [60.0, 150.0, math.inf])
@pytest.mark.parametrize("seed", range(4))
def test_moved_blocks_shorten_the_step_within_the_limit(name: str, limit: float, seed: int) -> None:
    blocks = _random_blocks(np.random.default_rng(seed), 9)
    schedule = Schedule("interleaved", 4, 2, 4) if name == "interleaved" else Schedule(name, 3, 3, 6)
    link = [RankLink(0.1, 10.0, 0.15, 1.5, 1.5 / schedule.num_ranks)]
    if name == "zero-bubble":
        blocks = replace(blocks, is_recomputable=np.zeros(9, bool))
    limits = limit * schedule.num_ranks / schedule.num_stages
    found = partition(blocks, in_flight(schedule), limits, waiting=waiting(schedule))
    if found is None:
        return
    better = recut(blocks, found, schedule, link, limit)
    step_s = time_of(blocks, better, schedule, link)
    assert max(rank_bytes(better, schedule)) <= limit
    assert step_s <= time_of(blocks, found, schedule, link)
    # the simulation of its stages, one by one
    simulated = simulate(schedule, stage_times(blocks, better, link)).step_s
    once = [sum(better.once_s[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks)]
    assert step_s == pytest.approx(simulated + max(once))
    if math.isinf(limit):
        best = math.inf
        for cuts in itertools.combinations(range(1, 9), schedule.num_stages - 1):
            spans = stage_spans(blocks, in_flight(schedule), math.inf, waiting(schedule))
            best = min(best, time_of(blocks, cut_at(spans, (0, *cuts, 9)), schedule, link))
        assert step_s <= best * 1.05


def test_ranks_with_several_stages_have_equally_many_blocks() -> None:
    blocks = _random_blocks(np.random.default_rng(0), 20)
    even = replace(blocks, **{name: np.ones(20) for name in ("forward_s", "backward_s", "weight_s")}, shared=())
    schedule = Schedule("interleaved", 8, 2, 8)
    found = partition(even, in_flight(schedule), math.inf)
    better = recut(even, found, schedule, [FREE], math.inf)
    counts = np.diff([*better.starts, 20])
    assert [counts[rank::2].sum() for rank in range(2)] == [10, 10]


def _stage_bytes(blocks: Blocks, a: int, b: int, kept: int, num: int) -> float:
    can = [i for i in range(a, b) if blocks.is_recomputable[i]][:num]
    saved = sum(blocks.entering_bytes[i] if i in can else blocks.saved_bytes[i] for i in range(a, b))
    return float(blocks.state_bytes[a:b].sum() + kept * saved + (blocks.saved_bytes[1] if num else 0.0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [250.0, 320.0, 400.0, 520.0])
def test_stages_of_a_rank_recompute_as_few_blocks_as_its_memory_allows(seed: int, limit: float) -> None:
    """Against all numbers of blocks that the stages of a rank may recompute."""
    blocks, schedule = _random_blocks(np.random.default_rng(seed), 18), Schedule("interleaved", 6, 2, 8)
    blocks = replace(blocks, shared=())
    kept, found = in_flight(schedule), partition(blocks, in_flight(schedule), limit / 3)
    if found is None:
        return
    better, ends = with_all_memory(blocks, found, schedule, limit), (*found.starts, 18)
    spans = list(zip(ends, ends[1:], kept))
    assert better.starts == found.starts
    assert better.memory_bytes == pytest.approx(
        [_stage_bytes(blocks, *span, num) for span, num in zip(spans, better.num_recomputed)]
    )
    assert better.times_s == pytest.approx(
        [
            (blocks.forward_s + blocks.backward_s)[a:b].sum() + num * blocks.forward_s[1]
            for (a, b, _), num in zip(spans, better.num_recomputed)
        ]
    )
    for rank, used in enumerate(rank_bytes(better, schedule)):
        own = schedule.stages_of(rank)
        fewest = min(
            sum(nums)
            for nums in itertools.product(*(range(found.num_recomputed[stage] + 1) for stage in own))
            if sum(_stage_bytes(blocks, *spans[stage], num) for stage, num in zip(own, nums)) <= limit
        )
        assert used <= limit
        assert sum(better.num_recomputed[stage] for stage in own) == fewest


def test_stages_of_one_block_each_stay() -> None:
    blocks, schedule = _random_blocks(np.random.default_rng(0), 3), Schedule("1f1b", 3, 3, 6)
    found = partition(blocks, in_flight(schedule), math.inf, waiting=waiting(schedule))
    assert recut(blocks, found, schedule, [FREE], math.inf) is found
