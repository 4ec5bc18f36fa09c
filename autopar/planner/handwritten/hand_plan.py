"""Hand plans: plans as people write them, as points of the search space."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from types import MappingProxyType

from autopar.costmodel.inner_collectives import inner_collectives
from autopar.errors import PlanError
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph, Op
from autopar.ir.op_facts import ATTENTION, FLEX_ATTENTION, family
from autopar.mesh import Mesh
from autopar.planner.handwritten.complete_layouts import Moved, ParameterStorage, bytes_moved, complete
from autopar.planner.handwritten.hf_tp_plan import hf_structure
from autopar.planner.handwritten.propagate import Option, Options, follow_batch, follow_tensors, is_own
from autopar.sbp.analysis.megatron_pairs import Structure, structure_of
from autopar.sbp.analysis.sample_blocks import Short, shorten
from autopar.sbp.analysis.sequence_dim import batch_arguments, sequence_dims
from autopar.sbp.analysis.stacked_weights import num_experts
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import I, Layout, Placement, S
from autopar.sbp.signature import Candidates, Signature, Strategy

NO_STYLES: Mapping[str, str] = MappingProxyType({})
FLAVOURS = ("ddp", "zero1", "zero2", "zero3")
# How attention gets the keys of other parts of the sequence, as Megatron calls it (cp_comm_type): around a ring, all
# at once, or by an exchange of heads for tokens.
P2P, ALL_GATHER, A2A = "p2p", "all_gather", "a2a"
SEQUENCE_WAYS = (P2P, ALL_GATHER, A2A)
_SAME = {"fsdp": "zero3"}  # PyTorch's name for it


@dataclass(frozen=True, slots=True)
class HandPlan:
    """A hand plan: `tensor_axes` split tensors as Megatron does (arXiv:1909.08053), all other mesh axes the batch.

    `expert_axes`: of these other axes, those that split experts too, between which rows are exchanged by expert.
    `sequence_axes`: those of the other axes that split the sequence in place of the batch (context parallelism), with
    attention `sequence_by` one of `SEQUENCE_WAYS`.

    `is_hf`: they split tensors as the transformers model's own plan says. `is_sequence_parallel`: activations between
    tensor-parallel regions are split along the sequence (arXiv:2205.05198). `flavour`: the way in which the data axes
    store parameters and their state: whole ("ddp") or split (the stages of ZeRO, arXiv:1910.02054). "zero2" gathers a
    parameter once a step, "zero3" for forward and again for backward, which keeps it for less time. With one backward a
    step "zero1" is the same plan as "zero2": they differ only in whether gradients are whole between several backwards,
    which is not counted.
    """

    tensor_axes: tuple[int, ...] = ()
    is_sequence_parallel: bool = False
    flavour: str = "ddp"
    is_hf: bool = False
    expert_axes: tuple[int, ...] = ()
    sequence_axes: tuple[int, ...] = ()
    sequence_by: str = P2P


def parse_hand_plan(text: str, mesh: Mesh) -> HandPlan:
    """The hand plan that `text` describes on `mesh`.

    'ddp', 'zero1', 'zero2', 'zero3': all axes split the batch. 'megatron': all but the last do. It takes options after
    a colon: 'dp=8', 'tp=8' for its degrees, outer axes first; 'tp=a0+a2' for the axes by name; 'sp'; a flavour of its
    data axes; 'ep=8' for the ranks that share a set of experts, on the inner data axes ('ep=a1': by name), and without
    tensor axes if that is the only degree; 'cp=8' likewise for the ranks that share a sequence, and one of
    `SEQUENCE_WAYS`. 'hf' has the same options and is the plan that a transformers model has of its own. Options alone,
    such as 'ep=8,tp=2' or 'fsdp,ep=8', are those of 'megatron', of which tensor axes must be given; 'fsdp' is 'zero3'.
    PlanError if it is none of these or the degrees are no products of mesh axes.

    >>> plan = parse_hand_plan("megatron:dp=8,tp=8,sp,zero3", Mesh((2, 4, 8), ("a0", "a1", "a2")))
    >>> plan == HandPlan(tensor_axes=(2,), is_sequence_parallel=True, flavour="zero3")
    True
    """
    name, has_name, rest = text.partition(":")
    is_named = bool(has_name) or name in ("megatron", "hf")
    words = [_SAME.get(word.strip(), word.strip()) for word in (rest if is_named else text).split(",") if word.strip()]
    if not is_named and {*FLAVOURS, "dp", "tp", "ep", "cp"} & {word.partition("=")[0] for word in words}:
        name = "megatron"
    flavours, ways = ([word for word in words if word in known] for known in (FLAVOURS, SEQUENCE_WAYS))
    given = (word.partition("=") for word in words)
    degrees = {key: size for key, is_given, size in given if is_given and key in ("dp", "tp", "ep", "cp")}
    if (
        name not in ("megatron", "hf")
        or max(len(flavours), len(ways)) > 1
        or len(words) != len(flavours) + len(ways) + len(degrees) + ("sp" in words)
        or (ways and "cp" not in degrees)
    ):
        example = f"megatron:dp={math.prod(mesh.shape[:-1])},tp={mesh.shape[-1]}"
        raise PlanError(
            f"no hand plan {text!r}; write {', '.join(FLAVOURS)}, fsdp, megatron or e.g. '{example}', '{example},sp'"
            f" (sequence parallel), '{example},sp,zero3', 'megatron:tp={mesh.axis_names[-1]}' (axes by name, joined by"
            f" +), 'megatron:ep={mesh.shape[-1]}' (expert parallel), 'megatron:cp={mesh.shape[-1]}' (the sequence, by"
            f" {', '.join(SEQUENCE_WAYS)}), or hf with the same options"
        )
    experts, sequence = degrees.pop("ep", ""), degrees.pop("cp", "")
    has_others = bool(experts or sequence) or not is_named
    tensor = () if has_others and not degrees else _tensor_axes(text, degrees, sequence, mesh)
    others = [axis for axis in range(mesh.ndim) if axis not in tensor]
    sequence_axes = _inner_axes(text, "cp", sequence, others, mesh)
    others = [axis for axis in others if axis not in sequence_axes]
    return HandPlan(
        tensor,
        "sp" in words,
        flavours[0] if flavours else "ddp",
        name == "hf",
        _inner_axes(text, "ep", experts, others, mesh),
        sequence_axes,
        *ways,
    )


def _inner_axes(text: str, key: str, degree: str, data_axes: list[int], mesh: Mesh) -> tuple[int, ...]:
    """The axes named in `degree`, or the last of `data_axes` with so many ranks together."""
    axes = tuple(axis for axis in data_axes if mesh.axis_names[axis] in degree.split("+"))
    if not degree or len(axes) == degree.count("+") + 1:
        return axes
    for first in range(len(data_axes)):
        if str(math.prod(mesh.shape[axis] for axis in data_axes[first:])) == degree:
            return tuple(data_axes[first:])
    raise PlanError(
        f"hand plan {text!r} does not fit mesh {mesh}: {key} must be the product of the last axes that split the"
        " batch, or names of such axes joined by +; change it"
    )


def _tensor_axes(text: str, degrees: Mapping[str, str], sequence: str, mesh: Mesh) -> tuple[int, ...]:
    """The axes of tp; with dp and `sequence`, those behind axes of both together."""
    if not degrees:
        return (mesh.ndim - 1,)
    names = degrees.get("tp", "").split("+")
    if "dp" not in degrees and set(names) <= set(mesh.axis_names):
        return tuple(sorted(map(mesh.axis_index, names)))
    possible = []
    for num in range(mesh.ndim, -1, -1):
        sizes = {"dp": math.prod(mesh.shape[:num]), "tp": math.prod(mesh.shape[num:])}
        possible.append(f"dp={sizes['dp']},tp={sizes['tp']}")
        if sequence.isdigit() and int(sequence) and "dp" in degrees:
            sizes["dp"] //= int(sequence)
        if all(str(sizes[key]) == size for key, size in degrees.items()):
            return tuple(range(num, mesh.ndim))
    raise PlanError(
        f"hand plan {text!r} does not fit mesh {mesh}: in megatron:dp=..,tp=.. dp must be the product of its first axes"
        " and tp of the others, or tp the names of axes joined by +; possible are"
        f" {', '.join(dict.fromkeys(possible))}"
    )


def format_hand_plan(plan: HandPlan, mesh: Mesh) -> str:
    """The text of a plan, which `parse_hand_plan` reads.

    >>> format_hand_plan(HandPlan((1,), True, "zero3"), Mesh((4, 8), ("a", "b")))
    'megatron:dp=4,tp=8,sp,zero3'
    >>> format_hand_plan(HandPlan((), False, "zero3", expert_axes=(1,)), Mesh((4, 8), ("a", "b")))
    'megatron:ep=8,zero3'
    """
    if not plan.tensor_axes and not plan.expert_axes and not plan.sequence_axes:
        return plan.flavour
    tensor, sequence = _num_ranks(plan.tensor_axes, mesh), _num_ranks(plan.sequence_axes, mesh)
    is_inner = plan.tensor_axes == tuple(range(mesh.ndim - len(plan.tensor_axes), mesh.ndim))
    by_name = "tp=" + "+".join(mesh.axis_names[axis] for axis in plan.tensor_axes)
    words = [f"dp={mesh.num_devices // tensor // sequence},tp={tensor}" if is_inner else by_name]
    words = words if plan.tensor_axes else []
    data_axes = [axis for axis in range(mesh.ndim) if axis not in plan.tensor_axes]
    if plan.sequence_axes:
        words += [f"cp={_degree(plan.sequence_axes, data_axes, mesh)}"]
        words += [plan.sequence_by] * (plan.sequence_by != P2P)
    data_axes = [axis for axis in data_axes if axis not in plan.sequence_axes]
    words += [f"ep={_degree(plan.expert_axes, data_axes, mesh)}"] * bool(plan.expert_axes)
    words += ["sp"] * plan.is_sequence_parallel + [plan.flavour] * (plan.flavour != "ddp")
    return f"{'hf' if plan.is_hf else 'megatron'}:{','.join(words)}"


def _degree(axes: tuple[int, ...], data_axes: list[int], mesh: Mesh) -> str:
    """The degree of parallelism on the last of `data_axes`, names of other axes."""
    if list(axes) == data_axes[-len(axes) :]:
        return str(_num_ranks(axes, mesh))
    return "+".join(mesh.axis_names[axis] for axis in axes)


def _num_ranks(axes: tuple[int, ...], mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def hand_plans(graph: Graph, folded: Folded, candidates: Candidates, mesh: Mesh) -> dict[str, Assignment]:
    """Name -> assignment of the hand plans on this mesh, without
    duplicates: starts of the search, and for comparison.
    """
    outline, plans = outlined(graph, folded), {}
    for plan, assignment in outline.follow(tuple(_useful(mesh, outline)), candidates, mesh).items():
        if assignment not in plans.values():
            plans[format_hand_plan(plan, mesh)] = assignment
    return {name: outline.short.expand(assignment) for name, assignment in plans.items()}


def _useful(mesh: Mesh, outline: "ModelFacts") -> Iterator[HandPlan]:
    """Hand plans with data parallelism on all axes or tensor parallelism on the last ones, and ways to save memory."""
    flavours = ("ddp", "zero2", "zero3")
    yield from (HandPlan(flavour=flavour) for flavour in flavours)
    for axes in outline.expert_axes(tuple(range(mesh.ndim)), mesh):
        yield from (HandPlan(flavour=flavour, expert_axes=axes) for flavour in flavours if axes)
    for first in [*range(mesh.ndim - 1, 0, -1)] or [0]:
        for flavour in flavours if first else ("ddp",):
            yield from (HandPlan(tuple(range(first, mesh.ndim)), is_sp, flavour) for is_sp in (False, True))


def hand_plan(
    plan: HandPlan,
    graph: Graph,
    folded: Folded,
    candidates: Candidates,
    mesh: Mesh,
    styles: Mapping[str, str] = NO_STYLES,
) -> Assignment:
    """The assignment of a hand plan; an op that cannot follow it is whole.

    `styles`: `hf_styles(model)`, for `is_hf`.
    """
    if plan.is_hf and not styles:
        raise PlanError("hand plan 'hf' is the model's own plan: pass styles=hf_styles(model)")
    outline = outlined(graph, folded)
    outline.check_experts(plan, mesh)
    if plan.is_hf:
        outline = replace(outline, structure=hf_structure(outline.short.graph, outline.structure, styles))
    return outline.short.expand(outline.follow((plan,), candidates, mesh)[plan])


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a model that hand plans for all meshes depend on."""

    short: Short
    structure: Structure
    sequence: Mapping[str, int]
    num_experts: int  # 0: none whose rows can be exchanged

    def expert_axes(self, data_axes: tuple[int, ...], mesh: Mesh) -> list[tuple[int, ...]]:
        """The choices of axes for experts: none, or neighbouring ones of `data_axes` that divide the experts."""
        runs = [data_axes[start:end] for start, end in combinations(range(len(data_axes) + 1), 2)]
        return [(), *(run for run in runs if self.num_experts and self.num_experts % _num_ranks(run, mesh) == 0)]

    def check_experts(self, plan: HandPlan, mesh: Mesh) -> None:
        """PlanError if experts cannot be divided as the plan says."""
        if plan.expert_axes and (self.num_experts == 0 or self.num_experts % _num_ranks(plan.expert_axes, mesh)):
            raise PlanError(
                f"hand plan {format_hand_plan(plan, mesh)!r}: the model has {self.num_experts or 'no'} experts whose"
                " rows can be exchanged, groups of at least two grouped products in turn or stacks of weights, which ep"
                " must divide; change ep or leave it out"
            )

    def follow(self, plans: tuple[HandPlan, ...], candidates: Candidates, mesh: Mesh) -> dict[HandPlan, Assignment]:
        """Hand plan -> its assignment of the short graph; common choices on the first axes are computed once."""
        graph, walks = self.short.graph, {}
        arguments = {item.value.name: () for item in graph.of_kind("argument")}
        walks[()] = _AxisChoices({op.name: () for op in graph.ops}, arguments, candidates.strategies)
        for kinds in (_kinds(plan, mesh) for plan in plans):
            for axis in range(mesh.ndim):
                if kinds[: axis + 1] not in walks:
                    walks[kinds[: axis + 1]] = self._extended(walks[kinds[:axis]], kinds[axis], axis, candidates, mesh)
        moved = bytes_moved(mesh)
        return {plan: self._completed(plan, walks[_kinds(plan, mesh)], candidates, mesh, moved) for plan in plans}

    def _extended(
        self, walk: "_AxisChoices", kind: str, axis: int, candidates: Candidates, mesh: Mesh
    ) -> "_AxisChoices":
        """`walk` with one more axis."""
        graph, same = self.short.graph, self.short.folded.representative
        classes = {same[op.name] for op in graph.ops}
        known: dict[str, tuple[Option, ...]] = {}  # of a class of ops

        def options(op: Op) -> tuple[Option, ...]:
            name = same[op.name]
            if name not in known:
                known[name] = _options(op, axis, walk.left[name], mesh)
            return known[name]

        if kind in SEQUENCE_WAYS:
            batch = _place_tokens(graph, self.sequence, candidates, walk.arguments)
            signatures = follow_batch(graph, same, partial(_by_tokens, options, kind), batch)
        elif kind in ("batch", "experts"):
            batch = _place_batch(graph, candidates, walk.arguments)
            signatures = follow_batch(graph, same, options, batch, is_by_expert=kind == "experts")
        else:
            batch = dict.fromkeys(walk.arguments, I)
            signatures = follow_tensors(
                graph, self.structure, same, options, self.sequence if kind == "tensors, sequence" else {}
            )
        return _AxisChoices(
            {name: (*prefix, signatures[name]) for name, prefix in walk.signatures.items()},
            {name: (*prefix, batch[name]) for name, prefix in walk.arguments.items()},
            {name: [one for one in walk.left[name] if one.signatures[axis] == signatures[name]] for name in classes},
        )

    def _completed(
        self, plan: HandPlan, walk: "_AxisChoices", candidates: Candidates, mesh: Mesh, moved: Moved
    ) -> Assignment:
        strategies = {name: Strategy(signatures) for name, signatures in walk.signatures.items()}
        data_axes = tuple(axis for axis in range(mesh.ndim) if axis not in plan.tensor_axes)
        return complete(
            self.short.graph,
            self.short.folded,
            candidates,
            strategies,
            walk.arguments,
            moved,
            storage=ParameterStorage(data_axes if plan.flavour != "ddp" else (), plan.flavour == "zero3"),
            counts=self.short.counts,
        )


