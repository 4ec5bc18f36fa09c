"""Pipeline schedules: the order in which each rank computes its stages' microbatches.

The orders are those of torch.distributed.pipelining, which runs them:
  1f1b          PipeDream-flush (Narayanan et al. 2021, arXiv:2104.04473): one stage a rank
  interleaved   the same paper: the schedule of several stages a rank, stage i on rank i mod p, in torch's rounds
  zero-bubble   ZB1P (Qi et al. 2024, arXiv:2401.10241): weight gradients ("W") fill what would be bubbles
  gpipe         all forwards, then all backwards
  accumulate    one stage: gradient accumulation
"""

from dataclasses import dataclass

from autopar.schedule.timeline import Action

NAMES = ("accumulate", "gpipe", "1f1b", "interleaved", "zero-bubble")
IN_ROUNDS = ("interleaved", "zero-bubble")

Row = tuple[Action, ...]  # the actions of one rank, in order


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule called `name`, one of `NAMES`, with its numbers of stages, ranks and microbatches.

    `num_ranks` is the size of the pipeline axis. ValueError if torch has no such schedule.
    """

    name: str
    num_stages: int
    num_ranks: int
    num_microbatches: int

    def __post_init__(self) -> None:
        refusal = _refusal(self.name, self.num_stages, self.num_ranks, self.num_microbatches)
        if refusal:
            raise ValueError(f"{self}: {refusal}")

    def __str__(self) -> str:
        return f"{self.name}, {self.num_stages} stages on {self.num_ranks} ranks, {self.num_microbatches} microbatches"

    @property
    def is_halved(self) -> bool:
        """Whether weights get their gradients later than what a stage receives."""
        return self.name == "zero-bubble"

    def rank_of(self, stage: int) -> int:
        """The rank along the pipeline axis that holds `stage`."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> range:
        """The stages of a rank of the pipeline axis, first to last."""
        return range(rank, self.num_stages, self.num_ranks)


def can_run(name: str, num_stages: int, num_ranks: int, num_microbatches: int) -> bool:
    """Whether schedule `name` runs `num_stages` stages on `num_ranks` ranks with so many microbatches."""
    return not _refusal(name, num_stages, num_ranks, num_microbatches)


def _refusal(name: str, num_stages: int, num_ranks: int, num_microbatches: int) -> str:
    if name not in NAMES:
        return f"expected one of {', '.join(NAMES)}"
    if min(num_stages, num_ranks, num_microbatches) < 1 or num_stages % num_ranks:
        return "expected positive numbers, and the same number of stages on each rank"
    per_rank, num_rounds = num_stages // num_ranks, _num_rounds(num_ranks, num_microbatches)
    if name == "accumulate":
        return "" if num_stages == 1 else "accumulation has one stage"
    if name == "1f1b" and num_microbatches < num_ranks:
        return f"1f1b needs at least {num_ranks} microbatches; gpipe takes fewer"
    if name in ("gpipe", "1f1b"):
        return "" if per_rank == 1 else "it has one stage a rank; interleaved and zero-bubble have several"
    if num_microbatches % num_rounds:
        return f"its {num_rounds} rounds must be equally long; multiples of {num_ranks} microbatches are fine"
    return "interleaved needs several stages a rank" if name == "interleaved" and per_rank == 1 else ""


def _num_rounds(num_ranks: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // num_ranks)


def actions(schedule: Schedule) -> tuple[Row, ...]:
    """The actions of each rank of the pipeline axis, in order.

    Kinds: "F" forward, "B" backward, "I" the part of backward for the inputs, "W" the part for the weights.
    """
    return tuple(_row(schedule, rank) for rank in range(schedule.num_ranks))


def _row(schedule: Schedule, rank: int) -> Row:
    if schedule.name in IN_ROUNDS:
        return _rounds(schedule, rank)
    num_microbatches = schedule.num_microbatches
    ahead = {"gpipe": num_microbatches, "accumulate": 1}.get(
        schedule.name, min(num_microbatches, schedule.num_ranks - rank)
    )
    forward = [Action("F", rank, k) for k in range(num_microbatches)]
    row = forward[:ahead]
    for k in range(num_microbatches):
        row += [Action("B", rank, k), *forward[ahead + k : ahead + k + 1]]
    return tuple(row)


def _rounds(schedule: Schedule, rank: int) -> Row:
    """The row of a schedule in rounds: each stage of the rank in turn runs one round of microbatches.

    The rank does `ahead` forwards before its first backward.
    """
    is_split = schedule.is_halved
    num_microbatches, num_ranks = schedule.num_microbatches, schedule.num_ranks
    size = num_microbatches // _num_rounds(num_ranks, num_microbatches)
    stages = schedule.stages_of(rank)
    starts = range(0, num_microbatches, size)
    forward = [Action("F", stage, start + k) for start in starts for stage in stages for k in range(size)]
    backward = [
        Action("I" if is_split else "B", stage, start + k)
        for start in starts
        for stage in reversed(stages)
        for k in range(size)
    ]
    weights = [action._replace(kind="W") for action in backward] if is_split else []
    ahead = min((len(stages) - 1) * size + (1 if is_split else 2) * (num_ranks - 1 - rank), len(forward))
    row = forward[:ahead]
    for k, action in enumerate(backward):
        row += [*forward[ahead + k : ahead + k + 1], action]
        row += weights[k - rank : k - rank + 1] if k >= rank else []
    return (*row, *weights[max(0, len(backward) - rank) :])


def arriving(schedule: Schedule, rank: int, kind: str) -> list[Action]:
    """The actions of a rank of this kind, one of "FBI", that need what another stage sends, in its order.

    The neighbour sends in the same order.
    """
    first, last = (1, schedule.num_stages) if kind == "F" else (0, schedule.num_stages - 1)
    return [action for action in _row(schedule, rank) if action.kind == kind and first <= action.stage < last]


def receiving_kinds(schedule: Schedule) -> tuple[str, str]:
    """The kinds of the actions that need values of the stage before, and gradients of the one behind."""
    return "F", "I" if schedule.is_halved else "B"


def num_waiting(schedule: Schedule, stage: int) -> int:
    """The most microbatches whose weight gradients `stage` has put off at one time.

    The first stage puts off none: it does all of its backward in "W".
    """
    waiting = most = 0
    for action in _row(schedule, schedule.rank_of(stage)) if stage else ():
        if action.stage == stage:
            waiting += {"I": 1, "W": -1}.get(action.kind, 0)
            most = max(most, waiting)
    return most


def num_in_flight(schedule: Schedule, stage: int) -> int:
    """The most microbatches whose activations `stage` holds at one time."""
    held = most = 0
    for action in _row(schedule, schedule.rank_of(stage)):
        if action.stage == stage:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
    return most
