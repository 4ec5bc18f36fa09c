"""`ScheduleBounds`: lower bounds of the step of all plans that have a schedule on a mesh."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.overlap.path_weights import MicrobatchWeights
from autopar.costmodel.roofline import shapes_time, weight_gradients_s, weight_share
from autopar.costmodel.stage_transfer import speedup_alone, transfer
from autopar.errors import InfeasibleError
from autopar.ir.folding.fold import Folded, value_classes
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.graph import Graph, Op
from autopar.ir.split_stages import crossing_bytes
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.problem import Problem, Setting
from autopar.planner.request import PlanRequest
from autopar.sbp.analysis.sample_blocks import fold_microbatch
from autopar.sbp.assignment import Assignment
from autopar.sbp.microbatch.microbatch_graph import microbatched
from autopar.schedule.critical_shares import CriticalShares, MicrobatchWork, critical_shares
from autopar.schedule.orders import Schedule
from autopar.search.solve import solve
from autopar.search.table import CostTable, Edge

# The most times that a microbatch is searched, under other weights each time.
_MOST_SEARCHES = 6
# A first bound below this share of the step to beat is not made closer to exceed it.
_FAR = 0.95
# The most forwards of a schedule whose critical paths are weighed, by a linear program of up to a second; and the most,
# times the ranks, for which that is done with each rank as the slowest.
_MOST_FORWARDS, _MOST_BY_RANK = 2000, 5000
# Blocks unlike most others, of which is asked on which ranks they are.
_MOST_UNLIKE = 4


@dataclass(eq=False)
class ScheduleBounds:
    """The lower bounds of the steps of a model's schedules on meshes, each computed once.

    `graph`, `folded`: of the whole batch; `starts`: the ops but the first at which stages may start.
    """

    graph: Graph
    folded: Folded
    starts: Sequence[str]
    cluster: Cluster
    request: PlanRequest
    _known: dict[tuple[Mesh, Schedule, bool], float] = field(default_factory=dict)
    _solved: dict[tuple[Mesh, Schedule], "Solved"] = field(default_factory=dict)

    def learn(self, mesh: Mesh, schedule: Schedule, least_s: float) -> None:
        """Take in a bound that a search of the layouts on one rank has proven, where nothing is hidden."""
        if schedule.num_ranks == 1 and not self.cluster.overlap:
            self._known |= dict.fromkeys(((mesh, schedule, is_final) for is_final in (False, True)), least_s)

    def least_s(self, mesh: Mesh, schedule: Schedule, budget: Budget, to_beat_s: float = math.inf) -> float:
        """Seconds that a step of `schedule` takes at least, on the sub-mesh `mesh` of a rank: `schedule_bound_s`.

        Without `to_beat_s` it is computed again if there was no time for it.
        """
        key = mesh, schedule, math.isinf(to_beat_s)
        if budget.is_spent:
            return self._known.get(key, 0.0)
        if not self._known.get(key):
            micro = microbatched(self.graph, schedule.num_microbatches)
            setting = Setting(micro.graph, mesh, self.cluster, self.request, budget, to_beat_s=to_beat_s)
            with budget.timed("bound"):
                solved = self._solved.setdefault((mesh, schedule), {})
                bound_s = schedule_bound_s(setting, fold_microbatch(self.folded, micro), self.starts, schedule, solved)
            self._known[key] = bound_s
        return self._known[key]

    def one_pass_s(self, mesh: Mesh, budget: Budget) -> float:
        """Seconds that a step on one rank takes at least in any number of microbatches, whatever it saves of memory; 0
        if that is not known.

        At the prices of data sheets it is that of one pass: each microbatch more is as much work, and as many bytes, in
        more ops and collectives, which have their fixed times, and what is computed again only takes time.
        """
        if self.cluster.calibration is not None or self.cluster.overlap:
            return 0.0
        return self.least_s(mesh, Schedule("1f1b", 1, 1, 1), budget)


# Weights under which a microbatch was searched -> the least seconds of a rank; and of the first, those of weight
# gradients and of all else, as `_times` gives them.
Solved = dict[CriticalShares, tuple[float, dict[str, float]]]


def schedule_bound_s(
    setting: Setting, folded: Folded, starts: Sequence[str], schedule: Schedule, known: Solved | None = None
) -> float:
    """Seconds that a step of `schedule` takes at least, whatever its cut and its layouts, and whichever blocks are
    recomputed; 0 if the budget is spent before there is a bound.

    `setting`: of a whole microbatch on the sub-mesh of a rank; `folded`: the fold of its graph; `starts`: the ops but
    the first at which stages may start. A cut into stages is bounded by its critical paths (`critical_shares`), under
    whose weights the time is a sum over ops and conversions: the least of it over all layouts, found as without stages,
    is a bound for every cut. To it comes the least mean of the ranks' work once a step. Inner copies of a block are
    laid out alike, and memory is not regarded, which only costs time. Of the bounds of which one holds, the lowest is
    made closer until that is in vain, or it is clear whether plans can take less than `setting.to_beat_s`. `known`: of
    a call before for the same schedule on the same mesh, to which this one adds its own.
    """
    training = setting.request.training.staged(schedule.num_microbatches, schedule.num_ranks)
    request = replace(setting.request, training=training, memory_limit_bytes=math.inf, outputs={})
    to_beat_s, setting = setting.to_beat_s, replace(setting, request=request, to_beat_s=math.inf)
    folded = segmented(folded, setting.graph, ends_apart(folded))
    work, blocks_s = _work(setting, starts, schedule)
    solved: dict[CriticalShares, float] = {}
    known = {} if known is None else known

    speedup = speedup_alone(setting.cluster, schedule.num_ranks, setting.mesh.num_devices)
    on_cores = _mean_work(schedule, speedup, setting.mesh.num_devices)

    def own_s(shares: CriticalShares) -> float:
        return shares.seconds + max(min(1.0, shares.over(other)) * seconds for other, seconds in solved.items())

    def bound_s(shares: CriticalShares) -> float:
        return max(own_s(shares), own_s(on_cores))

    least_s, candidates = 0.0, _shares(schedule, replace(work, slowest_s=0.0), speedup)
    priced = candidates[0]
    while priced not in solved and len(solved) < _MOST_SEARCHES and not setting.budget.is_spent:
        try:
            solved[priced], times = known.get(priced) or _least(setting, folded, schedule, priced, is_first=not solved)
        except InfeasibleError:  # there was no time
            break
        if not setting.budget.is_spent:
            known[priced] = solved[priced], times
        if len(solved) == 1:
            least_s = bound_s(priced)
            work = replace(work, **times)
            if math.isinf(to_beat_s) and schedule.num_stages > 1:
                slowest_s = _slowest_laid_out_s(setting, folded, starts, blocks_s, schedule)
                work = replace(work, slowest_s=max(work.slowest_s, slowest_s))
            candidates = _shares(schedule, work, speedup)
        least_s = max(least_s, min(map(bound_s, candidates)))
        priced = min(candidates, key=bound_s)
        priced = max(on_cores, priced, key=own_s) if speedup > 1 else priced
        if least_s >= to_beat_s or (to_beat_s < math.inf and least_s < _FAR * to_beat_s):
            break
    return least_s


def _least(
    setting: Setting, folded: Folded, schedule: Schedule, shares: CriticalShares, *, is_first: bool
) -> tuple[float, dict[str, float]]:
    """(a lower bound of the seconds of a rank, on average, of which those of a microbatch are weighed by `shares`; of
    the first, the `_times` of the best layouts, but of one stage there is one path, whatever its work).
    """
    factor = schedule.num_ranks / schedule.num_microbatches
    reductions = 1 - setting.cluster.overlap  # along compute, of those beside the last backward
    weights = MicrobatchWeights(shares.other * factor, shares.weight * factor, reductions)
    weighed = replace(setting, microbatch=weights)
    problem = weighed.problem(folded)
    choice = weighed.search(problem, [])
    is_needed = is_first and schedule.num_stages > 1
    times = _times(setting, problem.decode(choice.strategies)) if is_needed else {}
    return choice.lower_bound_s / schedule.num_ranks, times


def _times(setting: Setting, assignment: Assignment) -> dict[str, float]:
    """Seconds of a microbatch: of weight gradients, and of all else."""
    costs = setting.costs(assignment)
    weight_s = weight_gradients_s(setting.graph, assignment, setting.mesh, setting.cluster)
    other_s = costs.microbatch_s("forward") + costs.microbatch_s("backward") - weight_s
    return {"weight_s": weight_s, "other_s": other_s}


def _mean_work(schedule: Schedule, speedup: float, num_devices: int) -> CriticalShares:
    """The mean work of the ranks, as far as a step takes at least as long where they share cores.

    Of computing c and collectives d of a rank on average, a step takes at least c, and c / speedup + d. With weights
    that count both alike, that is speedup / (2 speedup - 1) times their sum; one device has no collectives.
    """
    least = 1.0 if num_devices == 1 else speedup / (2 * speedup - 1)
    mean = least * schedule.num_microbatches / schedule.num_ranks
    return CriticalShares(mean, mean, 0.0)


def _shares(schedule: Schedule, work: MicrobatchWork, speedup: float) -> tuple[CriticalShares, ...]:
    """The weights of critical paths, on which ranks compute as fast as while all others wait."""
    num_forwards = schedule.num_microbatches * schedule.num_stages
    if schedule.num_stages == 1 or num_forwards > _MOST_FORWARDS:
        mean = schedule.num_microbatches / schedule.num_ranks / speedup
        return (CriticalShares(mean, mean, 0.0),)
    by_rank = num_forwards * schedule.num_ranks <= _MOST_BY_RANK
    times = {name: getattr(work, name) / speedup for name in ("weight_s", "other_s", "slowest_s")}
    found = critical_shares(schedule, replace(work, **times | ({} if by_rank else {"slowest_s": 0.0})))
    return tuple(CriticalShares(one.weight / speedup, one.other / speedup, one.seconds) for one in found)


def _work(setting: Setting, starts: Sequence[str], schedule: Schedule) -> tuple[MicrobatchWork, np.ndarray]:
    """The work of a microbatch shared evenly by the devices of a rank, with the least sends and slowest rank; and the
    seconds of each block.
    """
    graph, best, num_devices = setting.graph, setting.cluster.at_best(), setting.mesh.num_devices

    @cache
    def op_s(op: Op) -> tuple[float, float]:
        times = shapes_time(op, tuple(v.shape for v in op.inputs), tuple(v.shape for v in op.outputs), best)
        weight_s = weight_share(op) * times[1]
        return weight_s, sum(times) - weight_s

    position = graph.position
    cuts = [position[name] for name in starts]
    blocks = np.add.reduceat([op_s(op.nameless) for op in graph.ops], [0, *cuts]) / num_devices
    weight_s, other_s = blocks.sum(axis=0).tolist()
    if schedule.num_stages == 1:
        return MicrobatchWork(weight_s, other_s), blocks.sum(axis=1)
    crossing, link = crossing_bytes(graph), transfer(setting.cluster, schedule.num_ranks, num_devices)
    sent_s = link.send_s(min(crossing[at] for at in cuts) / num_devices)
    blocks_s = blocks.sum(axis=1)
    return MicrobatchWork(weight_s, other_s, sent_s, sent_s, _least_of_slowest_s(blocks_s, schedule)), blocks_s


def _least_of_slowest_s(blocks_s: np.ndarray, schedule: Schedule) -> float:
    """Seconds of the slowest rank of the best cut of these blocks."""
    slowest_s = _slowest_s if schedule.num_stages == schedule.num_ranks else _busiest_s
    return slowest_s(blocks_s, schedule.num_ranks)


def _slowest_laid_out_s(
    setting: Setting, folded: Folded, starts: Sequence[str], blocks_s: np.ndarray, schedule: Schedule
) -> float:
    """Seconds of the slowest rank of the best cut, with the conversions within blocks and from a block to the next.

    `blocks_s`: of the work alone. What crosses from a stage to the next may be converted by either of them.
    """
    blocks_s, first_s = blocks_s.copy(), 0.0
    for numbers, (least_s, less_s) in _laid_out(setting, folded, starts):
        blocks_s[numbers] = np.maximum(blocks_s[numbers], least_s)
        first_s += less_s
    return _least_of_slowest_s(blocks_s, schedule) - first_s * schedule.num_stages / schedule.num_ranks


def _laid_out(
    setting: Setting, folded: Folded, starts: Sequence[str]
) -> Iterator[tuple[list[int], tuple[float, float]]]:
    """Blocks that are laid out alike, from one start to the next, and their `_alike_s`."""
    problem, ops, position = setting.problem(folded), setting.graph.ops, setting.graph.position
    same = problem.folded.representative
    blocks = [ops[a:b] for a, b in pairwise((0, *(position[name] for name in starts), len(ops)))]
    alike, total = defaultdict[tuple[str, ...], list[int]](list), Counter(same[op.name] for op in ops)
    for number, block in enumerate(blocks):
        alike[tuple(same[op.name] for op in block)].append(number)
    for names, numbers in alike.items():
        if all(total[name] == count * len(numbers) for name, count in Counter(names).items()):
            with suppress(InfeasibleError):  # there was no time
                yield numbers, _alike_s(setting, problem, [blocks[number] for number in numbers])


def _alike_s(setting: Setting, problem: Problem, blocks: Sequence[Sequence[Op]]) -> tuple[float, float]:
    """(least seconds of a microbatch on one of these blocks behind another, how much less on one behind no other).

    Members of a class have one layout, so that the blocks share evenly what their classes take together.
    """
    table, same = problem.priced.table, problem.folded.representative
    classes = value_classes(setting.graph, problem.folded)
    node_of = {(entity.kind, entity.name): node for node, entity in enumerate(problem.priced.entities)}
    maker = {value.name: (at, same[op.name]) for at, block in enumerate(blocks) for op in block for value in op.outputs}
    nodes, between = set[int](), set[tuple[int, int]]()
    for at, op in ((at, op) for at, block in enumerate(blocks) for op in block):
        reader = node_of["op", same[op.name]]
        nodes.add(reader)
        for name in (value.name for value in op.inputs if value.name in maker):
            source, kept = node_of["op", maker[name][1]], node_of.get(("kept", classes[name]))
            ends = {source, reader} if kept is None else {source, kept, reader}
            nodes |= ends
            # a stage that begins with this block may convert for it what the last block of the stage before made
            between |= set(combinations(sorted(ends), 2)) if maker[name][0] != at else set()
    place = {node: number for number, node in enumerate(sorted(nodes))}
    inside = [edge for edge in table.edges if edge.a in place and edge.b in place]

    def least_s(edges: Iterable[Edge]) -> float:
        own = tuple(replace(edge, a=place[edge.a], b=place[edge.b]) for edge in edges)
        part = CostTable(tuple(table.nodes[node] for node in place), own)
        total_s = solve(part, deadline=setting.budget.deadline).lower_bound_s
        return total_s / len(blocks) / setting.request.training.num_microbatches

    behind_s = least_s(inside)
    alone_s = least_s(edge for edge in inside if (edge.a, edge.b) not in between) if between else behind_s
    return behind_s, max(0.0, behind_s - alone_s)


def _slowest_s(times_s: np.ndarray, num_stages: int) -> float:
    """Seconds of the slowest stage of the cut of these blocks for which that is the least."""
    ends = np.concatenate([[0.0], np.cumsum(times_s)])
    spans = np.where(ends[None, :] < ends[:, None], math.inf, ends[None, :] - ends[:, None])  # [start, stop]
    least = spans[0]  # of the blocks before each stop, on the stages so far
    for _ in range(1, num_stages):
        least = np.maximum(least[:, None], spans).min(axis=0)
    return float(least[-1])


def _busiest_s(times_s: np.ndarray, num_ranks: int) -> float:
    """Seconds that the busiest rank takes at least, on whichever ranks these blocks are.

    Of the blocks, those most of which are alike and the longest others count. Each rank has a whole number of them.
    """
    sizes, counts = np.unique(times_s.round(15), return_counts=True)
    most = int((sizes * counts).argmax())
    alike_s, num_alike = float(sizes[most]), int(counts[most])
    if not alike_s > 0:
        return 0.0
    others = sorted(np.delete(np.repeat(sizes, counts), np.flatnonzero(np.repeat(sizes, counts) == alike_s)).tolist())
    shared = [groups for groups in _groupings(others[-_MOST_UNLIKE:]) if len(groups) <= num_ranks]
    most_num = int((times_s.sum() / num_ranks + times_s.max()) / alike_s) + 1  # the busiest rank of a greedy choice
    possible = {one + num * alike_s for groups in shared for one in (0.0, *groups) for num in range(most_num + 1)}

    def is_enough(limit_s: float, groups: list[float]) -> bool:
        loads = np.array([*groups, *[0.0] * (num_ranks - len(groups))])
        return loads.max() <= limit_s and np.floor((limit_s - loads) / alike_s + 1e-9).sum() >= num_alike

    return next((limit for limit in sorted(possible) if any(is_enough(limit, groups) for groups in shared)), 0.0)


def _groupings(items: list[float]) -> list[list[float]]:
    """The sums of the groups, for each way to put these items into groups."""
    if not items:
        return [[]]
    found = []
    for groups in _groupings(items[1:]):
        found += [[*groups[:at], one + items[0], *groups[at + 1 :]] for at, one in enumerate(groups)]
        found.append([*groups, items[0]])
    return found
