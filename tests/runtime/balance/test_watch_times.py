"""What the ranks' times say: stragglers that stay get fewer rows, others none."""

import random

import pytest

from autopar.runtime.balance.watch_times import LATER, SOON, TimeWatch


def steps(watch: TimeWatch, speeds: list[float], count: int, noise: float = 0.0) -> list[tuple[int, ...]]:
    """The shares that are advised in `count` steps, taken as advised; `speeds`: seconds a row of each rank."""
    draw, found = random.Random(0), []
    for _ in range(count):
        times = [size * speed * (1 + noise * draw.random()) for size, speed in zip(watch.sizes, speeds)]
        if (advice := watch.take(times)) is not None:
            watch.change(advice.sizes)
            found.append(advice.sizes)
    return found


def test_a_rank_that_stays_slow_has_fewer_rows_within_ten_steps() -> None:
    watch = TimeWatch((16, 16, 16, 16))
    assert steps(watch, [1.0] * 4, 20, noise=0.03) == []
    assert steps(watch, [1.0, 1.0, 2.0, 1.0], 10, noise=0.03)[0] == pytest.approx((18, 18, 10, 18), abs=1)
    assert steps(watch, [1.0] * 4, 10, noise=0.03)[-1] == pytest.approx((16, 16, 16, 16), abs=1)


@pytest.mark.parametrize("slow_steps", [1, 2])
def test_a_transient_straggler_changes_nothing(slow_steps: int) -> None:
    watch = TimeWatch((8, 8))
    steps(watch, [1.0, 1.0], 10)
    assert steps(watch, [1.0, 4.0], slow_steps) == [] == steps(watch, [1.0, 1.0], SOON[0])


def test_what_little_is_left_is_found_in_more_steps() -> None:
    """Two ranks of this machine, of which one is four times slower: work that is the same for any rows keeps the first
    shares, found as if times were in proportion to rows, 6 % above the best ones.
    """
    watch, draw = TimeWatch((32, 32)), random.Random(0)

    def step_s(sizes: tuple[int, ...]) -> tuple[float, ...]:
        return 0.007 + 0.0044 * sizes[0], 0.045 + 0.0173 * sizes[1]

    for _ in range(3 * LATER[0]):
        if (advice := watch.take([x * (1 + 0.03 * draw.random()) for x in step_s(watch.sizes)])) is not None:
            watch.change(advice.sizes)
    least_s = min(max(step_s((64 - slow, slow))) for slow in range(1, 64))
    assert max(step_s(watch.sizes)) <= 1.02 * least_s < max(step_s((52, 12)))


def test_equal_ranks_keep_their_rows_for_long() -> None:
    assert steps(TimeWatch((512,) * 4), [1.0] * 4, 1000, noise=0.06) == []


def test_times_that_do_not_shrink_with_rows_end_in_a_balance() -> None:
    watch, found = TimeWatch((32, 32)), []
    for _ in range(60):
        times = [10 + watch.sizes[0] * 1.0, 20 + watch.sizes[1] * 1.0]
        if (advice := watch.take(times)) is not None:
            watch.change(advice.sizes)
            found.append(advice.sizes)
    assert abs(times[0] - times[1]) / max(times) < 0.1 and 1 <= len(found) <= 4


def test_a_rank_whose_row_takes_longer_than_all_of_the_others_is_better_left_out() -> None:
    watch = TimeWatch((8, 8, 8))
    advices = [watch.take([8.0, 8.0, 8 * 100.0]) for _ in range(SOON[0] + 1)]
    advice = next(one for one in advices if one is not None)
    assert advice.without == (2,) and advice.without_s == 12.0 and advice.step_s == 100.0
    assert advice.sizes[2] == 1 and sum(advice.sizes) == 24


def test_memory_holds_what_it_holds() -> None:
    watch = TimeWatch((8, 8, 8), most_rows=9)
    assert steps(watch, [1.0, 1.0, 4.0], 10)[0] == (9, 9, 6)
