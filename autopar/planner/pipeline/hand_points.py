"""The points of a sweep by hand: pipeline depths, meshes, numbers of microbatches and hand plans, with block costs."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product

import numpy as np

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.profile_ops import Profile, Shared, profile
from autopar.costmodel.training import Training
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph
from autopar.ir.split_stages import cut_points
from autopar.mesh import Mesh
from autopar.planner.handwritten.hand_plan import SEQUENCE_WAYS, HandPlan, ModelFacts, outlined
from autopar.planner.pipeline.partition import Blocks, blocks_of
from autopar.sbp.analysis.sample_blocks import Short, fold_microbatch
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.microbatch.microbatch_graph import microbatch_counts, microbatched
from autopar.sbp.signature import Candidates

# The most numbers of microbatches tried on a mesh.
_MOST_COUNTS = 6
# The number of microbatches for each rank of a pipeline that makes its bubble small.
_FULL = 4

Profiled = tuple[HandPlan, Assignment, Blocks]


@dataclass(frozen=True, eq=False)
class Model:
    """The model for the sweep: its outline, the ops at which stages may start, and the recomputable blocks."""

    graph: Graph
    folded: Folded
    outline: ModelFacts
    starts: tuple[int, ...]  # positions of the blocks' first ops, the first 0
    recomputable: tuple[int, ...]
    counts: tuple[int, ...]  # of microbatches
    # those made so far, which no memory limit changes: by the number of microbatches, and the mesh
    of_microbatches: dict[int, ModelFacts] = field(default_factory=dict)
    candidates: dict[tuple[int, Mesh], Candidates] = field(default_factory=dict)
    assignments: dict[tuple[int, Mesh], dict[HandPlan, Assignment]] = field(default_factory=dict)
    profiles: dict[Hashable, Profiled] = field(default_factory=dict)
    indices: dict[int, np.ndarray] = field(default_factory=dict)  # `_index` of the outlines of microbatches

    @property
    def block_names(self) -> list[str]:
        """The first op of each block but the first: where stages may start."""
        return [self.graph.ops[start].name for start in self.starts[1:]]

    @cached_property
    def parameter_sizes(self) -> Mapping[int, int]:
        """Bytes of an element of a parameter as it is stored -> the number of all such elements."""
        sizes: dict[int, int] = {}
        for value in (item.value for item in self.graph.of_kind("parameter")):
            sizes[value.stored_itemsize] = sizes.get(value.stored_itemsize, 0) + math.prod(value.shape)
        return sizes

    @property
    def num_samples(self) -> int:
        """The number that data axes and microbatches together must divide: the batch's size if it cannot be cut."""
        if len(self.counts) > 1:
            return self.counts[-1]
        return next((item.value.shape[0] for item in self.graph.of_kind("argument") if item.value.shape), 1)

    def of_microbatch(self, num: int) -> ModelFacts:
        """The outline of one of `num` microbatches."""
        if num in self.of_microbatches:
            return self.of_microbatches[num]
        short = self.outline.short
        micro = microbatched(short.graph, num)
        self.of_microbatches[num] = replace(
            self.outline, short=replace(short, graph=micro.graph, folded=fold_microbatch(short.folded, micro))
        )
        return self.of_microbatches[num]


def model_of(graph: Graph, folded: Folded, *, num_stages: int = 1) -> Model:
    """The model of the whole batch's graph, computed once for all meshes; it can have `num_stages` if possible."""
    position = graph.position
    starts = (0, *(position[name] for name in cut_points(folded, graph, least=num_stages)))
    copies = {position[r.ops[0]] + k * len(r.ops) for r in folded.repeats for k in range(r.count)}
    recomputable = tuple(number for number, start in enumerate(starts) if start in copies)
    outline = outlined(graph, folded)
    return Model(graph, folded, outline, starts, recomputable, microbatch_counts(outline.short.graph))


# The axis of a grid that divides experts among some of the ranks that split the batch.
EXPERTS = "ep"


