"""`function_plan`: a hand-written `parallelize(model, mesh)` as a plan, beside what DTensor has of each parameter."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from autopar.costmodel.activations.recomputable import saves
from autopar.costmodel.cluster.hardware import Cluster
from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.graph import Graph, Input
from autopar.mesh import Mesh
from autopar.planner.budget import Budget
from autopar.planner.handwritten.fake_ranks import HandFunction, place_of
from autopar.planner.handwritten.hand_plan import HandPlan, hand_plan
from autopar.planner.handwritten.hf_tp_plan import generic, weights_of
from autopar.planner.handwritten.propagate import is_kind
from autopar.planner.handwritten.written_layouts import DTensorLayout, WeightUse, WrittenLayouts, read_function
from autopar.planner.problem import Problem, Setting
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan, plan_of
from autopar.sbp.analysis.megatron_pairs import base_name, product_slots, structure_of
from autopar.sbp.assignment import Assignment, wanted_layout
from autopar.sbp.op_signatures import signatures_of
from autopar.sbp.placement import I, Layout, Placement, format_layout


@dataclass(frozen=True)
class WrittenRow:
    """Parameters that a function stores alike: their FQN with "*" for numbers, how many they are, what DTensor has, and
    the layout that is priced.
    """

    fqn: str
    count: int
    dtensor: str
    priced: str


@dataclass(frozen=True)
class WrittenPlan:
    """The plan of a hand-written function; `remarks`: sentences on what is priced as something else."""

    plan: Plan
    rows: tuple[WrittenRow, ...]
    remarks: tuple[str, ...]


def function_plan(
    function: HandFunction,
    name: str,
    model: nn.Module,
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    request: PlanRequest,
) -> WrittenPlan:
    """The plan of what `function(model, device mesh)` does to `model`, traced as `graph`; `name`: what it is called.

    The products that it splits, the sequence between them, what it shards and gathers again, and the activations that
    it computes again are priced as a hand plan's are. A parameter's parts have the sizes that DTensor gives them; where
    fully_shard splits a dim that is split for tensors already, another dim is priced. PlanError, with the line of the
    function, for what it does that cannot be priced.
    """
    graph = request.training.reduced(graph)
    written = read_function(function, skeleton(model), mesh, weight_uses(graph))
    request = _as_written(request, graph, written)
    stored = {item.fqn: _stored_of(item, written, function) for item in graph.of_kind("parameter")}
    problem = Setting(graph, mesh, cluster, request.on(cluster), Budget.of()).problem(_folded(graph, stored))
    assignment = _assignment(problem, written, stored, mesh, function)
    choice = problem.encode(assignment)
    limit = request.on(cluster).limit_bytes
    plan = plan_of(
        graph,
        assignment if choice is None else problem.decode(choice),
        mesh,
        cluster,
        training=request.training,
        memory_limit_bytes=limit,
    )
    rows = tuple(_rows(graph, stored, plan.assignment))
    return WrittenPlan(
        replace(plan, found_by=f"hand plan {name}"),
        rows,
        (*written.remarks, *_computed(request, written), *_differing(graph, stored, plan.assignment)),
    )


def _computed(request: PlanRequest, written: WrittenLayouts) -> Iterator[str]:
    own = request.training.param_dtype
    if written.param_dtype != own:
        yield (
            f"It computes in {written.param_dtype or 'the dtype of the parameters'}, priced in {own or 'theirs'}: the"
            f" policy's param_dtype is priced with --param-dtype {written.param_dtype or '(none)'}."
        )


def weight_uses(graph: Graph) -> dict[str, WeightUse]:
    """FQN -> use of each weight of a product or lookup by which plans are written; of a tied one the FQN in the module
    that calls.
    """
    structure, uses = structure_of(graph), {}
    weights, tables = weights_of(graph, structure), {item.value.name: item.fqn for item in graph.of_kind("parameter")}
    aliases = {item.fqn: item.aliases for item in graph.of_kind("parameter")}
    for op in graph.ops:
        num_dims = len(op.outputs[0].shape)
        if base_name(op) == "embedding" and op.inputs[0].name in tables:
            uses.setdefault(tables[op.inputs[0].name], WeightUse(-1, 0, num_dims))
        elif fqn := weights.get(op.name):
            slots = product_slots(op, structure.from_parameters)
            assert slots is not None, "only products have weights"
            column, row = (
                [s.inputs[slots[1]].dim for s in signatures_of(op) if is_kind(kind, op, s, slots)]
                for kind in ("column", "row")
            )
            own = next((name for name in aliases.get(fqn, ()) if name.rpartition(".")[0] == op.module), fqn)
            uses[own] = WeightUse(next(iter(column), -1), next(iter(row), -1), num_dims)
    return uses


def _as_written(request: PlanRequest, graph: Graph, written: WrittenLayouts) -> PlanRequest:
    """The request with what the function decides of all else than layouts."""
    given = replace(
        request.given,
        recomputed=tuple(_regions(graph, written.checkpointed)),
        state_on_host=frozenset(x.value.name for x in graph.of_kind("parameter") if x.fqn in written.on_host),
    )
    dtype = written.reduce_dtype or request.training.reduce_dtype
    return replace(request, given=given, training=replace(request.training, reduce_dtype=dtype))


def _regions(graph: Graph, modules: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The ops of each module but for those at its end that save nothing, of which there is nothing to compute again.

    Nor are ops before them counted that other modules share. Modules inside of others are theirs.
    """
    for module in modules:
        if any(module.startswith(f"{other}.") for other in modules):
            continue
        own = [n for n, op in enumerate(graph.ops) if op.module == module or op.module.startswith(f"{module}.")]
        saving = [n for n in own if saves(graph.ops[n])]
        if not saving:
            continue
        first = next(n for n in own if set(range(n, saving[0])) <= set(own))
        if set(range(first, saving[-1] + 1)) - set(own):
            raise PlanError(
                f"activations of module {module} are to be computed again, whose ops do not follow one another in the"
                " traced graph: wrap whole blocks"
            )
        yield tuple(op.name for op in graph.ops[first : saving[-1] + 1])