@dataclass(frozen=True, slots=True)
class _AxisChoices:
    """The choices on the first axes: op -> signatures, argument -> placements.

    `left`: representative op -> its strategies that begin with these signatures.
    """

    signatures: Mapping[str, tuple[Signature, ...]]
    arguments: Mapping[str, Layout]
    left: Mapping[str, Sequence[Strategy]]


def _kinds(plan: HandPlan, mesh: Mesh) -> tuple[str, ...]:
    """The kind of split of each mesh axis."""
    tensors = "tensors, sequence" if plan.is_sequence_parallel else "tensors"
    kinds = dict.fromkeys(plan.tensor_axes, tensors) | dict.fromkeys(plan.expert_axes, "experts")
    kinds |= dict.fromkeys(plan.sequence_axes, plan.sequence_by)
    return tuple(kinds.get(axis, "batch") for axis in range(mesh.ndim))


def outlined(graph: Graph, folded: Folded) -> ModelFacts:
    """The outline of a graph, computed once for all hand plans and meshes."""
    short = shorten(graph, folded)
    structure = structure_of(short.graph)
    return ModelFacts(short, structure, sequence_dims(short.graph, structure), num_experts(short.graph))


def _options(op: Op, axis: int, left: Sequence[Strategy], mesh: Mesh) -> tuple[Option, ...]:
    """The options on `axis` of the strategies that are left."""
    first: dict[Signature, Strategy] = {}
    for strategy in left:
        first.setdefault(strategy.signatures[axis], strategy)
    return tuple(Option(signature, _inner_bytes(op, axis, strategy, mesh)) for signature, strategy in first.items())


