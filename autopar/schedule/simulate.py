"""Simulation of a pipeline's step from the times of its stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import networkx as nx
import numpy as np

from autopar.schedule.orders import IN_ROUNDS, Row, Schedule, actions
from autopar.schedule.timeline import Action, Span, Timeline

KINDS = "FBIW"


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage for one microbatch.

    `backward_s`: the part of backward for the inputs, `weight_s`: the part for the weights; a backward that is not
    split takes both. `send_s`: p2p of the outputs to the next stage; `send_back_s`: p2p of the inputs' gradients to the
    previous stage.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    send_s: float = 0.0
    send_back_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Order:
    """A schedule's actions as arrays, in waves: both predecessors of an action are in earlier waves.

    So numpy computes a wave at once. Row `i` of the arrays is an action; its predecessors are given by their rows,
    `len(actions)` if it has none.
    """

    schedule: Schedule
    actions: Row
    waves: tuple[slice, ...]
    before: np.ndarray  # the previous action on the same rank
    source: np.ndarray  # the action whose result this one reads
    kind: np.ndarray  # column of the durations and transfers


def generations(schedule: Schedule) -> list[list[Action]]:
    """The actions of all ranks in topological generations, at most one action of a rank in each.

    The predecessors of an action, the previous one on its rank and the one whose result it reads, are in earlier
    generations.
    """
    rows, graph = actions(schedule), nx.DiGraph()
    for row in rows:
        nx.add_path(graph, row)
    graph.add_edges_from(
        (source, action) for row in rows for action in row if (source := _source(schedule, action)) is not None
    )
    return [
        sorted(found, key=lambda action: schedule.rank_of(action.stage)) for found in nx.topological_generations(graph)
    ]


def ordered(schedule: Schedule) -> Order:
    """The `Order` of `schedule`, which can be simulated with any times."""
    waves = generations(schedule)
    flat = tuple(chain.from_iterable(waves))
    before = {action: previous for row in actions(schedule) for previous, action in zip((None, *row), row)}
    index = {action: i for i, action in enumerate(flat)} | {None: len(flat)}
    bounds = accumulate(map(len, waves), initial=0)
    return Order(
        schedule,
        flat,
        tuple(slice(start, stop) for start, stop in pairwise(bounds)),
        np.array([index[before[action]] for action in flat]),
        np.array([index[_source(schedule, action)] for action in flat]),
        np.array([KINDS.index(action.kind) for action in flat]),
    )


def _source(schedule: Schedule, action: Action) -> Action | None:
    """The action, possibly of another rank, whose result `action` reads; None if its rank's order implies it anyway."""
    kind, stage, microbatch = action
    if kind == "W" or (kind == "F" and stage == 0) or (kind != "F" and stage == schedule.num_stages - 1):
        return None
    return Action(kind, stage - 1 if kind == "F" else stage + 1, microbatch)


def ends(order: Order, times: np.ndarray, *, is_early: bool | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from the step's start at which each action starts and ends; `times` is [stages, 5, ...], columns as in
    `StageTimes`.

    Further dims are simulated side by side: many sets of times cost little more than one. `is_early`: whether a rank
    posts a receive before it needs it, so that transfers run beside its computing; by default as this runtime does.
    """
    durations, transfers = _durations(order.schedule, times)
    stage = np.array([action.stage for action in order.actions])
    duration, transfer = durations[stage, order.kind], transfers[stage, order.kind]
    start, end = np.empty_like(duration), np.zeros((len(duration) + 1, *duration.shape[1:]))
    is_early = order.schedule.name in IN_ROUNDS if is_early is None else is_early
    for wave in order.waves:
        free, made = end[order.before[wave]], end[order.source[wave]]
        # torch posts the receives of the schedules in rounds when the sender sends; those of the others when they are
        # needed, so that the rank waits for the whole transfer.
        ready = np.maximum(free, made + transfer[wave]) if is_early else np.maximum(free, made) + transfer[wave]
        start[wave] = ready
        end[wave] = ready + duration[wave]
    return start, end[:-1]


def _durations(schedule: Schedule, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each kind of action of each stage, and of the transfer of its input, both [stages, kinds, ...]."""
    forward, backward, weight, send, send_back = np.moveaxis(times, 1, 0)
    durations = np.stack([forward, backward + weight, backward, weight], axis=1)
    # The first stage has no input to differentiate: torch does all of its backward in "W".
    durations[0, 2:] = np.stack([np.zeros_like(backward[0]), backward[0] + weight[0]])
    arriving, returning, nothing = np.zeros_like(send), np.zeros_like(send), np.zeros_like(send)
    arriving[1:], returning[:-1] = send[:-1], send_back[1:]
    for stage in range(1, schedule.num_stages):
        if schedule.rank_of(stage) == schedule.rank_of(stage - 1):
            arriving[stage] = returning[stage - 1] = 0
    return durations, np.stack([arriving, returning, returning, nothing], axis=1)


def step_s(order: Order, times: np.ndarray) -> np.ndarray:
    """Seconds of a step for each set of times; `times` as in `ends`."""
    return ends(order, times)[1].max(axis=0)


def simulate(schedule: Schedule, times: Sequence[StageTimes], *, is_early: bool | None = None) -> Timeline:
    """The timeline of a step in which every microbatch takes each stage's `times`, one for each stage.

    `is_early`: as in `ends`.
    """
    order = ordered(schedule)
    start, end = ends(order, as_array(times), is_early=is_early)
    rows: list[list[Span]] = [[] for _ in range(schedule.num_ranks)]
    for action, begin, finish in zip(order.actions, start.tolist(), end.tolist()):
        rows[schedule.rank_of(action.stage)].append(Span(action, begin, finish))
    return Timeline(tuple(map(tuple, rows)))


def as_array(times: Sequence[StageTimes]) -> np.ndarray:
    """The fields of `times` as f64[stages, 5], in seconds."""
    return np.array([[x.forward_s, x.backward_s, x.weight_s, x.send_s, x.send_back_s] for x in times])