def _stored_of(item: Input, written: WrittenLayouts, function: HandFunction) -> DTensorLayout:
    """The layout of a parameter, which all its names must have."""
    names = [name for name in (item.fqn, *item.aliases) if name in written.stored]
    layouts = {written.stored[name].layout for name in names}
    if len(layouts) > 1:
        raise PlanError(
            f"{place_of(function)} stores {' and '.join(names)}, which are one tied parameter, in several layouts:"
            " give them one"
        )
    return written.stored[names[0]]


def _folded(graph: Graph, stored: Mapping[str, DTensorLayout]) -> Folded:
    """The fold of the graph with the first and last copies of a repeat apart, as plans by name have it, or where copies
    of a layer are stored in several ways one with a class for each op.
    """
    folded = fold(graph)
    folded = segmented(folded, graph, ends_apart(folded))
    by_class: dict[str, set[Layout]] = {}
    for item in graph.of_kind("parameter"):
        by_class.setdefault(folded.representative[item.value.name], set()).add(stored[item.fqn].layout)
    if all(len(layouts) == 1 for layouts in by_class.values()):
        return folded
    return Folded({name: name for name in folded.representative}, ())


def _assignment(
    problem: Problem, written: WrittenLayouts, stored: Mapping[str, DTensorLayout], mesh: Mesh, function: HandFunction
) -> Assignment:
    graph, tensor_axes = problem.graph, written.tensor_axes
    others = [axis for axis in range(mesh.ndim) if axis not in tensor_axes]
    is_sharded = any(one.layout[axis].is_split for one in stored.values() for axis in others)
    flavour = "ddp" if not is_sharded else "zero3" if written.regathered else "zero2"
    plan = HandPlan(tensor_axes, written.is_sequence_parallel, flavour, is_hf=bool(tensor_axes))
    styles = _by_reader(graph, written.styles)
    found = hand_plan(plan, graph, problem.folded, problem.everything, mesh, styles)
    layouts, again = dict(found.layouts), set()
    for item in graph.of_kind("parameter"):
        name, wanted = item.value.name, stored[item.fqn].layout
        offered = problem.everything.layouts[problem.folded.representative[name]]
        layouts[name] = _nearest(wanted, offered, others, mesh)
        if any(layouts[name][axis] != wanted[axis] for axis in tensor_axes):
            raise PlanError(
                f"{place_of(function)} stores {item.fqn} of shape {list(item.value.shape)} as {stored[item.fqn].text},"
                f" which no plan on mesh {mesh} has: it has {format_layout(layouts[name])}"
            )
        read = [wanted_layout(graph, found, use) for use in graph.uses.get(name, ()) if use.user in found.strategies]
        if any(_as_read(layout[axis]) != wanted[axis] for layout in read for axis in tensor_axes):
            raise PlanError(
                f"{place_of(function)} stores {item.fqn} as {stored[item.fqn].text}, and in the nearest plan ops"
                f" read it as {' and '.join(sorted(set(map(format_layout, read))))}: what runs so cannot be priced"
            )
        if (
            name in found.regathered
            and item.fqn in written.regathered
            and any(layouts[name][a].is_split for a in others)
        ):
            again.add(name)
    return replace(
        found,
        layouts=layouts,
        regathered=frozenset(again),
        recomputed=problem.priced.given.recomputed,
        state_on_host=problem.priced.given.state_on_host,
    )


