"""`plan_view`: what a page shows of one plan, as data; nothing is searched, and pages format it only."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.answers.step_terms import AnyPlan, step_terms
from autopar.explain.batch_size import notes
from autopar.explain.common_text import origin_of_figures
from autopar.explain.memory_over_time import Moment, memory_over_time
from autopar.explain.step_events import step_events
from autopar.explain.step_memory import step_memory
from autopar.page.block_tree import ModelBlock, block_tree
from autopar.page.leaves import Leaf, leaves
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.schedule.timeline import KINDS, Timeline

# Times of a timeline are whole numbers of so many parts of the step.
TICKS = 10_000_000
# Ranks of a pipeline whose memory is shown over time, at most: the fullest, the first, the last and some between.
_MOST_CURVES = 16
_MOST_FAMILIES = 14


@dataclass(frozen=True, slots=True)
class Lane:
    """The work of a rank, a device or a link, one thing after the other, as columns of equal length.

    `labels`: numbers of texts in `TimedLanes.labels`, `kinds` in `TimedLanes.kinds`. `starts`, `lengths`: in ticks.
    """

    name: str
    labels: tuple[int, ...]
    kinds: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimedLanes:
    """The timeline of a step. `tick_s`: seconds of a tick."""

    tick_s: float
    labels: tuple[str, ...]
    kinds: tuple[str, ...]
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The memory of a device of `rank` over a step: from each of `starts`, in ticks, on, the bytes by kind.

    `states`: for each start the number of a row of `bytes`, which has a column for each of `kinds`.
    """

    rank: int
    kinds: tuple[str, ...]
    starts: tuple[int, ...]
    states: tuple[int, ...]
    bytes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank of the pipeline: its stages, seconds in a step by what it does, and bytes of a device.

    `estimate_bytes`: as the search adds them up, by kind; `peak_bytes`: in a dry run, None if nobody asked.
    """

    stages: tuple[int, ...]
    seconds: Mapping[str, float]
    estimate_bytes: Mapping[str, int]
    peak_bytes: int | None


@dataclass(frozen=True)
class PlanView:
    """All that a page shows of a plan. Seconds are of a step, bytes of a device.

    `name`: of this plan among those of the page. `axes`: of the mesh, as columns of a layout. `terms`: their sum is
    the step. `families`: compute by kind of op, largest first, of all stages. `ranks`: one without stages; `fullest`:
    the one of the most memory. `is_claim`: bound, origin and peaks are what the plan's file says.
    """

    name: str
    origin: str
    mesh: str
    axes: tuple[str, ...]
    schedule: str
    cluster: str
    cluster_source: str
    optimizer: str
    step_s: float
    lower_bound_s: float
    bound_of: str
    gap: float
    bubble: float | None
    memory_bytes: int
    memory_limit_bytes: float | None
    is_claim: bool
    notes: tuple[str, ...]
    terms: Mapping[str, float]
    families: Mapping[str, float]
    timeline: TimedLanes
    curves: tuple[MemoryCurve, ...]
    ranks: tuple[RankView, ...]
    fullest: int
    root: ModelBlock


def plan_view(name: str, plan: AnyPlan) -> PlanView:
    """The view of a plan that the page calls `name`."""
    found = tuple(leaves(plan))
    limit = plan.memory_limit_bytes
    is_staged = isinstance(plan, StagedPlan)
    return PlanView(
        name=name,
        origin=plan.found_by,
        mesh=str(plan.mesh),
        axes=(plan.stages[0].mesh if is_staged else plan.mesh).axis_names,
        schedule=str(plan.schedule) if is_staged else "",
        cluster=plan.cluster.name,
        cluster_source=origin_of_figures(plan.cluster),
        optimizer=plan.training.described,
        step_s=plan.step_s,
        lower_bound_s=plan.lower_bound_s,
        bound_of=plan.bound_of,
        gap=plan.gap,
        bubble=plan.timeline.bubble if is_staged else None,
        memory_bytes=max(plan.peak_bytes or plan.memory_bytes),
        memory_limit_bytes=None if limit == float("inf") else limit,
        is_claim=plan.is_from_file,
        notes=notes(plan),
        terms=step_terms(plan),
        families=_families(found),
        timeline=_of_ranks(plan) if is_staged else _of_device(plan),
        curves=tuple(_curves(plan)),
        ranks=tuple(_ranks(plan)),
        fullest=_fullest(plan),
        root=block_tree(found),
    )


def _families(found: Iterable[Leaf]) -> dict[str, float]:
    seconds = defaultdict[str, float](float)
    for leaf in found:
        if leaf.kind == "op":
            seconds[leaf.name] += sum(leaf.seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    rest = sum(each for _, each in ordered[_MOST_FAMILIES:])
    return {name: each for name, each in (*ordered[:_MOST_FAMILIES], ("others", rest)) if each > 0}


@dataclass
class _Texts:
    """Texts by number, each once."""

    numbers: dict[str, int]

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def _of_device(plan: Plan) -> TimedLanes:
    """The timeline of a device: compute, and each link level."""
    tick_s = plan.step_s / TICKS or 1.0
    names: dict[int, str] = {}
    spans: dict[int, list[tuple[int, int, float, float]]] = {}
    labels, kinds = _Texts({}), _Texts({})
    for event in step_events(plan):
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        if event["ph"] == "X" and event["dur"]:
            what = event["args"]["what"]
            kind = f"{what} {event['cat']}" if what in ("compute", "wait") else what
            row = labels.number(event["args"]["op"]), kinds.number(kind), event["ts"] / 1e6, event["dur"] / 1e6
            spans.setdefault(event["tid"], []).append(row)
    lanes = (_lane(name, spans[tid], tick_s) for tid, name in names.items() if tid in spans)
    return TimedLanes(tick_s, tuple(labels.numbers), tuple(kinds.numbers), tuple(lanes))


def _of_ranks(plan: StagedPlan) -> TimedLanes:
    """The timeline of the ranks of a pipeline, and what each does once a step behind the schedule."""
    tick_s, timeline = plan.step_s / TICKS or 1.0, plan.timeline
    labels, kinds = _Texts({}), _Texts({})
    lanes = []
    for rank, row in enumerate(timeline.rows):
        spans = [
            (
                labels.number(f"stage {action.stage}, microbatch {action.microbatch}"),
                kinds.number(KINDS[action.kind]),
                start_s,
                end_s - start_s,
            )
            for action, start_s, end_s in row
        ]
        now_s = timeline.step_s
        for what, seconds in plan.once_s[rank].items():
            if seconds > 0:
                spans.append((labels.number("once a step"), kinds.number(what), now_s, seconds))
                now_s += seconds
        lanes.append(_lane(f"rank {rank}", spans, tick_s))
    return TimedLanes(tick_s, tuple(labels.numbers), tuple(kinds.numbers), tuple(lanes))


def _lane(name: str, spans: Sequence[tuple[int, int, float, float]], tick_s: float) -> Lane:
    labels, kinds, starts, lengths = zip(*spans)
    return Lane(name, labels, kinds, *(tuple(round(x / tick_s) for x in column) for column in (starts, lengths)))


def _curves(plan: AnyPlan) -> Iterable[MemoryCurve]:
    tick_s = plan.step_s / TICKS or 1.0
    if isinstance(plan, Plan):
        yield _curve(0, step_memory(plan), tick_s)
        return
    num = plan.schedule.num_ranks
    between = {round(at * (num - 1) / max(_MOST_CURVES - 2, 1)) for at in range(_MOST_CURVES - 1)}
    for rank in sorted({_fullest(plan), *between} & set(range(num))):
        yield _curve(rank, memory_over_time(plan, rank), tick_s)


def _fullest(plan: AnyPlan) -> int:
    """The rank whose estimate is the largest."""
    return max(range(len(plan.memory_bytes)), key=lambda rank: plan.memory_bytes[rank])


def _curve(rank: int, moments: Sequence[Moment], tick_s: float) -> MemoryCurve:
    """The curve with the last of moments at the same time, without moments that change nothing."""
    kinds = tuple(dict.fromkeys(kind for moment in moments for kind in moment.bytes_by_kind))
    last = {round(moment.start_s / tick_s): moment for moment in moments}
    numbers: dict[tuple[int, ...], int] = {}
    starts, states = [], []
    for start, moment in last.items():
        row = tuple(moment.bytes_by_kind.get(kind, 0) for kind in kinds)
        state = numbers.setdefault(row, len(numbers))
        if not states or states[-1] != state:
            starts.append(start)
            states.append(state)
    return MemoryCurve(rank, kinds, tuple(starts), tuple(states), tuple(numbers))


def _ranks(plan: AnyPlan) -> Iterable[RankView]:
    peaks: Sequence[int | None] = plan.peak_bytes or [None] * len(plan.memory_bytes)
    if isinstance(plan, Plan):
        yield RankView((), step_terms(plan), dict(plan.costs.memory_bytes), peaks[0])
        return
    for rank in range(plan.schedule.num_ranks):
        own = [plan.stages[stage] for stage in plan.schedule.stages_of(rank)]
        held = Counter[str]()
        for stage in own:
            held.update(stage.costs.memory_bytes)
        stages = tuple(plan.schedule.stages_of(rank))
        yield RankView(stages, _spent(plan.timeline, rank) | plan.once_s[rank], dict(held), peaks[rank])


def _spent(timeline: Timeline, rank: int) -> dict[str, float]:
    """Kind of action, or "idle" -> seconds of the schedule."""
    spent = defaultdict[str, float](float)
    for action, start_s, end_s in timeline.rows[rank]:
        spent[KINDS[action.kind]] += end_s - start_s
    return dict(spent) | {"idle": sum(wait.end_s - wait.start_s for wait in timeline.waits(rank))}
