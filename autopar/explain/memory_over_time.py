"""The predicted memory of each rank of a pipeline over a step, by kind."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.schedule.timeline import Span

# Microbatches that are added to those in flight in a stage when an action of the kind begins, and when it ends.
_BEGUN, _DONE = {"F": 1}, {"B": -1, "W": -1}
# The same for microbatches whose gradients of weights are still to be computed.
_WAITS, _MADE = {"I": 1}, {"W": -1}


class Moment(NamedTuple):
    """The memory of a device from `start_s` on; `in_flight`: microbatches in flight of all the rank's stages."""

    start_s: float
    in_flight: int
    bytes_by_kind: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_kind.values())


@dataclass
class _StageMemory:
    """The state of one stage during the step."""

    plan: Plan
    in_flight: int = 0
    waiting: int = 0
    has_gradients: bool = False
    runs_backward: bool = False

    def moved(self, span: Span, *, is_begun: bool) -> None:
        kind = span.action.kind
        self.in_flight += (_BEGUN if is_begun else _DONE).get(kind, 0)
        self.waiting += (_WAITS if is_begun else _MADE).get(kind, 0)
        if kind != "F":
            self.has_gradients, self.runs_backward = True, is_begun

    def bytes_by_kind(self) -> dict[str, int]:
        """Kind -> bytes now.

        Activations are those of the microbatches in flight; gradients exist from the first backward on; the inside of a
        recomputed region and the largest transient exist while a backward runs, the former also for microbatches whose
        weight gradients are put off.
        """
        memory, training = dict(self.plan.costs.memory_bytes), self.plan.training
        memory["activations"] = memory["activations"] // training.num_in_flight * self.in_flight
        if not self.has_gradients:
            memory["gradients"] = 0
        for kind in {"recomputed", "waiting"} & memory.keys():
            if training.num_waiting:
                memory[kind] = memory[kind] // training.num_waiting * self.waiting
            elif not self.runs_backward:
                memory[kind] = 0
        if "transient" in memory and not self.runs_backward:
            memory["transient"] = 0
        return memory


def memory_over_time(plan: StagedPlan, rank: int) -> tuple[Moment, ...]:
    """A moment for each change of the rank's memory, from the first forward on; work once a step has none.

    No moment exceeds `plan.memory_bytes[rank]`, the sum of the largest memory of each stage of the rank.
    """
    stages = {number: _StageMemory(plan.stages[number]) for number in plan.schedule.stages_of(rank)}
    moments = [_moment(0.0, stages)]
    for time_s, span, is_begun in _changes(plan.timeline.rows[rank]):
        stages[span.action.stage].moved(span, is_begun=is_begun)
        moments.append(_moment(time_s, stages))
    return tuple(moments)


def _changes(row: tuple[Span, ...]) -> Iterator[tuple[float, Span, bool]]:
    for span in row:
        yield span.start_s, span, True
        yield span.end_s, span, False


def _moment(start_s: float, stages: Mapping[int, _StageMemory]) -> Moment:
    total: dict[str, int] = {}
    for stage in stages.values():
        for kind, size in stage.bytes_by_kind().items():
            total[kind] = total.get(kind, 0) + size
    return Moment(start_s, sum(stage.in_flight for stage in stages.values()), total)
