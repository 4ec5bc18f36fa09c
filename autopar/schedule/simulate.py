"""Simulation of a pipeline's step from the times of its stages."""

from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, chain, pairwise

import networkx as nx
import numpy as np

from autopar.schedule.orders import Row, Schedule, actions, arriving, receiving_kinds
from autopar.schedule.timeline import Action, Span, Timeline

KINDS = "FBIW"


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage for one microbatch.

    `backward_s`: the part of backward for the inputs, `weight_s`: the part for the weights; a backward that is not
    split takes both. `send_s`: p2p of the outputs to the next stage; `send_back_s`: p2p of the inputs' gradients to the
    previous stage. The first three are those of a rank while all others compute. Where ranks share cores, `alone` is
    their part that is left while all others wait, and `cores` the share of the cores that the rank then takes.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    send_s: float = 0.0
    send_back_s: float = 0.0
    alone: float = 1.0
    cores: float = 0.0


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
    poster: np.ndarray  # the action with which the rank posts the receive of that result
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
        (source, action) for row in rows for action in row if (source := source_of(schedule, action)) is not None
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
    posting = posters(schedule)
    bounds = accumulate(map(len, waves), initial=0)
    return Order(
        schedule,
        flat,
        tuple(slice(start, stop) for start, stop in pairwise(bounds)),
        np.array([index[before[action]] for action in flat]),
        np.array([index[source_of(schedule, action)] for action in flat]),
        np.array([index[posting.get(action)] for action in flat]),
        np.array([KINDS.index(action.kind) for action in flat]),
    )


def source_of(schedule: Schedule, action: Action) -> Action | None:
    """The action, possibly of another rank, whose result `action` reads; None if its rank's order implies it anyway."""
    kind, stage, microbatch = action
    if kind == "W" or (kind == "F" and stage == 0) or (kind != "F" and stage == schedule.num_stages - 1):
        return None
    return Action(kind, stage - 1 if kind == "F" else stage + 1, microbatch)


def posters(schedule: Schedule) -> dict[Action, Action]:
    """Each action that receives, but a rank's first one -> the action with which its receive is posted.

    That is the one that needs what arrives before, as the runtime does it (`receive_ahead.Inbox`).
    """
    ranks = range(schedule.num_ranks)
    rows = (arriving(schedule, rank, kind) for rank in ranks for kind in receiving_kinds(schedule))
    return {action: before for row in rows for before, action in pairwise(row)}


def posted_by(schedule: Schedule) -> list[dict[int, int]]:
    """For each rank: index of an action that sends a gradient -> index of the second later one that does behind where
    the receive is surely posted, so that the transfer has run beside computing; without an entry if there is none.

    That a receive has been posted is known by the values that the rank receives after it. Gradients tell it too, but
    not all stages have some.
    """
    rows = actions(schedule)
    position = {action: index for row in rows for index, action in enumerate(row)}
    begun: dict[Action, np.ndarray] = {}  # for each rank, of how many actions it is known that they have begun
    before = {action: previous for row in rows for previous, action in zip((None, *row), row)}
    for action in chain.from_iterable(generations(schedule)):
        known = begun[previous].copy() if (previous := before[action]) else np.zeros(schedule.num_ranks, int)
        known[schedule.rank_of(action.stage)] = position[action] + 1
        if action.kind == "F" and action.stage:
            known = np.maximum(known, begun[action._replace(stage=action.stage - 1)])
        begun[action] = known
    posting, table = posters(schedule), []
    for row in rows:
        own, waiting = dict[int, int](), deque[tuple[int, int, int]]()
        posted, running = list[int](), list[int]()
        for index, action in enumerate(row):
            if action.kind in "BI" and action.stage:
                own |= dict.fromkeys(running, index)
                posted, running = [], posted
            while waiting and begun[action][waiting[0][1]] > waiting[0][2]:
                posted.append(waiting.popleft()[0])
            if action.kind in "BI" and action.stage:
                receiver = action._replace(stage=action.stage - 1)
                peer = schedule.rank_of(receiver.stage)
                waiting.append((index, peer, position[posting.get(receiver, rows[peer][0])]))
        table.append(own)
    return table


def ends(order: Order, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from the step's start at which each action starts and ends; `times` is [stages, 7, ...], columns as in
    `StageTimes`.

    Further dims are simulated side by side: many sets of times cost little more than one. A transfer begins when what
    is sent is made and its receive is posted, and runs beside the computing of both ranks; those of one lane follow one
    another. Ranks that share cores slow each other down as far as they compute at the same time (`_stretched`).
    """
    durations, transfers = _durations(order.schedule, times)
    stage = np.array([action.stage for action in order.actions])
    duration, transfer = durations[stage, order.kind], transfers[stage, order.kind]
    start, end = (np.zeros((len(duration) + 1, *duration.shape[1:])) for _ in range(2))
    for wave in order.waves:
        # A receive is posted once the one before has arrived, so that two of a lane never share its link.
        arrives = np.maximum(end[order.source[wave]], start[order.poster[wave]]) + transfer[wave]
        start[wave] = np.maximum(end[order.before[wave]], arrives)
        end[wave] = start[wave] + duration[wave]
    cores = times[stage, 6]
    return _stretched(start[:-1], end[:-1], cores) if cores.any() else (start[:-1], end[:-1])


def _stretched(start: np.ndarray, end: np.ndarray, cores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The starts and ends of actions, f64[actions, ...] each, if those that go on at the same time share cores.

    `start`, `end`: as if each had the cores alone, of which it then takes a share of `cores`. While more than all are
    taken, everything is slower by as much.
    """
    moments = np.concatenate([start, end])
    order = moments.argsort(axis=0, kind="stable")
    taken = np.take_along_axis(np.concatenate([cores, -cores]), order, axis=0).cumsum(axis=0)
    spans = np.diff(np.take_along_axis(moments, order, axis=0), axis=0) * np.maximum(1.0, taken[:-1])
    stretched = np.empty_like(moments)
    np.put_along_axis(stretched, order, np.concatenate([np.zeros_like(spans[:1]), spans.cumsum(axis=0)]), axis=0)
    return stretched[: len(start)], stretched[len(start) :]


def _durations(schedule: Schedule, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each kind of action of each stage, and of the transfer of its input, both [stages, kinds, ...]."""
    forward, backward, weight, send, send_back, alone, _ = np.moveaxis(times, 1, 0)
    forward, backward, weight = forward * alone, backward * alone, weight * alone
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


def simulate(schedule: Schedule, times: Sequence[StageTimes]) -> Timeline:
    """The timeline of a step in which every microbatch takes each stage's `times`, one for each stage."""
    order = ordered(schedule)
    start, end = ends(order, as_array(times))
    rows: list[list[Span]] = [[] for _ in range(schedule.num_ranks)]
    for action, begin, finish in zip(order.actions, start.tolist(), end.tolist()):
        rows[schedule.rank_of(action.stage)].append(Span(action, begin, finish))
    return Timeline(tuple(map(tuple, rows)))


def as_array(times: Sequence[StageTimes]) -> np.ndarray:
    """The fields of `times` as f64[stages, 7]."""
    return np.array([astuple(x) for x in times])
