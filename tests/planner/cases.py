"""Zoo models, traced and annotated once."""

import functools
from collections import Counter

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.evaluate import evaluate
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.plans.plan import Plan, plan_of
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.signature import Candidates
from tests.zoo import build

MESH = Mesh((2, 2), ("dp", "tp"))
CPU = load_cluster("cpu")


@functools.cache
def traced(name: str) -> Graph:
    case = build(name)
    return trace(skeleton(case.model), case.args, case.kwargs)


@functools.cache
def folded(name: str) -> Folded:
    return fold(traced(name))


@functools.cache
def annotated(name: str, mesh: Mesh = MESH) -> Candidates:
    return annotate(traced(name), mesh, folded(name))


def by_hand(name: str, kind: str, mesh: Mesh = MESH) -> Assignment:
    return hand_plan(parse_hand_plan(kind, mesh), traced(name), folded(name), annotated(name, mesh), mesh)


@functools.cache
def hand_made(name: str, kind: str = "megatron", mesh: Mesh = MESH) -> Plan:
    """A plan that needed no search."""
    return plan_of(traced(name), by_hand(name, kind, mesh), mesh, CPU)


def tally(name: str, assignment: Assignment, mesh: Mesh = MESH) -> Counter[tuple[str, str, str]]:
    """(phase, kind, axis) -> how many collectives a step."""
    costs = evaluate(traced(name), assignment, mesh, CPU)
    found = [planned.collective for planned in costs.collectives]
    return Counter((c.phase, c.kind, mesh.name_of(c.axes)) for c in found)
