"""Under a memory limit some of the inner layers are planned cheaply, the others lightly."""

import functools
from dataclasses import replace

import pytest

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.pricing.encode_decode import decode, encode
from autopar.costmodel.pricing.price import Priced, price
from autopar.costmodel.training import Training
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.folding.segments import Segments, ends_apart, segmented
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.models.catalogue import build_model
from autopar.planner.budget import Budget
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.layouts.two_groups import mixture, two_groups
from autopar.planner.request import PlanRequest
from autopar.sbp.candidates import annotate
from autopar.search.deadline import Deadline
from autopar.search.solve import solve
from autopar.search.table import CostTable, memory_of

MESH, V100 = parse_mesh("4x2"), load_cluster("v100")


SIZES = {"gpt2": {"layers": 8, "batch": 32, "sequence": 512}, "llama3-8b": {"layers": 8, "batch": 8, "sequence": 2048}}


@functools.cache
def traced(name: str) -> Graph:
    example = build_model(name, **SIZES[name])
    return trace(skeleton(example.model), example.args, dict(example.kwargs))


def priced(name: str, segments: Segments) -> tuple[Folded, Priced]:
    folded = segmented(fold(traced(name)), traced(name), segments)
    return folded, price(traced(name), folded, annotate(traced(name), MESH, folded), MESH, V100)


@functools.cache
def alike(name: str) -> tuple[Folded, Priced]:
    return priced(name, ends_apart(fold(traced(name))))


def limited(table: CostTable, share: float) -> CostTable:
    """The limit is so far from the least memory that would do to what the cheapest choice takes."""
    memory = CostTable(
        tuple(replace(node, cost_s=node.memory_bytes) for node in table.nodes),
        tuple(replace(edge, cost_s=edge.memory_bytes) for edge in table.edges),
    )
    least, free = memory_of(table, solve(memory).strategies), solve(table).memory_bytes
    return replace(table, memory_limit_bytes=least + share * (free - least))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_it_costs_no_more_than_a_plan_whose_layers_are_alike(share, name="gpt2"):
    table = limited(alike(name)[1].table, share)
    same = solve(table, deadline=Deadline.after(5.0), enough_gap=5e-3)
    plan = make_plan(
        traced(name), MESH, V100, PlanRequest(memory_limit_bytes=table.memory_limit_bytes), budget=Budget.of(5.0)
    )
    assert plan.costs.total_memory_bytes <= table.memory_limit_bytes
    assert plan.costs.step_s <= same.cost_s * (1 + 5e-3)
    assert plan.gap <= 0.02


def test_the_bound_holds_of_every_plan_in_two_groups(name="gpt2"):
    table = limited(alike(name)[1].table, 0.1)  # so little that layers alike leave a gap
    around = solve(table, is_brief=True).around
    over, within = (memory_of(table, end) for end in around)
    apart, share = ends_apart(fold(traced(name))), (table.memory_limit_bytes - within) / (over - within)
    plan = make_plan(traced(name), MESH, V100, PlanRequest(memory_limit_bytes=table.memory_limit_bytes))
    assert "groups" in plan.bound_of
    in_groups = replace(priced(name, two_groups(apart, share))[1].table, memory_limit_bytes=table.memory_limit_bytes)
    assert plan.lower_bound_s <= solve(in_groups, deadline=Deadline.after(5.0), enough_gap=5e-3).cost_s * (1 + 1e-9)


def test_two_kinds_of_layers_fill_the_memory_of_a_large_model():
    example = build_model("llama3-8b", batch=64, sequence=8192)
    graph = trace(skeleton(example.model), example.args, dict(example.kwargs))
    request = PlanRequest(training=Training(optimizer="adamw-master"))
    plan = make_plan(graph, parse_mesh("32x8"), load_cluster("h100"), request)
    # With layers alike the best plan takes 1.6 % more than the price of memory proves, whatever the time.
    assert "groups" in plan.bound_of and plan.gap <= 5e-3
    assert sum(repeat.count for repeat in plan.folded.repeats) >= 30 and len(plan.folded.repeats) == 2
    assert plan.costs.total_memory_bytes <= plan.memory_limit_bytes


def test_each_copy_is_as_in_the_one_or_the_other_plan(name="llama3-8b"):
    folded, problem = alike(name)
    table = limited(problem.table, 0.5)
    above, within = (decode(problem, traced(name), folded, end) for end in solve(table, is_brief=True).around)
    apart = ends_apart(fold(traced(name)))
    segments = two_groups(apart, 0.5)
    assert segments == ((1, 3, 3, 1),)
    mixed = mixture(traced(name), fold(traced(name)), apart, 0.5, above, within)
    groups, in_groups = priced(name, segments)
    choice = encode(in_groups, traced(name), groups, mixed)
    differ = {name for name in mixed.strategies if above.strategies[name] != within.strategies[name]}
    taken = {name for name in differ if mixed.strategies[name] == above.strategies[name]}
    copies = {name: copy for name, copy in numbered(name).items() if name in differ}
    assert differ and taken == {name for name, copy in copies.items() if 1 <= copy <= 3}
    costs = [evaluate(traced(name), one, MESH, V100).total_memory_bytes for one in (within, mixed, above)]
    assert costs[0] <= costs[1] <= costs[2] > costs[0]  # differing ops need not all take memory
    assert memory_of(in_groups.table, choice) == pytest.approx(costs[1], rel=1e-9)


def numbered(name: str) -> dict[str, int]:
    """Name of each op in a layer -> which layer."""
    (repeat,) = fold(traced(name)).repeats
    names = [op.name for op in traced(name).ops]
    first, block = names.index(repeat.ops[0]), len(repeat.ops)
    return {name: i // block for i, name in enumerate(names[first : first + block * repeat.count])}
