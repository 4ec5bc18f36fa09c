"""The pool of ranks itself: results, failures, hangs and deaths."""

import ctypes
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests import workers
from tests.workers import RankError, device_mesh

pytestmark = pytest.mark.multirank


def axis_sum(shape: tuple[int, ...], axis: int) -> int:
    mesh = device_mesh(shape, ("dp", "tp"))
    x = torch.tensor(dist.get_rank())
    dist.all_reduce(x, group=mesh.get_group(axis))
    return int(x)


def pid() -> int:
    return os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")


def fail_while_others_wait(rank: int) -> None:
    fail_on(rank)
    dist.all_reduce(torch.zeros(1))


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def crash() -> None:
    ctypes.string_at(0)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def test_results_come_in_rank_order_and_meshes_are_reused(ranks4):
    assert ranks4.run(axis_sum, (2, 2), 0) == [2, 4, 2, 4]
    assert ranks4.run(axis_sum, (2, 2), 1) == [1, 1, 5, 5]


def test_a_failing_rank_gives_its_traceback_and_the_ranks_live_on(ranks4):
    before = ranks4.run(pid)
    with pytest.raises(RankError, match=r"rank 2:(.|\n)*no luck on 2"):
        ranks4.run(fail_on, 2)
    assert ranks4.run(pid) == before


@pytest.mark.parametrize("function", [fail_while_others_wait, die_on])
def test_a_rank_lost_amid_a_collective_costs_no_more_than_a_restart(ranks4, function):
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1"):
        ranks4.run(function, 1)
    assert ranks4.run(axis_sum, (2, 2), 1) == [1, 1, 5, 5]
    assert time.monotonic() - start < 30


def test_a_crash_is_told_with_its_signal_and_place(ranks4):
    with pytest.raises(RankError, match=r"the process died \(SIGSEGV\)(.|\n)*string_at"):
        ranks4.run(crash)


def test_ranks_that_have_had_many_calls_are_replaced(ranks4, monkeypatch):
    before = ranks4.run(pid)
    monkeypatch.setattr(workers, "MOST_CALLS", 1)
    ranks4.replace_old()
    assert not set(before) & set(ranks4.run(pid))


def test_a_hang_is_reported(ranks4):
    with pytest.raises(RankError, match=r"ranks \[0, 1, 2, 3\] did not answer"):
        ranks4.run(sleep, 60.0, timeout_s=0.5)