def grids(
    num_devices: int, cluster: Cluster, *, num_layers: int, most_tensor: int, num_experts: int = 0
) -> Iterator[tuple[int, Mesh]]:
    """(ranks of the pipeline, mesh dp x tp) for every factorisation of `num_devices`, stages outermost; and dp x ep, ep
    of a node at least.

    At most `num_layers` ranks and `most_tensor` devices of an axis tp; ep divides `num_experts`.
    """
    node = cluster.levels[0].size or num_devices
    for num_ranks in (n for n in range(1, min(num_devices, num_layers) + 1) if num_devices % n == 0):
        rest = num_devices // num_ranks
        for tensor in (n for n in range(1, min(rest, most_tensor) + 1) if rest % n == 0):
            sizes = {"dp": rest // tensor, "tp": tensor}
            named = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
            yield num_ranks, Mesh(tuple(named.values()), tuple(named))
        for experts in (n for n in range(node, rest) if rest % n == 0 and num_experts and num_experts % n == 0):
            yield num_ranks, Mesh((rest // experts, experts), ("dp", EXPERTS))


# The parts in which a sequence is split.
_SEQUENCE = 2, 4, 8


def with_sequence(mesh: Mesh) -> Iterator[Mesh]:
    """The meshes dp x cp x tp of as many devices as `mesh`, dp x tp, whose axis cp is taken from both in any way."""
    sizes = dict(zip(mesh.axis_names, mesh.shape))
    if not sizes.keys() <= {"dp", "tp"}:
        return
    data, tensor = sizes.get("dp", 1), sizes.get("tp", 1)
    for parts in _SEQUENCE:
        for own in (n for n in (1, *_SEQUENCE) if parts % n == 0 and tensor % n == 0 and data % (parts // n) == 0):
            named = {"dp": data * own // parts, "cp": parts, "tp": tensor // own}
            named = {name: size for name, size in named.items() if size > 1}
            yield Mesh(tuple(named.values()), tuple(named))


Point = tuple[int, Mesh, int, tuple[HandPlan, ...]]  # ranks of the pipeline, sub-mesh, number of microbatches, plans


def points(model: Model, meshes: Sequence[tuple[int, Mesh]], num_microbatches: Sequence[int]) -> list[Point]:
    """The points to try, in which every data rank has a sample of each microbatch, and whole ones of its share.

    If the batch is too small for that on all of `meshes` with the usual numbers of microbatches, fewer are tried, then
    splits of the sequence on any axis; otherwise the batch stays whole, and the search finds another split.
    """

    def those(
        counts_of: Callable[[int], Sequence[int]], divides: Callable[..., bool], *, on_any: bool = False
    ) -> list[Point]:
        found = (
            (num_ranks, mesh, num, tuple(_fitting(model.outline, mesh, partial(divides, mesh, num), on_any=on_any)))
            for num_ranks, mesh in meshes
            for num in num_microbatches or counts_of(num_ranks)
            if all(size % num == 0 for _, sizes in mesh.shares for size in sizes)
        )
        return [point for point in found if point[-1]]

    def is_even(mesh: Mesh, num: int, data: int) -> bool:
        samples = [size * len(sizes) for _, sizes in mesh.shares for size in sizes] or [model.num_samples]
        return all(each % (data * num) == 0 for each in samples)

    return (
        those(lambda num_ranks: _counts(model, num_ranks), is_even)
        or those(lambda _: model.counts, is_even)
        or those(lambda _: model.counts, is_even, on_any=True)
        or those(lambda num_ranks: _counts(model, num_ranks), lambda _, num, data: num > 0)
    )


def _counts(model: Model, num_ranks: int) -> list[int]:
    """Numbers of microbatches to try: powers of two that fill the pipeline, and times the odd part of the batch's
    samples, which a batch of 1280 needs for microbatches of one; or all possible ones if there are few.
    """
    powers, odd = [num for num in model.counts if num & (num - 1) == 0], model.counts[-1]
    while odd % 2 == 0:
        odd //= 2
    usual = powers if powers[-1] >= _FULL * num_ranks else model.counts
    times_odd = [num for num in model.counts if odd > 1 and num % odd == 0 and num // odd in powers]
    tried = (
        [num for num in some if num_ranks == 1 or num >= min(num_ranks, some[-1])][:_MOST_COUNTS]
        for some in (usual, times_odd if usual is powers else [])
    )
    return sorted({num for some in tried for num in some})


def num_data(plan: HandPlan, mesh: Mesh) -> int:
    """The number of ranks among which the plan splits the batch."""
    others = plan.tensor_axes + plan.sequence_axes
    return math.prod(size for axis, size in enumerate(mesh.shape) if axis not in others)


def _fitting(outline: ModelFacts, mesh: Mesh, divides: Callable[[int], bool], *, on_any: bool) -> Iterator[HandPlan]:
    """The plans whose data ranks the batch divides between; the sequence is split on axes called cp, or `on_any`."""
    for plan in _plans(outline, mesh):
        names = {mesh.axis_names[axis] for axis in plan.sequence_axes}
        if divides(num_data(plan, mesh)) and (on_any or names <= {"cp"}):
            yield plan


def _plans(outline: ModelFacts, mesh: Mesh) -> Iterator[HandPlan]:
    """The hand plans of the sweep: tensor parallelism with sequence parallelism, split parameters, split sequences, and
    experts divided among ranks that split the batch.

    Split parameters cost as much communication as data parallelism and take less memory.
    """
    named = tuple(axis for axis, name in enumerate(mesh.axis_names) if name == "tp")
    divided = {
        axis for axis, name in enumerate(mesh.axis_names) if name == EXPERTS and outline.expert_axes((axis,), mesh)[1:]
    }
    others = [
        axis
        for axis, name in enumerate(mesh.axis_names)
        if name != "dp" and axis not in divided and mesh.shape[axis] > 1
    ]
    inner = [tuple(others[first:]) for first in range(len(others) + 1)]
    for axes in (named,) if named else inner:
        flavours = (
            ("zero2", "zero3")
            if any(mesh.shape[axis] > 1 for axis in range(mesh.ndim) if axis not in axes)
            else ("ddp",)
        )
        data = tuple(axis for axis in range(mesh.ndim) if axis not in axes and mesh.shape[axis] > 1)
        for experts in (one for one in outline.expert_axes(data, mesh) if divided.issubset(one)):
            yield from (HandPlan(axes, bool(axes), flavour, expert_axes=experts) for flavour in flavours)
        rest = tuple(axis for axis in others if axis not in axes)
        for sequence, flavour, way in product((rest[i:] for i in range(len(rest))), ("zero2", "zero3"), SEQUENCE_WAYS):
            yield HandPlan(axes, bool(axes), flavour, sequence_axes=sequence, sequence_by=way)


def profiled(
    model: Model,
    plans: tuple[HandPlan, ...],
    num: int,
    mesh: Mesh,
    cluster: Cluster,
    training: Training,
    is_needed: Callable[[HandPlan], bool] = lambda _: True,
) -> Iterator[Profiled]:
    """(plan, its assignment of the outline's short graph, the costs of each block of the whole model) of those of
    `plans` that are needed, which is asked when it is their turn.
    """
    if cluster.groups is not None:
        counts = [count for count, _ in cluster.groups.members]
        each = [profiled(model, plans, num, mesh, one, training) for _, one in cluster.groups.members]
        for of_plan in zip(*each, strict=True):
            blocks = replace(of_plan[0][2], by_group=tuple(zip(counts, (one[2] for one in of_plan))))
            yield *of_plan[0][:2], blocks
        return
    for plan in filter(is_needed, plans):
        key = plan, num, mesh, cluster, training
        if key not in model.profiles:
            assignment = _assignments(model, plans, num, mesh)[plan]
            model.profiles[key] = plan, assignment, _blocks(model, assignment, num, mesh, cluster, training)
        yield model.profiles[key]


def _assignments(model: Model, plans: tuple[HandPlan, ...], num: int, mesh: Mesh) -> Mapping[HandPlan, Assignment]:
    """The assignments of the short graph for `plans`, and for others that were asked for before."""
    outline, known = model.of_microbatch(num), model.assignments.setdefault((num, mesh), {})
    if missing := tuple(plan for plan in plans if plan not in known):
        short = outline.short
        if (num, mesh) not in model.candidates:
            model.candidates[num, mesh] = annotate(short.graph, mesh, short.folded)
        known.update(outline.follow(missing, model.candidates[num, mesh], mesh))
    return known


def _blocks(model: Model, assignment: Assignment, num: int, mesh: Mesh, cluster: Cluster, training: Training) -> Blocks:
    short = model.of_microbatch(num).short
    figures = profile(short.graph, assignment, mesh, cluster, training=replace(training, num_microbatches=num))
    if num not in model.indices:
        model.indices[num] = _index(model, short)
    return blocks_of(_expanded(figures, model.indices[num]), model.starts, model.recomputable)


def _index(model: Model, short: Short) -> np.ndarray:
    """i64[ops of the whole graph]: index of each op in the short graph:
    of itself, or of its counterpart in copy two.
    """
    same = model.folded.representative
    position = short.graph.position
    alike: dict[str, list[int]] = {}
    for op in short.graph.ops:
        if op.name in same:
            alike.setdefault(same[op.name], []).append(position[op.name])
    return np.array([position[op.name] if op.name in position else alike[same[op.name]][1] for op in model.graph.ops])


def _expanded(found: Profile, index: np.ndarray) -> Profile:
    """The profile of the whole graph from that of the short one; `index`: as `_index` gives it."""
    columns = {name: column[index] for name, column in vars(found).items() if isinstance(column, np.ndarray)}
    shared = (
        Shared(tuple(np.flatnonzero(np.isin(index, one.positions)).tolist()), one.state_bytes, one.once_s)
        for one in found.shared
    )
    return replace(found, **columns, shared=tuple(shared))
