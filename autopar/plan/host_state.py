"""Optimizer state of some parameters on the host, so that a plan fits: of which, and the plan for which that costs least.

A byte of state on the host frees a byte of the device and costs p seconds a step, whatever parameter it is of. So a plan of t seconds
and b bytes, of which s are optimizer state, takes t + p max(0, b - M) seconds within M bytes, if b - s <= M. The best of those with b >= M
is that of least t + p b under the limit M on b - s, one search of a table; and `least_cover` says whose state goes. (What of the bytes is
brought back for the update is small and left out of t + p b.)
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.hardware import Cluster
from autopar.costmodel.on_host import hostable, moving_s, optimizer_bytes
from autopar.costmodel.training import Training
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.plan.knapsack import least_cover
from autopar.plan.setting import Problem, Setting
from autopar.sbp.assignment import Assignment
from autopar.search.table import Choice, Edge, Node, cost_of, memory_of


@dataclass(frozen=True)
class OnHost:
    """A plan that fits with the optimizer state that it has on the host; lower_bound_s: as far as is known, none of this kind, nor any
    without, is faster."""

    assignment: Assignment
    step_s: float
    lower_bound_s: float = 0.0


def fill(
    graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster, training: Training, limit_bytes: float
) -> OnHost | None:
    """`assignment` with as few bytes of optimizer state on the host as make it fit; None if no number does, or there is no way there."""
    bare = replace(assignment, state_on_host=frozenset())
    costs = evaluate(graph, bare, mesh, cluster, training=training)
    excess = costs.total_memory_bytes - limit_bytes
    if excess <= 0:
        return OnHost(bare, costs.step_s)
    chosen = _chosen(graph, bare, mesh, training, excess) if cluster.host_bandwidth_bytes_per_s else None
    if not chosen:
        return None
    found = replace(bare, state_on_host=chosen)
    costs = evaluate(graph, found, mesh, cluster, training=training)
    return OnHost(found, costs.step_s) if costs.total_memory_bytes <= limit_bytes else None


def _chosen(graph: Graph, assignment: Assignment, mesh: Mesh, training: Training, excess: float) -> frozenset[str] | None:
    """The parameters of least state whose state frees `excess` bytes, and what the largest of them brings back for its update."""
    layouts, items = assignment.layouts, hostable(graph)
    each = [(x.value.name, math.prod(x.value.shape), optimizer_bytes(x, layouts[x.value.name], mesh.shape, training)) for x in items]
    best: tuple[int, frozenset[str]] | None = None
    for largest in sorted({num_elements for _, num_elements, _ in each}):
        allowed = [(name, size) for name, num_elements, size in each if num_elements <= largest]
        brought = max(size for _, num_elements, size in each if num_elements == largest)
        taken = least_cover([size for _, size in allowed], excess + brought)
        total = sum(allowed[position][1] for position in taken or ())
        if taken and (best is None or total < best[0]):
            best = total, frozenset(allowed[position][0] for position in taken)
    return None if best is None else best[1]


def s_per_byte(cluster: Cluster) -> float:
    """Seconds a step that a byte of state on the host costs."""
    return moving_s(1.0, cluster)


def is_worth_moving(problem: Problem, choice: Choice, cluster: Cluster) -> bool:
    """Whether memory costs more seconds a byte here, where the search of `problem` met its limit, than state on the host does.

    Else the bound that the search has proven at its price of memory holds for plans with state on the host as well.
    """
    if choice.around is None or not cluster.host_bandwidth_bytes_per_s:
        return False
    table = problem.priced.table
    (above_s, above), (within_s, within) = ((cost_of(table, end), memory_of(table, end)) for end in choice.around)
    return within_s - above_s > s_per_byte(cluster) * (above - within)


def search_on_host(setting: Setting, problem: Problem, starts: list[tuple[int, ...]]) -> OnHost | None:
    """The best plan that has optimizer state on the host or, without, all of the limit in use.

    None if the optimizer has no state, or there is no way to the host. InfeasibleError if nothing fits with all of it there.
    """
    wishes, graph, mesh = setting.wishes, setting.graph, setting.mesh
    trained = frozenset(item.value.name for item in hostable(graph))
    if not (setting.cluster.host_bandwidth_bytes_per_s and wishes.training.state_bytes and trained):
        return None
    away = replace(setting, wishes=replace(wishes, state_on_host=trained)).repriced(problem)
    both, price = _both(problem, away, s_per_byte(setting.cluster)), s_per_byte(setting.cluster) * wishes.memory_limit_bytes
    try:
        choice = replace(setting, to_beat_s=setting.to_beat_s + price).search(both, starts)
    except InfeasibleError as error:
        raise InfeasibleError(f"with all of the optimizer's state on the host: {error}") from error
    assignment = both.decode(choice.strategies)
    found = fill(graph, assignment, mesh, setting.cluster, wishes.training, wishes.memory_limit_bytes)
    if found is None:  # what each set brings back is too much, but for the set of all
        found = OnHost(assignment, evaluate(graph, assignment, mesh, setting.cluster, training=wishes.training).step_s)
    return replace(found, lower_bound_s=max(0.0, choice.lower_bound_s - price))


def _both(problem: Problem, away: Problem, s_per_byte: float) -> Problem:
    """The table whose seconds are those of `problem` with its bytes at that price, and whose bytes are those of `away`."""
    here, there = problem.priced.table, away.priced.table
    known: dict[tuple[int, int], np.ndarray] = {}  # what is one array there is one here

    def in_seconds(one: Node | Edge) -> np.ndarray:
        key = id(one.cost_s), id(one.memory_bytes)
        if key not in known:
            known[key] = one.cost_s + s_per_byte * one.memory_bytes
        return known[key]

    nodes = tuple(Node(one.name, in_seconds(one), other.memory_bytes) for one, other in zip(here.nodes, there.nodes))
    edges = tuple(replace(edge, cost_s=in_seconds(edge)) for edge in here.edges)
    return replace(away, priced=replace(away.priced, table=replace(there, nodes=nodes, edges=edges)))
