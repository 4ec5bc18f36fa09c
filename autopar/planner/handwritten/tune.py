"""`tuned`: the best hand plan, of every grid and every flavour, under the same cost model as the search."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations

from autopar.costmodel.cluster.hardware import Cluster, check_mesh
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.overlap.pass_time import has_overlap
from autopar.costmodel.pricing.encode_decode import decode, encode, with_parameter_buckets
from autopar.costmodel.pricing.price import PricedStep, price
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.planner.handwritten.hand_plan import SEQUENCE_WAYS, HandPlan, ModelFacts, format_hand_plan, outlined
from autopar.plans.serialise import HandCosts
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.signature import Candidates
from autopar.search.deadline import NEVER, Deadline
from autopar.search.table import cost_of, memory_of


@dataclass(frozen=True)
class Tried:
    """One hand plan, with its costs by the folded table."""

    name: str
    plan: HandPlan
    mesh: Mesh
    costs: HandCosts


@dataclass(frozen=True)
class Tuned:
    """`best`: the fastest hand plan within the memory limit, None if there is none; `tried`: all, fastest first."""

    best: Tried | None
    assignment: Assignment | None
    tried: tuple[Tried, ...]

    @property
    def starts(self) -> list[Assignment]:
        """The best, as starts of a search."""
        return [] if self.assignment is None else [self.assignment]


def tuned(
    graph: Graph,
    folded: Folded,
    mesh: Mesh | Devices,
    cluster: Cluster,
    *,
    memory_limit_bytes: float = math.inf,
    training: Training = WHOLE_BATCH,
    most_tensor: float = math.inf,
    deadline: Deadline = NEVER,
) -> Tuned:
    """The hand plans ddp, zero and megatron in all flavours, priced: for each choice of tensor axes of a mesh.

    On `Devices`: for each factorisation into dp x tp (tp inner) with at most `most_tensor` devices of tp. After
    `deadline` no further factorisation is tried. MeshError if the devices do not match the cluster.
    """
    check_mesh(cluster, mesh.num_devices)
    outline = outlined(graph, folded)
    fitting: dict[tuple[Mesh, HandPlan], tuple[Tried, Assignment]] = {}
    for grid in (mesh,) if isinstance(mesh, Mesh) else _grids(mesh.num_devices, most_tensor):
        if fitting and deadline.is_past:
            break
        plans = tuple(_plans(grid, outline) if isinstance(mesh, Mesh) else _plans_by_name(grid, outline))
        for tried, assignment in _priced(graph, outline, plans, grid, cluster, training):
            fitting[grid, tried.plan] = tried, assignment
    tried = sorted((one for one, _ in fitting.values()), key=lambda one: one.costs.step_s)
    best = next((one for one in tried if one.costs.memory_bytes <= memory_limit_bytes), None)
    return Tuned(best, outline.short.expand(fitting[best.mesh, best.plan][1]) if best else None, tuple(tried))


def _grids(num_devices: int, most_tensor: float) -> Iterator[Mesh]:
    """The meshes dp x tp of `num_devices`, row-major, without axes of size 1."""
    for tensor in (size for size in range(1, num_devices + 1) if num_devices % size == 0 and size <= most_tensor):
        sizes = {"dp": num_devices // tensor, "tp": tensor}
        named = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
        yield Mesh(tuple(named.values()), tuple(named))


def _plans_by_name(mesh: Mesh, outline: ModelFacts) -> Iterator[HandPlan]:
    """The hand plans whose tensor axis is the one called tp."""
    return (
        plan
        for plan in _plans(mesh, outline)
        if [mesh.axis_names[axis] for axis in plan.tensor_axes] == ["tp"] * mesh.axis_names.count("tp")
    )


def _plans(mesh: Mesh, outline: ModelFacts) -> Iterator[HandPlan]:
    """The hand plans with every choice of tensor axes, experts on others, and every flavour of these; the sequence is
    split on axes called cp.
    """
    for axes in chain.from_iterable(combinations(range(mesh.ndim), count) for count in range(mesh.ndim + 1)):
        for flavour in ("ddp", "zero2", "zero3") if len(axes) < mesh.ndim else ("ddp",):
            for experts in outline.expert_axes(tuple(axis for axis in range(mesh.ndim) if axis not in axes), mesh):
                for is_sp in (False, True) if axes else (False,):
                    yield HandPlan(axes, is_sp, flavour, expert_axes=experts)
        sequence = tuple(axis for axis, name in enumerate(mesh.axis_names) if name == "cp" and axis not in axes)
        for way in SEQUENCE_WAYS if sequence else ():
            for flavour in ("ddp", "zero2", "zero3"):
                yield HandPlan(axes, bool(axes), flavour, sequence_axes=sequence, sequence_by=way)


def _priced(
    graph: Graph, outline: ModelFacts, plans: tuple[HandPlan, ...], mesh: Mesh, cluster: Cluster, training: Training
) -> Iterator[tuple[Tried, Assignment]]:
    """The plans, priced by a table whose options are those of these plans."""
    if not plans:
        return
    short = outline.short
    followed = outline.follow(plans, annotate(short.graph, mesh, short.folded), mesh)
    priced = price(graph, short.folded, _taken(followed.values()), mesh, cluster, PricedStep(training))
    for plan, assignment in followed.items():
        choice = encode(priced, short.graph, short.folded, assignment)
        step_s = cost_of(priced.table, choice)
        if has_overlap(cluster, training):
            bare = decode(replace(priced, parameter_buckets={}), short.graph, short.folded, choice)
            whole = with_parameter_buckets(short.expand(bare), graph, priced.parameter_buckets, mesh, cluster)
            step_s = evaluate(graph, whole, mesh, cluster, training=training).step_s
        costs = HandCosts(step_s, round(memory_of(priced.table, choice)))
        yield Tried(format_hand_plan(plan, mesh), plan, mesh, costs), assignment


def _taken(assignments: Iterable[Assignment]) -> Candidates:
    def options(field: str) -> Mapping:
        chosen: dict = {}
        for assignment in assignments:
            for name, option in getattr(assignment, field).items():
                chosen.setdefault(name, {})[option] = None
        return {name: tuple(layouts) for name, layouts in chosen.items()}

    return Candidates(options("strategies"), options("layouts"), options("outputs"), ())
