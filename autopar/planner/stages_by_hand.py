"""Plans in stages as people write them: hand plans with the letters pp and vp, whose layouts nobody searches."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from autopar.costmodel.cluster.device_groups import cluster_of_rank
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.pricing.encode_decode import with_parameter_buckets
from autopar.costmodel.pricing.priced_buckets import priced_buckets
from autopar.costmodel.training import Training
from autopar.errors import MicrobatchError, PlanError
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph, Value
from autopar.ir.passes.keep_loss import loss_only
from autopar.ir.split_stages import StageGraph
from autopar.mesh import PIPELINE, Devices, Mesh
from autopar.planner.handwritten.hand_plan import HandPlan, parse_hand_plan
from autopar.planner.pipeline.cut_stages import Cut, crossing_layouts, cut_as, restricted
from autopar.planner.pipeline.hand_points import Model, model_of, num_data, profiled
from autopar.planner.pipeline.partition import Blocks, Partition, partition
from autopar.planner.pipeline.stage_times import as_run, in_flight, rank_bytes, waiting
from autopar.planner.pipeline.sweep import Staged, named_point
from autopar.planner.request import PlanRequest
from autopar.plans.plan import plan_of
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.candidates import even_layouts
from autopar.sbp.microbatch.microbatch_graph import microbatched
from autopar.sbp.placement import Layout, S
from autopar.schedule.orders import Schedule, can_run

# The degrees that a text names, from the outermost axis of a mesh that is left open to the innermost.
_DEGREES = ("pp", "dp", "ep", "cp", "tp")


@dataclass(frozen=True)
class _Written:
    """A text taken apart: that of the stages' hand plan, ranks of the pipeline (0: those of the mesh), stages a rank,
    and all degrees that are numbers.
    """

    stage: str
    num_ranks: int
    chunks: int
    degrees: dict[str, int]


def is_in_stages(text: str, mesh: Mesh | Devices, request: PlanRequest) -> bool:
    """Whether a hand plan has stages or microbatches, by its letters, the mesh or the planning options."""
    has_axis = isinstance(mesh, Mesh) and PIPELINE in mesh.axis_names
    return has_axis or not request.is_open or any(word.startswith(("pp=", "vp=")) for word in _words(text))


def hand_plan_in_stages(
    text: str, graph: Graph, mesh: Mesh | Devices, cluster: Cluster, request: PlanRequest
) -> StagedPlan:
    """The plan whose stages each have the hand plan `text` (`parse_hand_plan`), with two more letters: 'pp=4' ranks of
    the pipeline and 'vp=2' stages a rank, interleaved. Stages have as many layers each where they divide, else such
    that they cost alike; nothing is recomputed.

    Of a number of devices the mesh is made by the letters, stages outermost, then dp, ep, cp and tp. PlanError if the
    text is no plan on this mesh, with the number of microbatches and the schedule of the `request`.
    """
    written = _taken_apart(text)
    num_ranks, rest = _ranks_and_rest(_mesh(text, written, mesh) if isinstance(mesh, Devices) else mesh)
    if written.num_ranks not in (0, num_ranks):
        raise PlanError(f"hand plan {text!r} does not fit mesh {mesh}: its axis {PIPELINE} has {num_ranks} ranks")
    request = request.on(cluster)
    plan = parse_hand_plan(written.stage, rest)
    if plan.is_hf:
        raise PlanError(f"hand plan {text!r}: a model's own plan, hf, has no stages; write megatron:.. for its degrees")
    whole = loss_only(request.training.reduced(graph))
    model = model_of(whole, fold(whole), num_stages=num_ranks * written.chunks)
    model.outline.check_experts(plan, rest)
    schedule = _schedule(text, num_ranks, written.chunks, request)
    _check_batch(text, model, plan, rest, schedule)
    ((_, assignment, blocks),) = profiled(model, (plan,), schedule.num_microbatches, rest, cluster, request.training)
    own = replace(as_run(blocks, schedule), is_recomputable=blocks.is_recomputable)
    cuts = (cut_blocks(own, schedule, cut, "none", math.inf) for cut in ("even", "balanced"))
    found = next((cut for cut in cuts if cut is not None), None)
    if found is None:
        num = len(blocks.forward_s)
        raise PlanError(f"hand plan {text!r}: {num} blocks make no {schedule.num_stages} stages; take fewer")
    point = Staged(plan, rest, schedule, found, 0.0, assignment, cluster)
    by_hand = plan_by_hand(model, point, cluster, request.training)
    return replace(by_hand, memory_limit_bytes=request.limit_bytes, found_by=f"hand plan {text}")


def plans_of_points(plan: StagedPlan) -> Iterator[tuple[str, StagedPlan]]:
    """(name, plan) of each hand plan in stages that `plan` was compared with, made anew; without those that are not to
    be made as they cost then.
    """
    request = PlanRequest(training=plan.training.of_one_pass, memory_limit_bytes=plan.memory_limit_bytes)
    whole = loss_only(plan.graph)
    model = model_of(whole, fold(whole), num_stages=plan.schedule.num_ranks)
    for name, costs in plan.hand.items():
        point = named_point(name, costs, model, plan.mesh, plan.cluster, request)
        if point is not None:
            by_hand = plan_by_hand(model, point, plan.cluster, request.training)
            yield name, replace(by_hand, memory_limit_bytes=plan.memory_limit_bytes, found_by=f"hand plan {name}")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.rpartition(":")[2].split(",") if word.strip()]


def _taken_apart(text: str) -> _Written:
    """PlanError if a degree of stages is no positive number."""
    letters, kept = {"pp": 0, "vp": 1}, []
    degrees: dict[str, int] = {}
    for word in _words(text):
        key, is_given, size = word.partition("=")
        if key in letters:
            if not size.isdigit() or int(size) < 1:
                raise PlanError(f"hand plan {text!r}: {key}= expects a positive number, found {size!r}")
            letters[key] = int(size)
        else:
            kept.append(word)
        if is_given and size.isdigit() and key in _DEGREES:
            degrees[key] = int(size)
    name, colon, _ = text.rpartition(":")
    return _Written(name + colon + ",".join(kept) if kept else "ddp", letters["pp"], letters["vp"], degrees)


def _ranks_and_rest(mesh: Mesh) -> tuple[int, Mesh]:
    """The ranks of the pipeline, and the mesh of a stage."""
    sizes = dict(zip(mesh.axis_names, mesh.shape))
    num_ranks = sizes.pop(PIPELINE, 1)
    sizes = sizes or {"dp": 1}
    return num_ranks, Mesh(tuple(sizes.values()), tuple(sizes))


def _mesh(text: str, written: _Written, devices: Devices) -> Mesh:
    """The mesh of an open number of devices; experts lie on the inner data ranks."""
    sizes = {key: written.degrees.get(key, 1) for key in _DEGREES}
    others, num = math.prod(size for key, size in sizes.items() if key not in ("dp", "ep")), devices.num_devices
    data = num // others if others else 0
    if others * data != num or data % max(1, sizes["ep"]) or written.degrees.get("dp", data) != data:
        raise PlanError(
            f"hand plan {text!r} does not fit {num} devices: dp x cp x tp x pp must be their number, ep"
            " a divisor of dp; change one of them"
        )
    sizes["dp"] = data // sizes["ep"]
    named = {key: size for key, size in sizes.items() if size > 1 or key == "dp"}
    return Mesh(tuple(named.values()), tuple(named))


def _schedule(text: str, num_ranks: int, chunks: int, request: PlanRequest) -> Schedule:
    num = request.num_microbatches
    if num is None:
        raise PlanError(
            f"hand plan {text!r} has stages: give its number of microbatches, e.g. --microbatches {4 * num_ranks}"
        )
    if num_ranks == 1 and chunks == 1:
        return Schedule("accumulate", 1, 1, num)
    name = request.schedule or ("1f1b" if chunks == 1 else "interleaved")
    if (name == "interleaved") != (chunks > 1) or not can_run(name, chunks * num_ranks, num_ranks, num):
        raise PlanError(
            f"hand plan {text!r}: schedule {name} does not run {chunks} stages a rank on {num_ranks} ranks with"
            f" {num} microbatches; interleaved needs vp=2 or more, others vp=1"
        )
    return Schedule(name, chunks * num_ranks, num_ranks, num)


def _check_batch(text: str, model: Model, plan: HandPlan, mesh: Mesh, schedule: Schedule) -> None:
    num, data = schedule.num_microbatches, num_data(plan, mesh)
    if model.num_samples % (num * data) == 0 and num not in model.counts:
        try:
            microbatched(model.outline.short.graph, num)
        except MicrobatchError as error:
            raise PlanError(f"hand plan {text!r}: {error}") from error
    if num not in model.counts or model.num_samples % (num * data):
        raise PlanError(
            f"hand plan {text!r}: a batch of {model.num_samples} is not cut into {num} microbatches on {data}"
            " data ranks; change --microbatches"
        )


def plan_by_hand(
    model: Model, point: Staged, cluster: Cluster, training: Training, *, are_sends_split: bool = False
) -> StagedPlan:
    """The point as a plan, whose stages have its layouts; nothing is searched.

    `are_sends_split`: each tensor rank sends its part of a boundary tensor that is whole on the tensor axes, and the
    receivers gather it.
    """
    cut, schedule = cut_as(model, point), point.schedule
    crossing = crossing_layouts(cut)
    if are_sends_split:
        values = {value.name: value for value in chain.from_iterable(stage.graph.outputs for stage in cut.stages[:-1])}
        crossing = {name: _split(values[name], layout, point) for name, layout in crossing.items()}
    stages = []
    for number, stage in enumerate(cut.stages):
        counts = {"num_in_flight": in_flight(schedule)[number], "num_waiting": waiting(schedule)[number]}
        again = _regions(cut, stage)[: point.partition.num_recomputed[number]]
        by_hand = replace(restricted(cut.by_hand, stage.graph, crossing), recomputed=again)
        own = training.staged(schedule.num_microbatches, schedule.num_ranks, **counts)
        there = cluster_of_rank(cluster, schedule.rank_of(number), schedule.num_ranks)
        places = priced_buckets(stage.graph, fold(stage.graph), point.mesh, there, own, there.memory_bytes)
        assignment = with_parameter_buckets(by_hand, stage.graph, places, point.mesh, there)
        stages.append(plan_of(stage.graph, assignment, point.mesh, there, training=own))
    mesh = point.whole_mesh
    own = training.staged(schedule.num_microbatches, schedule.num_ranks)
    return StagedPlan(
        mesh, cluster, own, float("inf"), model.graph, schedule, cut.starts, tuple(stages), found_by="hand"
    )


def _split(value: Value, layout: Layout, point: Staged) -> Layout:
    """The layout with whole tensor axes split along the last dim that divides, where there is one."""
    for axis in point.plan.tensor_axes:
        if not layout[axis].is_split:
            others = ((*layout[:axis], S(dim), *layout[axis + 1 :]) for dim in reversed(range(len(value.shape))))
            layout = next((one for one in others if one in even_layouts(value.shape, point.mesh.shape)), layout)
    return layout


def _regions(cut: Cut, stage: StageGraph) -> tuple[tuple[str, ...], ...]:
    there = {op.name for op in stage.graph.ops}
    return tuple(tuple(region) for region in cut.regions if region[0] in there)


def cut_blocks(blocks: Blocks, schedule: Schedule, cut: str, again: str, limit_bytes: float) -> Partition | None:
    """The stages, None if they do not fit. Those of a rank share its memory evenly, unless all that nothing limits fits
    together.
    """
    share = limit_bytes * schedule.num_ranks / schedule.num_stages
    if cut == "balanced":
        plain = replace(blocks, is_recomputable=np.zeros_like(blocks.is_recomputable))
        free = partition(plain, in_flight(schedule), math.inf, waiting=waiting(schedule))
        if free is not None and again != "all" and max(rank_bytes(free, schedule)) <= limit_bytes:
            return free
        if again != "all":
            return partition(
                blocks if again == "fewest" else plain, in_flight(schedule), share, waiting=waiting(schedule)
            )
        starts = free.starts if free is not None else None
    else:
        starts = _even(blocks, schedule.num_stages)
    return None if starts is None else _fixed(blocks, schedule, starts, again, share, limit_bytes)


def _even(blocks: Blocks, num_stages: int) -> tuple[int, ...] | None:
    """As many layers on each stage, what comes before the first and after the last with them."""
    layers = np.flatnonzero(blocks.is_recomputable)
    if not len(layers) or len(layers) % num_stages:
        return None
    return (0, *layers[len(layers) // num_stages :: len(layers) // num_stages].tolist())


def _fixed(
    blocks: Blocks, schedule: Schedule, starts: Sequence[int], again: str, share: float, limit_bytes: float
) -> Partition | None:
    """Stages of which each recomputes none, all or as few as it must of its layers, which cost alike."""
    numbers, sizes, once = [], [], []
    for kept, waits, a, b in zip(in_flight(schedule), waiting(schedule), starts, (*starts[1:], len(blocks.forward_s))):
        own = blocks.is_recomputable[a:b]
        there = [one for one in blocks.shared if any(a <= reader < b for reader in one[0])]
        whole = blocks.state_bytes[a:b].sum() + sum(one[1] for one in there) + kept * blocks.saved_bytes[a:b].sum()
        whole += waits * blocks.waiting_bytes[a:b].sum()
        freed = (kept - waits) * (blocks.saved_bytes - blocks.entering_bytes)[a:b][own].sum() / max(1, own.sum())
        inside = 0.0 if waits else blocks.saved_bytes[blocks.is_recomputable].max(initial=0.0)
        num = {"none": 0, "all": int(own.sum())}.get(again)
        if num is None:
            num = next(
                (n for n in range(int(own.sum()) + 1) if whole - n * freed + (inside if n else 0.0) <= share),
                int(own.sum()),
            )
        numbers.append(num)
        sizes.append(float(whole - num * freed + (inside if num else 0.0)))
        once.append(float(blocks.once_s[a:b].sum() + sum(one[2] for one in there)))
    found = Partition(tuple(starts), tuple(numbers), (), tuple(once), tuple(sizes))
    return found if max(rank_bytes(found, schedule)) <= limit_bytes else None
