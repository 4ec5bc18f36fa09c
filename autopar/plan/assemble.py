"""From a graph to its plan: every stage of planning, in order."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TypeVar

from autopar.costmodel.cluster import Cluster
from autopar.costmodel.decode import decode, encode
from autopar.costmodel.evaluate import Costs, evaluate
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.price import Priced, price
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.plan.hand import hand_plans
from autopar.plan.plan import Plan, plan_of
from autopar.plan.store import HandCosts
from autopar.sbp.annotate import annotate
from autopar.sbp.assignment import Assignment
from autopar.sbp.pins import restrict
from autopar.search.solve import solve
from autopar.search.table import Choice

Progress = Callable[[str], None]  # told in a few words what is being done
Result = TypeVar("Result")


def make_plan(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    *,
    pins: Mapping[str, str] | None = None,
    stored: Mapping[str, str] | None = None,
    memory_limit_bytes: float | None = None,
    optimizer: str = "adamw",
    time_limit_s: float = 30.0,
    progress: Progress | None = None,
) -> Plan:
    """The best plan found in the time, never worse than a hand plan that meets the pins and the memory limit.

    `memory_limit_bytes`: per device, `usable_memory_bytes` of the cluster if it is None.
    `pins`: FQN -> layout; one holds for all repeats. `stored`: the same for what has its layout already, each for itself.
    PinError, InfeasibleError or MeshError if what is asked cannot be.
    """
    limit = usable_memory_bytes(cluster) if memory_limit_bytes is None else memory_limit_bytes
    clock = _Clock(progress or (lambda _: None))
    folded = clock.run("fold", lambda: fold(graph, _labels(graph, stored or {})))
    everything = clock.run("annotate", lambda: annotate(graph, mesh, folded))
    candidates = restrict(everything, graph, dict(pins or {}) | dict(stored or {}), mesh, folded)
    priced = clock.run("price", lambda: price(graph, folded, candidates, mesh, cluster, optimizer=optimizer, memory_limit_bytes=limit))
    hand = clock.run("hand plans", lambda: hand_plans(graph, folded, everything, mesh))
    starts = _starts(priced, graph, folded, hand)
    choice = clock.run("search", lambda: _searched(priced, tuple(starts.values()), cluster, time_limit_s / 2, clock.tell_cost))
    bound_s = clock.run("bound", lambda: solve(priced.relaxed, starts=(choice.strategies,), time_limit_s=time_limit_s / 2).lower_bound_s)
    by_hand = {name: evaluate(graph, assignment, mesh, cluster, optimizer=optimizer) for name, assignment in hand.items()}
    chosen = decode(priced, graph, folded, choice.strategies)
    found_s = evaluate(graph, chosen, mesh, cluster, optimizer=optimizer).step_s
    allowed = {name: costs for name, costs in by_hand.items() if name in starts and costs.total_memory_bytes <= limit}
    return plan_of(
        graph, folded, everything, _better_by_hand(hand, allowed, found_s) or chosen, mesh, cluster,
        optimizer=optimizer, memory_limit_bytes=limit, lower_bound_s=bound_s,
        hand={name: HandCosts(costs.step_s, costs.total_memory_bytes) for name, costs in by_hand.items()}, timings=clock.timings,
    )  # fmt: skip


def _searched(
    priced: Priced, starts: tuple[tuple[int, ...], ...], cluster: Cluster, time_limit_s: float, tell: Callable[[str, float, float], None]
) -> Choice:
    try:
        return solve(priced.table, starts=starts, time_limit_s=time_limit_s, progress=tell)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{error}, or plan a smaller batch. A device of cluster {cluster.name} has {cluster.memory_bytes / 2**30:.1f} GiB, of which "
            f"{usable_memory_bytes(cluster) / 2**30:.1f} GiB are the limit unless memory_limit_bytes (--memory-limit) says otherwise"
        ) from error


def _labels(graph: Graph, stored: Mapping[str, str]) -> dict[str, str]:
    return {item.value.name: stored[item.fqn] for item in graph.inputs if item.fqn in stored}


def _starts(priced: Priced, graph: Graph, folded: Folded, hand: Mapping[str, Assignment]) -> dict[str, tuple[int, ...]]:
    """The hand plans that the pins leave possible, as choices of the table."""
    starts = {}
    for name, assignment in hand.items():
        try:
            starts[name] = encode(priced, graph, folded, assignment)
        except PlanError:  # it takes what a pin forbids
            continue
    return starts


def _better_by_hand(hand: Mapping[str, Assignment], allowed: Mapping[str, Costs], found_s: float) -> Assignment | None:
    """A hand plan that beats what was found: the table prices some shared conversions twice, `evaluate` does not."""
    best = min(allowed, key=lambda name: allowed[name].step_s, default=None)
    return hand[best] if best is not None and allowed[best].step_s < found_s else None


class _Clock:
    """Runs stages, keeps what each took and tells of it."""

    def __init__(self, tell: Progress) -> None:
        self.tell = tell
        self.timings: dict[str, float] = {}

    def run(self, stage: str, work: Callable[[], Result]) -> Result:
        self.tell(stage)
        start = perf_counter()
        result = work()
        self.timings[stage] = perf_counter() - start
        return result

    def tell_cost(self, stage: str, cost_s: float, lower_bound_s: float) -> None:
        self.tell(f"search ({stage}): {cost_s * 1e3:.3g} ms a step, at least {lower_bound_s * 1e3:.3g} ms")
