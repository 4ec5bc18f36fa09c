"""The order of a pipeline's computations is torch's, and what follows from it is what the papers say."""

from collections import Counter
from typing import Any

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from autopar.schedule.orders import NAMES, Schedule, actions, can_run, num_in_flight

SHAPES = [(p, v, m) for p in (1, 2, 3, 4, 8) for v in (1, 2, 3) for m in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)]
KINDS = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


def schedules(name: str) -> list[Schedule]:
    """Those of `SHAPES` that there are."""
    return [Schedule(name, p * v, p, m) for p, v, m in SHAPES if can_run(name, p * v, p, m)]


class RecordingStage:
    """Stands in for a PipelineStage: computes and sends nothing, and writes down what it was told to do."""

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = (
            index,
            num_stages,
            num_ranks,
            index % num_ranks,
        )
        self.submod, self.device = None, "cpu"
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.done: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.done.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.done.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []


def torch_order(name: str, num_stages: int, num_ranks: int, num_microbatches: int) -> dict[int, list[str]]:
    """What each rank computes under torch's class of the schedule; ValueError where it takes no such schedule."""
    stages: Any = [RecordingStage(index, num_stages, num_ranks) for index in range(num_stages)]
    # what it runs; what it says, for drawings only, has a wrong microbatch on the last rank
    if name in ("1f1b", "gpipe"):
        for stage in stages:
            KINDS[name](stage, num_microbatches, loss_fn=lambda *_: None)._step_microbatches(
                target_mbs=[None] * num_microbatches
            )
        return {stage.stage_index: stage.done for stage in stages}
    made = KINDS[name](stages[::num_ranks], num_microbatches, loss_fn=lambda *_: None)
    return {rank: [str(a) for a in order if a is not None] for rank, order in made.pipeline_order.items()}


@pytest.mark.parametrize("name", KINDS)
def test_each_rank_computes_what_torch_computes_in_the_same_order(name):
    found = schedules(name)
    assert len(found) > 15
    for schedule in found:
        expected = torch_order(name, schedule.num_stages, schedule.num_ranks, schedule.num_microbatches)
        assert {rank: [str(a) for a in row] for rank, row in enumerate(actions(schedule))} == expected, str(schedule)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero-bubble"])
def test_what_torch_refuses_is_refused(name):
    for p, v, m in SHAPES:
        if name == "1f1b" and v > 1:
            continue
        try:
            torch_order(name, p * v, p, m)
        except ValueError:
            assert not can_run(name, p * v, p, m), (p, v, m)
            with pytest.raises(ValueError, match=f"{name}, {p * v} stages on {p} ranks"):
                Schedule(name, p * v, p, m)


def test_accumulation_does_one_microbatch_after_the_other():
    (row,) = actions(Schedule("accumulate", 1, 1, 3))
    assert [str(a) for a in row] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_computed_once_and_where_its_stage_is(name):
    for schedule in schedules(name):
        found = Counter()
        for rank, row in enumerate(actions(schedule)):
            assert all(
                action.stage in schedule.stages_of(rank) and schedule.rank_of(action.stage) == rank for action in row
            )
            found.update(row)
        kinds = "FIW" if name == "zero-bubble" else "FB"
        assert len(found) == len(kinds) * schedule.num_stages * schedule.num_microbatches
        assert set(found.values()) == {1} and {action.kind for action in found} == set(kinds)


@pytest.mark.parametrize("name", NAMES)
def test_in_flight_is_what_the_actions_hold(name):
    for schedule in schedules(name):
        for rank, row in enumerate(actions(schedule)):
            for stage in schedule.stages_of(rank):
                begun = [
                    {a.microbatch for a in row[: i + 1] if a.stage == stage and a.kind == "F"} for i in range(len(row))
                ]
                over = [{a.microbatch for a in row[:i] if a.stage == stage and a.kind in "BW"} for i in range(len(row))]
                assert num_in_flight(schedule, stage) == max(len(x - y) for x, y in zip(begun, over)), (
                    str(schedule),
                    stage,
                )


def test_in_flight_of_the_papers():
    assert [num_in_flight(Schedule("gpipe", 4, 4, 8), stage) for stage in range(4)] == [8] * 4
    assert [num_in_flight(Schedule("1f1b", 4, 4, 8), stage) for stage in range(4)] == [4, 3, 2, 1]
    # ZB-H1 holds on every rank what 1f1b holds on the first.
    assert [num_in_flight(Schedule("zero-bubble", 4, 4, 8), stage) for stage in range(4)] == [4] * 4


@pytest.mark.parametrize(
    "wrong, match",
    [
        (("1F1B", 2, 2, 4), "expected one of accumulate, gpipe"),
        (("1f1b", 3, 2, 4), "the same number of stages on each rank"),
        (("1f1b", 4, 2, 4), "one stage a rank"),
        (("1f1b", 4, 4, 3), "at least 4 microbatches"),
        (("interleaved", 2, 2, 4), "several stages a rank"),
        (("interleaved", 8, 4, 10 + 1), "multiples of 4"),
        (("accumulate", 2, 1, 4), "one stage"),
        (("gpipe", 2, 2, 0), "positive"),
    ],
)
def test_schedules_that_cannot_be(wrong, match):
    with pytest.raises(ValueError, match=match):
        Schedule(*wrong)
    assert not can_run(*wrong)
