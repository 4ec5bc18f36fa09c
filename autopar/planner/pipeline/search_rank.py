"""The best layouts of the stages of one rank, searched together within its memory limit."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from autopar.costmodel.activations.saved_activations import Regions
from autopar.costmodel.evaluate import Costs, evaluate, planned_collectives
from autopar.costmodel.state_offload import hostable, optimizer_bytes
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.planner.layouts.optimizer_offload import AssignedGraph, fill, is_worth_moving
from autopar.planner.layouts.two_groups import can_mix
from autopar.planner.pipeline.cut_stages import restricted
from autopar.planner.pipeline.stage_tables import CutTask, RankTask, mixed_copies, segments_of, setting_of, tables_of
from autopar.planner.pipeline.wanted_stages import StagePlans, Stages, Wanted, key_of, pressure_of
from autopar.planner.problem import ENOUGH_GAP
from autopar.sbp.assignment import Assignment
from autopar.sbp.pins import is_excluded
from autopar.sbp.placement import format_layout

# A plan is taken for several ranks where it is at most so much slower than one without a memory limit, or made for so
# few more microbatches in flight.
_NEARLY, _LITTLE_TIGHTER = 1.02, 1.25


class TooSlow(InfeasibleError):
    """No plan takes less than `at_least_s`, which is too slow."""

    def __init__(self, at_least_s: float) -> None:
        super().__init__(f"no layouts of the stages take less than {at_least_s} s")
        self.at_least_s = at_least_s


def best_plans(at: RankTask, stages: Stages) -> StagePlans:
    """The fastest of a few numbers of blocks that are recomputed, or wait on the host.

    The most is what the plan by hand recomputes. InfeasibleError if none fits, TooSlow if one may, but is too slow.
    """
    best: StagePlans | None = None
    failure: InfeasibleError | None = None
    at_least_s = math.inf  # what is too slow takes
    too_slow: list[Stages] = []  # even without a memory limit
    pressure = pressure_of((one.request.training for one in stages), at.limit_bytes)
    for asked in _ways(at.task, stages):
        if at.is_late or (at.budget.is_spent and (best or failure)):
            break
        is_last_resort = all(len(one.request.given.recomputed) == one.most_saved for one in asked)
        # Nothing is where ranks alike with hardly more memory could not be made to fit.
        is_hopeless = not is_last_resort and at.cache.failed.get(key_of(asked), math.inf) <= _LITTLE_TIGHTER * pressure
        if (is_hopeless and not at.task.can_move_state) or any(_saves_as_much(asked, other) for other in too_slow):
            continue
        free, to_beat_s = _unlimited(at, asked), at.to_beat_s if best is None else best.cost_s
        if free.cost_s >= to_beat_s:
            at_least_s = min(at_least_s, free.cost_s)
            too_slow.append(asked)
            continue
        free, saving = _priced(at, free, asked), None
        if at.is_late and not _fits(at, free):
            break
        if not is_hopeless:
            try:
                saving = _saving(at, asked, free, pressure, to_beat_s)
            except InfeasibleError as error:
                at.cache.failed[key_of(asked)] = pressure
                failure = error
        on_host = _with_state_on_host(at, asked, free, pressure, saving)
        slow = (one for one in (saving, on_host) if one and one.cost_s >= at.to_beat_s)
        at_least_s = min([at_least_s, *(max(at.to_beat_s, one.lower_bound_s) for one in slow)])
        known = (one for one in (best, saving, on_host) if one and one.cost_s < at.to_beat_s)
        best = min(known, key=lambda one: one.cost_s, default=None)
        if saving is not None and saving.is_free:
            break  # to save memory only costs time
    if best is None and at_least_s < math.inf:
        raise TooSlow(at_least_s)
    best = best or as_written(at, stages)
    if best is None:
        raise failure or InfeasibleError(
            "no layouts of the stages were found in the time there was; allow more time or memory"
        )
    return best


def as_written(at: RankTask, stages: Stages) -> StagePlans | None:
    """The stages as the plan by hand lays them out, with optimizer state on the host if they fit no other way.

    None if they do not fit, or are to be stored otherwise.
    """
    asked, parts = [], []
    for one in stages:
        own = restricted(at.task.cut.by_hand, one.graph, at.task.crossing)
        stored = {item.fqn: format_layout(own.layouts[item.value.name]) for item in one.graph.inputs}
        if any(stored[fqn] != layout for fqn, layout in (*one.request.pins.items(), *one.request.stored.items())):
            return None
        if is_excluded(own, one.request.excluded):
            return None
        regions = one.regions[: one.most_saved]
        asked.append(_with_saved(one, "recomputed", regions))
        parts.append((one.graph, replace(own, recomputed=regions)))
    written = StagePlans(tuple(parts), math.inf, is_searched=False)
    filled = _filled(at, [written], tuple(asked))
    is_moved = filled is not None and any(own.state_on_host for _, own in filled.parts)
    return None if is_moved and not at.task.can_move_state else filled


def _ways(task: CutTask, stages: Stages) -> Iterator[Stages]:
    """The stages with the first of their blocks recomputed or, where the link to the host is known, on the host
    meanwhile: none, as many as the plan by hand recomputes, so that there is an incumbent, and half of those. Of
    offloaded blocks half come first, which is often too slow already.
    """
    for kind, halves in (("recomputed", (0, 2, 1)), ("offloaded", (0, 1, 2))):
        counts = dict.fromkeys(tuple(one.most_saved * half // 2 for one in stages) for half in halves)
        # A backward in two parts would fetch everything twice.
        if kind == "offloaded" and not (task.cluster.host_bandwidth_bytes_per_s and not task.point.schedule.is_halved):
            continue
        for nums in counts:
            if any(nums) or (kind == "recomputed" and not (task.must_save and len(counts) > 1)):
                yield tuple(_with_saved(one, kind, one.regions[:num]) for one, num in zip(stages, nums))


def _saves_as_much(stages: Stages, others: Stages) -> bool:
    """Whether all blocks that are recomputed or offloaded in `others` are so in `stages`, which are then no faster
    without a memory limit.
    """
    return all(
        set(one.request.given.recomputed) >= set(other.request.given.recomputed)
        and set(one.request.given.offloaded) >= set(other.request.given.offloaded)
        for one, other in zip(stages, others, strict=True)
    )


def _saving(at: RankTask, stages: Stages, free: StagePlans, pressure: float, to_beat_s: float) -> StagePlans:
    """The best plans with these blocks recomputed or on the host, `free` without a memory limit; some that take
    `to_beat_s` or longer if all do.

    Those of a rank alike under more pressure that fit here too are taken if they are nearly as fast as that, since
    it is the slowest rank that counts.
    """
    if _fits(at, free):
        return replace(free, is_free=not any(one.num_saved for one in stages))
    known = at.cache.known.setdefault(key_of(stages), [])
    alike = [one for one in known if one.pressure <= _LITTLE_TIGHTER * pressure or one.cost_s <= _NEARLY * free.cost_s]
    fitting = [one for one in (_priced(at, other.of_others(stages), stages) for other in alike) if _fits(at, one)]
    if not fitting:
        near = (free, *known)
        fitting = [_search(at, stages, at.limit_bytes, pressure, to_beat_s=to_beat_s, near=near)]
        known += [one for one in fitting if one.cost_s < to_beat_s]  # else its search may have ended early
    return min(fitting, key=lambda one: one.cost_s)


def _with_state_on_host(
    at: RankTask, stages: Stages, free: StagePlans, pressure: float, other: StagePlans | None
) -> StagePlans | None:
    """The best plans with these blocks recomputed or offloaded and optimizer state on the host.

    None if there are none, or if `other`, without, is known to be as good. Those of a rank alike, or nearly as fast
    as `free`, without a memory limit, will do.
    """
    if not at.task.can_move_state or (other is not None and not other.is_short):
        return None
    known = at.cache.on_host.setdefault(key_of(stages), [])
    best = _filled(at, [free, *known], stages)
    near = (pressure / _LITTLE_TIGHTER, _LITTLE_TIGHTER * pressure)
    if best is None or not (
        best.cost_s <= _NEARLY * free.cost_s or any(near[0] <= one.pressure <= near[1] for one in known)
    ):
        if at.is_late:
            return best
        try:
            known.append(_search(at, stages, at.limit_bytes, pressure, is_on_host=True))
        except InfeasibleError:
            return best
        best = _filled(at, [free, *known], stages)
    return best


def _filled(at: RankTask, candidates: Iterable[StagePlans], stages: Stages) -> StagePlans | None:
    """The fastest of these with as much optimizer state on the host as must be; None if none can be made to fit."""
    best: StagePlans | None = None
    near = (other for other in candidates if not _is_above(at, other))
    for one in (other if other.costs else other.of_others(stages) for other in near):
        known = zip(one.parts, stages, one.costs or [None] * len(stages))
        parts = [AssignedGraph(graph, own, wanted.request.training, costs) for (graph, own), wanted, costs in known]
        made = fill(parts, at.task.mesh, at.task.cluster, at.limit_bytes) or ()
        cost_s = sum(part.known.step_s for part in made)
        if made and (best is None or cost_s < best.cost_s):
            pairs, costs = tuple((part.graph, part.assignment) for part in made), tuple(part.known for part in made)
            best = replace(one, parts=pairs, cost_s=cost_s, costs=costs, first=())
    return best


def _is_above(at: RankTask, plans: StagePlans) -> bool:
    """Whether priced plans exceed the limit even with all of their optimizer state on the host."""
    if not math.isfinite(plans.memory_bytes):
        return False
    shape, training, moved = at.task.mesh.shape, at.task.request.training, 0
    for graph, own in plans.parts:
        moved += sum(optimizer_bytes(x, own.layouts[x.value.name], shape, training) for x in hostable(graph))
    return plans.memory_bytes - moved > at.limit_bytes


def _unlimited(at: RankTask, stages: Stages) -> StagePlans:
    """The best plans without a memory limit, each stage for itself."""
    plans = []
    for one in stages:
        key = key_of((one,))
        if key not in at.cache.free:
            at.cache.free[key] = _opened(at, one) or _search(at, (one,), math.inf, 0.0)
        plans.append(at.cache.free[key].of_others((one,)))
    parts, first = (tuple(x for one in plans for x in getattr(one, name)) for name in ("parts", "first"))
    return StagePlans(parts, sum(one.cost_s for one in plans), first=first)


def _opened(at: RankTask, one: Wanted) -> StagePlans | None:
    """The best plan of a stage without a memory limit, from the tables that the boundary layouts were chosen by; None
    if these are of other plans.
    """
    found = at.task.opened.problem_of(one.number, one.request, at.task.crossing)
    if found is None:
        return None
    setting, problem = found
    start = problem.encode(restricted(at.task.cut.by_hand, problem.graph, at.task.crossing))
    choice = replace(setting, budget=at.budget).search(problem, [] if start is None else [start])
    parts = ((problem.graph, problem.decode(choice.strategies)),)
    return StagePlans(parts, choice.cost_s, lower_bound_s=choice.lower_bound_s)


def _priced(at: RankTask, plans: StagePlans, stages: Stages) -> StagePlans:
    """With what the parts take, by themselves: a table of their stages, of which most need none, takes ten times as
    long. Isomorphic stages with as much in flight take the same.
    """
    firsts = plans.first or tuple(own for _, own in plans.parts)
    costs = tuple(_costs(at, one, *part, first) for one, part, first in zip(stages, plans.parts, firsts, strict=True))
    return replace(plans, memory_bytes=sum(one.total_memory_bytes for one in costs), costs=costs)


def _costs(at: RankTask, one: Wanted, graph: Graph, own: Assignment, first: Assignment) -> Costs:
    """The costs of `own`, which is `first` renamed."""
    key, place, training = (
        (one.key, one.request.training, id(first)),
        (at.task.mesh, at.task.cluster),
        one.request.training,
    )
    if key not in at.cache.costs:
        at.cache.costs[key] = first, evaluate(graph, own, *place, training=training)
    _, costs = at.cache.costs[key]
    return replace(costs, listed=partial(planned_collectives, graph, own, *place, training))


def _fits(at: RankTask, plans: StagePlans) -> bool:
    return plans.memory_bytes <= at.limit_bytes


def _search(
    at: RankTask,
    stages: Stages,
    limit_bytes: float,
    pressure: float,
    *,
    is_on_host: bool = False,
    to_beat_s: float = math.inf,
    near: Sequence[StagePlans] = (),
) -> StagePlans:
    """The stages' tables under one limit, searched until nothing can take less than `to_beat_s`.

    If the limit binds, the copies of each segment are in two groups: as the best choices above the limit and within it,
    or, where that is not good enough, as a search from there on has them. near: plans of other limits, from which
    the search starts too. is_on_host: tables of `with_moves`, whose seconds are not those of a step.
    """
    setting = replace(setting_of(at, stages[0]), to_beat_s=to_beat_s)
    tables = tables_of(setting, at, stages, limit_bytes, is_on_host=is_on_host)
    by_hand = tuple(restricted(at.task.cut.by_hand, one.graph, at.task.crossing) for one in stages)
    others = (tuple(own for _, own in one.of_others(stages).parts) for one in near)
    is_mixed = limit_bytes < math.inf and any(can_mix(segments_of(at, one)[1]) for one in stages)
    choice = setting.search(tables.joint, tables.encode((by_hand, *others)), is_brief=is_mixed)
    found = StagePlans(
        _of_stages(stages, tables.decode(choice.strategies)),
        choice.cost_s,
        pressure,
        is_short=is_worth_moving(tables.table, choice, at.task.cluster),
        lower_bound_s=0.0 if is_on_host else choice.lower_bound_s,
    )
    share = tables.share_above(choice) if is_mixed and not at.budget.is_spent else None
    if share is None:
        return found
    above, within = map(tables.decode, choice.around or ())
    mixed = tuple(mixed_copies(at, one, share, *ends) for one, *ends in zip(stages, above, within, strict=True))
    if not is_on_host:
        as_mixed = _priced(at, replace(found, parts=_of_stages(stages, mixed), share=share), stages)
        as_mixed = replace(as_mixed, cost_s=sum(one.step_s for one in as_mixed.costs))
        if _fits(at, as_mixed) and as_mixed.cost_s * (1 - ENOUGH_GAP) <= choice.lower_bound_s:
            return as_mixed
    groups = tables_of(setting, at, stages, limit_bytes, is_on_host=is_on_host, share=share)
    known = groups.encode((mixed, tuple(own for _, own in found.parts), above, within))
    choice = setting.search(groups.joint, known)
    found = replace(found, lower_bound_s=min(found.lower_bound_s, choice.lower_bound_s))
    if choice.cost_s >= found.cost_s:
        return found
    return replace(found, parts=_of_stages(stages, groups.decode(choice.strategies)), cost_s=choice.cost_s, share=share)


def _of_stages(stages: Stages, assignments: Sequence[Assignment]) -> tuple[tuple[Graph, Assignment], ...]:
    return tuple((one.graph, own) for one, own in zip(stages, assignments, strict=True))


def _with_saved(stage: Wanted, kind: str, regions: Regions) -> Wanted:
    """The stage with its `regions` "recomputed", or else "offloaded"."""
    given = stage.request.given
    given = replace(given, recomputed=regions) if kind == "recomputed" else replace(given, offloaded=regions)
    return replace(stage, request=replace(stage.request, given=given))
