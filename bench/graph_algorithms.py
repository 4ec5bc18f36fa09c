"""Graph algorithms of the package's own beside those of networkx, in CPU seconds, on what planning gives them.

    python -m bench.graph_algorithms [--rows 'dead'] [--resume]

A row is one algorithm; both versions are checked to give the same result, where networkx has the same algorithm. The
time of networkx includes the making of its graph, since no other part of planning has one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import process_time
from typing import Any

import networkx as nx
import numpy as np

from autopar.ir.graph import Graph, Value
from autopar.ir.passes.dead_code import drop_dead
from autopar.planner.pipeline.equal_stages import wiring_of
from autopar.schedule.orders import Schedule
from autopar.schedule.simulate import Order, ends, ordered
from autopar.search.min_plus.eliminate import elimination_order
from autopar.search.table import CostTable
from bench.problem import example_of, graph_of, problem_of
from bench.report import Cells, Row, Table, add
from bench.rows import parser, selected
from bench.suite import Case

_CASE = Case("gpt2", "h100", "2x4", 8)
_REPEAT = 7


@dataclass(frozen=True)
class Pair:
    """One algorithm: the package's own and that of networkx, each on `made()`, and a check that they agree."""

    name: str
    made: Callable[[], Any]
    own: Callable[[Any], Any]
    of_networkx: Callable[[Any], Any]
    agree: Callable[[Any, Any], bool]


def _traced() -> Graph:
    return graph_of(example_of(_CASE))


def _op_graph(graph: Graph) -> nx.DiGraph:
    """Ops, and edges from the producers of their inputs; `label`: the op without names, and the slots it reads."""
    producer = {value.name: op.name for op in graph.ops for value in op.outputs}
    found = nx.DiGraph()
    for op in graph.ops:
        found.add_node(op.name, label=repr(op.nameless))
        found.add_edges_from((producer[value.name], op.name) for value in op.inputs if value.name in producer)
    return found


def _needed_by_networkx(graph: Graph) -> set[str]:
    """Names of the ops that an output or a mutation depends on."""
    producer = {value.name: op.name for op in graph.ops for value in op.outputs}
    wanted = [item for item in graph.outputs if isinstance(item, Value)] + [value for _, value in graph.mutations]
    found, reached = _op_graph(graph), set()
    for name in {producer[value.name] for value in wanted if value.name in producer}:
        reached |= {name} | nx.ancestors(found, name)
    return reached


def _copy_of_itself() -> tuple[Graph, Graph]:
    graph = _traced()
    return graph, graph


def _isomorphic_by_networkx(pair: tuple[Graph, Graph]) -> bool:
    one, other = map(_op_graph, pair)
    return nx.vf2pp_is_isomorphic(one, other, node_label="label")


def _priced() -> CostTable:
    return problem_of(_CASE).table


def _pipeline() -> tuple[Order, np.ndarray]:
    """A schedule with transfers that take no time, so that one longest path is its step."""
    times = np.random.default_rng(0).random((8, 7))
    times[:, 3:] = 0.0
    return ordered(Schedule("1f1b", 8, 8, 64)), times


def _longest_path(pipeline: tuple[Order, np.ndarray]) -> float:
    """The end of the last action; an edge weighs the duration of the action at its end."""
    order, times = pipeline
    graph = nx.DiGraph()
    for i, action in enumerate(order.actions):
        forward, backward, weight, *_ = times[action.stage]
        duration = {"F": forward, "B": backward + weight}[action.kind]
        for source in (int(order.before[i]), int(order.source[i])):
            graph.add_edge(source, i, weight=duration)
    return nx.dag_longest_path_length(graph)


PAIRS = (
    Pair(
        "dead code: ancestors of the outputs",
        _traced,
        lambda graph: {op.name for op in drop_dead(graph).ops},
        _needed_by_networkx,
        lambda own, other: own == other,
    ),
    Pair(
        "equal stages: isomorphism",
        _copy_of_itself,
        lambda pair: wiring_of(pair[0]) == wiring_of(pair[1]),
        _isomorphic_by_networkx,
        lambda own, other: own and other,
    ),
    Pair(
        "step of a schedule: longest path",
        _pipeline,
        lambda pipeline: float(ends(*pipeline)[1].max()),
        _longest_path,
        lambda own, other: bool(np.isclose(own, other, rtol=1e-12)),
    ),
    Pair(
        "elimination order: least factor, least degree",
        _priced,
        elimination_order,
        lambda table: nx.approximation.treewidth_min_degree(nx.Graph((edge.a, edge.b) for edge in table.edges)),
        lambda own, other: len(own) > other[0],  # other heuristics: only the sizes of the results compare
    ),
)


def measure(pair: Pair) -> Row:
    """The least CPU seconds of several runs of both versions."""
    made = pair.made()
    assert pair.agree(pair.own(made), pair.of_networkx(made)), f"{pair.name}: the two versions give different results"
    own_s, networkx_s = (_least_s(work, made) for work in (pair.own, pair.of_networkx))
    return {"row": pair.name, "own_s": own_s, "networkx_s": networkx_s}


def _least_s(work: Callable[[Any], Any], made: Any) -> float:
    taken = []
    for _ in range(_REPEAT):
        before = process_time()
        work(made)
        taken.append(process_time() - before)
    return min(taken)


def _cells(row: Row) -> Iterable[Cells]:
    own_s, other_s = row["own_s"], row["networkx_s"]
    yield row["row"], f"{1e3 * own_s:.3g}", f"{1e3 * other_s:.3g}", f"{other_s / own_s:.1f}"


TABLE = Table(
    "graph algorithms",
    f"CPU time of algorithms of the package's own and of networkx on {_CASE.title}, the least of {_REPEAT} runs; the "
    "schedule has 8 stages and 64 microbatches. networkx simulates one set of times, autopar many at once. The making "
    "of its graph counts: planning has no other use for it.",
    ("algorithm", "own, ms", "networkx, ms", "ratio"),
    tuple(pair.name for pair in PAIRS),
    _cells,
)


def main(arguments: list[str] | None = None) -> None:
    """Measure and save."""
    settings = parser(__doc__).parse_args(arguments)
    wanted = selected([TABLE], settings, "graph_algorithms")[TABLE.title]
    found = [measure(pair) for pair in PAIRS if pair.name in wanted]
    add("graph_algorithms", [TABLE], {TABLE.title: found}, {"repeat": _REPEAT})


if __name__ == "__main__":
    main()