def _inner_bytes(op: Op, axis: int, strategy: Strategy, mesh: Mesh) -> int:
    return sum(c.num_bytes for c in inner_collectives(op, strategy, mesh.shape) if c.axes == (axis,))


def _by_tokens(options: Options, way: str, op: Op) -> tuple[Option, ...]:
    """The options of attention that get keys this `way`, those of losses that have the rank's own tokens, and all of
    other ops.
    """
    found = options(op)
    if family(op.target) not in (ATTENTION, FLEX_ATTENTION):
        return tuple(option for option in found if is_own(option)) or found
    query = len(op.inputs[0].shape)
    if way == A2A:
        wanted = [one for one in found if one.signature.inputs[0] == S(query - 3)]
    else:
        parts = [one for one in found if one.signature.inputs[0] == S(query - 2)]
        wanted = [one for one in parts if one.signature.inputs[1].is_split == (way == P2P)]
    return tuple(wanted) or found


def _place_tokens(
    graph: Graph, sequence: Mapping[str, int], candidates: Candidates, prefixes: Mapping[str, tuple[Placement, ...]]
) -> dict[str, Placement]:
    """S(1) for every argument [batch, tokens, ...] with as many tokens as the residual stream, if its part divides."""
    shapes = {value.name: value.shape for op in graph.ops for value in op.outputs}
    sizes = {shapes[name][dim] for name, dim in sequence.items()}
    with_batch = {item.value.name for item in batch_arguments(graph) if len(item.value.shape) > 1}
    placed = {}
    for item in graph.of_kind("argument"):
        name, split = item.value.name, (*prefixes[item.value.name], S(1))
        is_fit = name in with_batch and item.value.shape[1] in sizes
        fits = is_fit and any(layout[: len(split)] == split for layout in candidates.layouts[name])
        placed[name] = S(1) if fits else I
    return placed


def _place_batch(
    graph: Graph, candidates: Candidates, prefixes: Mapping[str, tuple[Placement, ...]]
) -> dict[str, Placement]:
    """S(0), or its shares, for every argument whose first dim is the batch, if its part under `prefixes` divides."""
    with_batch = {item.value.name for item in batch_arguments(graph)}
    placed = {}
    for item in graph.of_kind("argument"):
        name, prefix = item.value.name, prefixes[item.value.name]
        after = (layout[len(prefix)] for layout in candidates.layouts[name] if layout[: len(prefix)] == prefix)
        placed[name] = next((one for one in after if one.dim == 0), I) if name in with_batch else I
    return placed
