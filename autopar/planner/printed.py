"""`printed`: each artifact of planning as text, for `autopar explain --watch`."""

from collections.abc import Iterable
from functools import singledispatch
from typing import Any

from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph
from autopar.ir.print_graph import format_graph
from autopar.planner.pipeline.cut_stages import Cut
from autopar.planner.pipeline.sweep import Staged
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.placement import format_layout
from autopar.sbp.signature import Candidates
from autopar.search.table import Choice, CostTable
from autopar.units import format_bytes, format_seconds


@singledispatch
def printed(artifact: Any) -> str:
    """The text of an artifact of planning; TypeError for any other object."""
    raise TypeError(
        f"no text is known for a {type(artifact).__name__}; expected an artifact of planning, such as a Graph or a Plan"
    )


printed.register(Graph, format_graph)


@printed.register
def _(folded: Folded) -> str:
    """The repeats, then for every op and input the representative of its class."""
    repeats = [f"{repeat.count} times {len(repeat.ops)} ops: {' '.join(repeat.ops)}" for repeat in folded.repeats]
    shared = [f"{name} is planned as {same}" for name, same in folded.representative.items() if name != same]
    return _lines([*(repeats or ["nothing repeats"]), "", *shared])


@printed.register
def _(item: Candidates) -> str:
    ops = [
        f"{name}: {len(own)} strategies\n" + _lines(f"  {one}" for one in own) for name, own in item.strategies.items()
    ]
    stored = [
        f"{name}: {' '.join(map(format_layout, own))}" for name, own in (*item.layouts.items(), *item.outputs.items())
    ]
    return _lines([*ops, "stored, handed in and handed out", *stored])


@printed.register
def _(table: CostTable) -> str:
    nodes = [
        f"{node.name}: {len(node.cost_s)} choices, {format_seconds(node.cost_s.min())} to"
        f" {format_seconds(node.cost_s.max())}, {format_bytes(node.memory_bytes.min())} to"
        f" {format_bytes(node.memory_bytes.max())}"
        for node in table.nodes
    ]
    edges = [
        f"{table.nodes[edge.a].name}, {table.nodes[edge.b].name}: up to {format_seconds(edge.cost_s.max())}, "
        f"{format_bytes(edge.memory_bytes.max())}"
        for edge in table.edges
    ]
    limit = (
        "no memory limit"
        if table.memory_limit_bytes == float("inf")
        else f"within {format_bytes(table.memory_limit_bytes)}"
    )
    return _lines([f"{len(nodes)} nodes, {len(edges)} edges, {limit}", *nodes, "", *edges])


@printed.register
def _(choice: Choice) -> str:
    """The cost and bound, and the strategy index of each node of the table, in its order."""
    taken = " ".join(map(str, choice.strategies))
    return _lines([f"{format_seconds(choice.cost_s)} a step, at least {format_seconds(choice.lower_bound_s)}", taken])


@printed.register(tuple)
def _(found: tuple[Staged, ...]) -> str:
    """The points of the sweep."""
    rows = (f"{format_seconds(one.step_s)}, {format_bytes(max(one.rank_bytes))}: {one.name}" for one in found)
    return _lines(rows) if found else "nothing fits\n"


@printed.register
def _(cut: Cut) -> str:
    """The graph of each stage."""
    return "\n".join(f"stage {number}\n{format_graph(stage.graph)}" for number, stage in enumerate(cut.stages))


@printed.register(Plan)
@printed.register(StagedPlan)
def _(plan: Plan | StagedPlan) -> str:
    return plan.explain() + "\n"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