def _as_read(placement: Placement) -> Placement:
    """The placement in which a parameter is stored that is read so."""
    return placement if placement.is_split else I


def _by_reader(graph: Graph, styles: Mapping[str, str]) -> dict[str, str]:
    """The styles by FQN of a product's weight, and of a lookup's module."""
    tables = {item.value.name: item.fqn for item in graph.of_kind("parameter")}
    lookups = {op.module: tables.get(op.inputs[0].name) for op in graph.ops if base_name(op) == "embedding"}
    of_modules = {module: styles[fqn] for module, fqn in lookups.items() if fqn in styles}
    aliases = {alias for item in graph.of_kind("parameter") for alias in item.aliases}
    of_modules |= {fqn.rpartition(".")[0]: styles[fqn] for fqn in aliases & styles.keys()}
    return {fqn: style for fqn, style in styles.items() if style != "embedding_rowwise"} | of_modules


def _nearest(wanted: Layout, offered: tuple[Layout, ...], others: list[int], mesh: Mesh) -> Layout:
    """`wanted`, or the layout with as many parts on axes `others`, that differs least, and is as `wanted` elsewhere.

    A dim that is split on an axis of tensors is not split by another axis before: those parts would not be DTensor's,
    whose fully_shard splits the part of a rank.
    """
    tensors = {p.dim for axis, p in enumerate(wanted) if axis not in others and p.is_split}

    def key(layout: Layout) -> tuple[bool, int, bool, int]:
        is_other = any(layout[axis] != p for axis, p in enumerate(wanted) if axis not in others)
        pairs = [(layout[axis], wanted[axis]) for axis in others]
        missing = math.prod(mesh.shape[axis] for axis, (a, b) in zip(others, pairs) if a.is_split != b.is_split)
        nested = any(a.is_split and a.dim in tensors for a, _ in pairs)
        return is_other, missing, nested, sum(a != b for a, b in pairs)

    return min(offered, key=key)


def _rows(graph: Graph, stored: Mapping[str, DTensorLayout], assignment: Assignment) -> Iterator[WrittenRow]:
    counts: dict[tuple[str, str, str], int] = {}
    for item in graph.of_kind("parameter"):
        key = generic(item.fqn), stored[item.fqn].text, format_layout(assignment.layouts[item.value.name])
        counts[key] = counts.get(key, 0) + 1
    for (fqn, text, layout), count in counts.items():
        yield WrittenRow(fqn, count, text, layout)


def _differing(graph: Graph, stored: Mapping[str, DTensorLayout], assignment: Assignment) -> Iterator[str]:
    """Sentences on the parameters that are priced in another layout than DTensor has."""
    layouts = {item.fqn: assignment.layouts[item.value.name] for item in graph.of_kind("parameter")}
    is_strided = {fqn: "_StridedShard" in stored[fqn].text for fqn in layouts}
    others = [fqn for fqn, layout in layouts.items() if layout != stored[fqn].layout and not is_strided[fqn]]
    if others:
        yield (
            f"{len(others)} parameters, {others[0]} first, have dims that the ranks do not divide: they are priced in"
            " another layout, as the table shows."
        )
    if any(is_strided.values()):
        yield (
            "_StridedShard: fully_shard splits a dim that is split already; priced with another dim of it in as many"
            " parts, in which each rank has as many bytes and gathers as many."
        )
