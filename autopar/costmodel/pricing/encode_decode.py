"""Conversion between a choice of the table (an index for each entity) and an assignment of the whole graph."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.conversion_cost import parameter_times
from autopar.costmodel.pricing.flows import Entity
from autopar.costmodel.pricing.options import Stored
from autopar.costmodel.pricing.price import Priced
from autopar.errors import PlanError
from autopar.ir.folding.fold import Folded, value_classes
from autopar.ir.graph import Graph
from autopar.mesh import Mesh
from autopar.sbp.analysis.sample_blocks import classes_of
from autopar.sbp.assignment import INPUT, KEPT, OP, OUTPUT, Assignment, InBucket, conversions, names_of
from autopar.search.table import CostTable

Members = Mapping[tuple[str, str], tuple[str, ...]]


def decode(priced: Priced, graph: Graph, folded: Folded, strategies: tuple[int, ...]) -> Assignment:
    """The assignment of `graph` that gives every member of a class the option chosen for the class.

    `strategies`: of each entity of `priced`, the index of its option.
    """
    chosen: dict[tuple[str, str], Any] = {
        (entity.kind, entity.name): entity.options[index] for entity, index in zip(priced.entities, strategies)
    }
    classes = classes_of(graph, folded)
    chosen_options = {
        of: {name: chosen[of, classes[of][name]] for name in names} for of, names in graph.once(names_of).items()
    }
    assignment = replace(
        priced.given,
        strategies=chosen_options[OP],
        layouts={name: stored.layout for name, stored in chosen_options[INPUT].items()},
        kept=chosen_options[KEPT],
        outputs=chosen_options[OUTPUT],
        regathered=frozenset(name for name, stored in chosen_options[INPUT].items() if stored.is_regathered),
    )
    return with_parameter_buckets(
        assignment, graph, priced.parameter_buckets, priced.mesh, priced.cluster, classes[INPUT]
    )


def with_parameter_buckets(
    assignment: Assignment,
    graph: Graph,
    places: Mapping[str, InBucket],
    mesh: Mesh,
    cluster: Cluster,
    classes: Mapping[str, str] | None = None,
) -> Assignment:
    """`assignment` with each parameter in its bucket where that is faster than by itself.

    `places`: parameter -> its place in the bucket that may gather it or reduce its gradient. `classes`: parameter ->
    its class, if all of a class have the same layouts and readers.
    """
    of = {name: (name if classes is None else classes[name], place) for name, place in places.items()}
    example = {key: name for name, key in reversed(of.items())}
    by_name = conversions(graph, assignment, example.values())
    known: dict[Hashable, bool] = {}
    chosen: dict[Hashable, bool] = {}
    for key, name in example.items():
        first, place = by_name[name][0], places[name]
        if first.src == first.dst:
            continue
        ends = replace(first.value, name=""), (first.src,), (first.dst,)
        call = (*ends, place.num_bytes, place.is_prefetched)
        if call not in known:
            times = parameter_times(*ends, mesh.shape, cluster, bucket=place)
            known[call] = bool(times.in_bucket[0, 0])
        chosen[key] = known[call]
    buckets = {name: place for name, place in places.items() if chosen.get(of[name])}
    return replace(assignment, parameter_buckets=buckets)


def encode(priced: Priced, graph: Graph, folded: Folded, assignment: Assignment) -> tuple[int, ...]:
    """The choice of the table for an assignment, by the options of its representatives.

    If the assignment has no kept layout for a value with several uses, the cheapest one given its neighbours is taken.
    PlanError for an option that is no candidate.
    """
    return encode_members(priced, members_of(graph, folded), assignment)


def encode_members(priced: Priced, members: Members, assignment: Assignment) -> tuple[int, ...]:
    """`encode` for the graph whose values of each class are `members`, as `members_of` gives them."""
    found = [
        _index(entity, assignment, members.get((entity.kind, entity.name), (entity.name,)))
        for entity in priced.entities
    ]
    for node, index in enumerate(found):
        if index is None:
            found[node] = _cheapest(priced.table, node, found)
    return tuple(index for index in found if index is not None)


def members_of(graph: Graph, folded: Folded) -> Members:
    """(kind, class) of kept and output entities -> the names of their values."""
    members: dict[tuple[str, str], list[str]] = {}
    classes = value_classes(graph, folded)
    several = [("kept", name) for name, uses in graph.uses.items() if len(uses) > 1]
    outputs = [("output", value.name) for value in graph.placed_outputs]
    for kind, name in several + outputs:
        members.setdefault((kind, classes[name]), []).append(name)
    return {key: tuple(names) for key, names in members.items()}


def _index(entity: Entity, assignment: Assignment, names: tuple[str, ...]) -> int | None:
    """The index of the entity's option in the assignment; None if the assignment leaves it open."""
    taken = {
        "op": assignment.strategies,
        "input": assignment.layouts,
        "kept": assignment.kept,
        "output": assignment.outputs,
    }[entity.kind]
    option: Any = next((taken[name] for name in names if name in taken), None)
    if entity.kind == "input":
        option = Stored(option, entity.name in assignment.regathered)
    if option in entity.options:
        return entity.options.index(option)
    if entity.kind == "kept":
        return None
    offered = "; ".join(map(str, entity.options[:8])) + ("; ..." if len(entity.options) > 8 else "")
    raise PlanError(
        f"{entity.kind} %{entity.name}: expected one of its {len(entity.options)} candidates ({offered}), found"
        f" {option}"
    )


def _cheapest(table: CostTable, node: int, choice: list[int | None]) -> int:
    cost_s = np.array(table.nodes[node].cost_s)
    for edge in table.edges:
        if edge.a == node and choice[edge.b] is not None:
            cost_s += edge.cost_s[:, choice[edge.b]]
        elif edge.b == node and choice[edge.a] is not None:
            cost_s += edge.cost_s[choice[edge.a]]
    return int(cost_s.argmin())
