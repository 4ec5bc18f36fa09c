"""Plans that people wrote and measured, as hand plans of the planner, priced on any cluster."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch

from autopar.costmodel.activations.saved_activations import region_of_ops
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.evaluate import PlannedCollective, evaluate
from autopar.costmodel.memory import update_bytes
from autopar.costmodel.roofline import local_shapes, op_time
from autopar.costmodel.step_cost import step_cost
from autopar.costmodel.training import Training
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.op_facts import family
from autopar.ir.passes.keep_loss import loss_only
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.models.catalogue import Example
from autopar.planner.handwritten.hand_plan import parse_hand_plan
from autopar.planner.pipeline.hand_points import Model, model_of, profiled
from autopar.planner.pipeline.stage_times import as_run
from autopar.planner.pipeline.sweep import Staged
from autopar.planner.stages_by_hand import cut_blocks, plan_by_hand
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.analysis.sampled_graph import Sampled
from autopar.schedule.orders import Schedule
from autopar.schedule.simulate import simulate
from bench.fidelity.fused_kernels import fused_s
from bench.fidelity.run_again import SELECTIVE, run_again


@dataclass(frozen=True)
class WrittenPlan:
    """A plan as its authors describe it.

    `build`: the model with the global batch, in `num_microbatches` for each data rank. Ranks are laid out tensors
    innermost, then data, then stages. `flavour`: how the data ranks store parameters. `recomputed`: "none" or "all" of
    the blocks, or one of `SELECTIVE` in each. `chunks`: stages of a rank. `optimizer`: as in `Training`.
    `are_sends_split`: over the tensor ranks of a stage. `num_layers`: 0, or the depth, which `build` then takes as
    `layers`; so many layers in turn as `period` are of different kinds. `experts`: the data ranks that share a set of
    experts. `sequence`: the ranks that share a sequence, around a ring. `is_sequence_parallel`: tensor ranks split it
    between their regions. `flushes`: how often in a step the pipeline is filled and emptied, with a share of the
    microbatches each time.
    """

    build: Callable[..., Example]
    data: int = 1
    tensor: int = 1
    stages: int = 1
    num_microbatches: int = 1
    flavour: str = "ddp"
    recomputed: str = "none"
    chunks: int = 1
    optimizer: str = "adamw-master"
    are_sends_split: bool = False
    num_layers: int = 0
    period: int = 1
    experts: int = 1
    sequence: int = 1
    is_sequence_parallel: bool = False
    flushes: int = 1


LINEAR = "aten.linear"

# The layouts of a hand plan depend on no figure of the hardware, its even cuts neither.
_ANY = PRESETS["h100"]


@cache
def _model(build: Callable[[], Example]) -> Model:
    example = build()
    graph = loss_only(trace(skeleton(example.model), example.args, dict(example.kwargs)))
    return model_of(graph, fold(graph))


@cache
def staged(written: WrittenPlan) -> StagedPlan:
    """The plan on any cluster, for `on_cluster`; its stages have as many blocks each where they divide."""
    model, mesh = _model(written.build), _mesh(written)
    plan = parse_hand_plan(_text(written), mesh)
    training, num = Training(written.optimizer), written.num_microbatches
    schedule = _schedule(written)
    ((plan, assignment, blocks),) = profiled(model, (plan,), num, mesh, _ANY, training)
    own = replace(as_run(blocks, schedule), is_recomputable=blocks.is_recomputable)
    again = "none" if written.recomputed in ("none", *SELECTIVE) else "all"
    cuts = (
        cut_blocks(own, schedule, cut, again, math.inf)
        for cut in (("even", "balanced") if written.stages > 1 else ("balanced",))
    )
    partition = next(cut for cut in cuts if cut is not None)
    point = Staged(plan, mesh, schedule, partition, 0.0, assignment, _ANY)
    return plan_by_hand(model, point, _ANY, training, are_sends_split=written.are_sends_split)


def _text(written: WrittenPlan) -> str:
    """The hand plan of a stage."""
    degrees = {"cp": written.sequence, "ep": written.experts}
    has_tensors = written.tensor > 1 or max(degrees.values()) == 1
    words = [f"dp={written.data}", f"tp={written.tensor}"] if has_tensors else []
    words += [f"{name}={size}" for name, size in degrees.items() if size > 1]
    words += ["sp"] * written.is_sequence_parallel + [written.flavour] * (written.flavour != "ddp")
    return f"megatron:{','.join(words)}"


def _mesh(written: WrittenPlan) -> Mesh:
    """Of a stage; ranks that share a set of experts are neighbours among the data ranks, those that share a sequence
    inside of these.
    """
    if written.experts == written.sequence == 1:
        return Mesh((written.data, written.tensor), ("dp", "tp"))
    if written.data % written.experts:
        raise ValueError(f"ep: expected a divisor of the {written.data} data ranks, found {written.experts}")
    sizes = {"dp": written.data // written.experts, "ep": written.experts, "cp": written.sequence, "tp": written.tensor}
    named = {name: size for name, size in sizes.items() if size > 1}
    return Mesh(tuple(named.values()), tuple(named))


def _schedule(written: WrittenPlan) -> Schedule:
    if written.stages == 1:
        return Schedule("accumulate", 1, 1, written.num_microbatches)
    name = "gpipe" if written.num_microbatches < written.stages else "1f1b" if written.chunks == 1 else "interleaved"
    return Schedule(name, written.stages * written.chunks, written.stages, written.num_microbatches)


def on_cluster(plan: StagedPlan, cluster: Cluster) -> StagedPlan:
    """The plan priced on `cluster`."""
    stages = tuple(
        replace(
            stage,
            cluster=cluster,
            lower_bound_s=0.0,
            costs=evaluate(stage.graph, stage.assignment, stage.mesh, cluster, training=stage.training),
        )
        for stage in plan.stages
    )
    return replace(plan, cluster=cluster, stages=stages)


@dataclass(frozen=True)
class HostUpdate:
    """Updates by the host's cores, of `ranks` on each node at once; gradients are copied there, parameters back.

    `rank_bytes_per_s`: that the cores of one rank move, `node_bytes_per_s`: that the memory of a node does for all.
    """

    ranks: int
    rank_bytes_per_s: float
    node_bytes_per_s: float


@dataclass(frozen=True)
class Library:
    """What the library that was measured does where this runtime does something else.

    `hides`: the collectives that run beside computing: "nothing", "reductions" of gradients beside backward, all of
    "parameters", gathers among them, beside forward and backward, or "all" there are. `gradient_copies`: bytes that the
    device moves for each byte of gradients that is reduced, into buckets and out of them; `reduces_whole`: every rank
    gets the sums of all gradients, also where it keeps a part. `cast_bytes`: moved for each element of an operand of a
    linear layer, to cast it; the last layer, the head, is not cast, and has none of the shares of "aten.linear".
    `cast_ops`: families of the layers that are cast. `keeps_casts`: weights are cast once a step, what several layers
    take once, and backward has what forward cast; otherwise each layer casts both operands for itself, again in
    backward. `fuses`: what only moves bytes is one kernel from one product to the next (`fused_s`).
    `buffers_by_stages`: for each value that backward needs, so many buffers for each stage of the pipeline, but on
    the last stage; 0: as many as microbatches are in flight. `host_update`: in place of the device's. `batch_s`:
    seconds in which each stage but the first fetches its inputs once it has received, and its device waits.
    """

    hides: str = "nothing"
    gradient_copies: float = 0.0
    reduces_whole: bool = False
    cast_bytes: float = 0.0
    cast_ops: tuple[str, ...] = (LINEAR,)
    keeps_casts: bool = False
    fuses: bool = False
    buffers_by_stages: int = 0
    host_update: HostUpdate | None = None
    batch_s: float = 0.0


def step_s(written: WrittenPlan, cluster: Cluster, library: Library = Library()) -> float:
    """Predicted seconds of a step as `library` runs it; with the default, the planner's own price."""
    shown_s, hideable_s, hiding_s = _parts(written, cluster, library)
    return float(shown_s - min(hideable_s, hiding_s))


def _parts(written: WrittenPlan, cluster: Cluster, library: Library) -> np.ndarray:
    """Seconds of the step without overlap, of collectives that computing may hide, and of that computing.

    They are linear in the number of layers, so that a plan with `num_layers` is priced with few and with twice as many.
    """
    if not written.num_layers:
        return _parts_of(written, cluster, library)
    few = few_layers(written)
    low, high = (_parts_of(with_layers(written, n), cluster, library) for n in (few, 2 * few))
    return low + (written.num_layers - few) / few * (high - low)


def few_layers(written: WrittenPlan) -> int:
    """The fewest layers that are taken for copies of a block, with as many of each kind for each stage."""
    return max(4, written.stages * written.chunks * written.period)


@cache
def with_layers(written: WrittenPlan, num_layers: int) -> WrittenPlan:
    """The plan of the model with so many layers."""
    return replace(written, build=_shallow(written.build, num_layers), num_layers=0)


@cache
def _shallow(build: Callable[..., Example], num_layers: int) -> Callable[[], Example]:
    return partial(build, layers=num_layers)


def _parts_of(written: WrittenPlan, cluster: Cluster, library: Library) -> np.ndarray:
    plan = on_cluster(staged(written), cluster)
    *_, last = plan.stages
    again = again_of(written)
    stages, hidden = (
        [_with_casts(s, library, names, has_head=s is last) for s, names in zip(plan.stages, again)],
        (0.0, 0.0),
    )
    if len(stages) == 1:
        moved_s, computing_s = _hideable_s(stages[0], library)
        hidden = sum(moved_s.values()), computing_s
    else:
        stages = [_hiding(stage, library) for stage in stages]
    ranks = range(plan.schedule.num_ranks)
    once_s = max(sum(_synchronisation_s(stages[i], library) for i in plan.schedule.stages_of(rank)) for rank in ranks)
    plan = replace(plan, stages=tuple(stages))
    shown_s = _flushed_s(plan, written.flushes) + once_s + (len(stages) - 1) * library.batch_s
    return np.array([shown_s, *hidden])


def _flushed_s(plan: StagedPlan, flushes: int) -> float:
    """Seconds of a step whose pipeline is empty so often; what is done once a step is done behind the last time."""
    num = plan.schedule.num_microbatches // flushes
    once_s = plan.step_s - plan.timeline.step_s
    return flushes * simulate(replace(plan.schedule, num_microbatches=num), plan.times).step_s + once_s


def again_of(written: WrittenPlan) -> list[Collection[str]]:
    """Names of the ops of each stage that run again."""
    if written.recomputed in SELECTIVE:
        return [run_again(stage, written.recomputed) for stage in staged(replace(written, recomputed="all")).stages]
    return [region_of_ops(stage.assignment.recomputed).keys() for stage in staged(written).stages]


def _with_casts(stage: Plan, library: Library, again: Collection[str], *, has_head: bool) -> Plan:
    """The stage with its casts, and with the ops as one kernel that `library` fuses; a third of it in forward. Ops that
    run `again` one by one are added to backward.
    """
    more_s = _casts_s(stage, library, again, has_head=has_head) - (fused_s(stage, again) if library.fuses else 0.0)
    forward_s, backward_s = stage.costs.compute_forward_s + more_s / 3, stage.costs.compute_backward_s + more_s * 2 / 3
    for op in stage.graph.ops if not stage.assignment.recomputed else ():
        if op.name in again:
            again_s, _ = op_time(op, stage.assignment.strategies[op.name], stage.mesh.shape, stage.cluster)
            backward_s += stage.training.num_microbatches * again_s
    return replace(stage, costs=replace(stage.costs, compute_forward_s=forward_s, compute_backward_s=backward_s))


def _hiding(stage: Plan, library: Library) -> Plan:
    """The stage without the collectives that its computing hides."""
    moved_s, computing_s = _hideable_s(stage, library)
    all_s, num = sum(moved_s.values()), stage.costs.num_microbatches
    if not all_s:
        return stage
    share, shown_s = min(1.0, computing_s / all_s), dict(stage.costs.communication)
    for (phase, is_once), hideable_s in moved_s.items():
        shown_s[phase, is_once] -= share * hideable_s / (1 if is_once else num)
    return replace(stage, costs=replace(stage.costs, communication=shown_s))


def _hideable_s(stage: Plan, library: Library) -> tuple[Mapping[tuple[str, bool], float], float]:
    """Seconds of the collectives that computing may hide, by phase and whether once a step, and of that computing.

    Of reductions, that of the gradient which backward completes last is hidden by nothing.
    """
    costs = stage.costs
    if library.hides == "nothing":
        return {}, 0.0
    if library.hides == "reductions":
        position = {op.name: number for number, op in enumerate(stage.graph.ops)}
        order = sorted(_reductions(stage), key=lambda p: min(position[user] for user in p.users))
        return {("backward", True): sum(p.time_s for p in order[1:])}, costs.compute_backward_s / costs.num_microbatches
    parameters = {item.value.name for item in stage.graph.of_kind("parameter")}
    moved_s: dict[tuple[str, bool], float] = {}
    for p in costs.collectives:
        if library.hides == "all" or p.where in parameters:
            key = p.collective.phase, p.is_once
            moved_s[key] = moved_s.get(key, 0.0) + costs.num_issued(p) * p.time_s
    return moved_s, costs.compute_forward_s + costs.compute_backward_s


def _reductions(stage: Plan) -> list[PlannedCollective]:
    """Those of the gradients of parameters."""
    return [p for p in stage.costs.collectives if p.is_once and p.collective.phase == "backward"]


def _synchronisation_s(stage: Plan, library: Library) -> float:
    """Seconds that reductions and updates take beyond those of this runtime."""
    reductions, cluster = _reductions(stage), stage.cluster
    num_bytes = sum(p.collective.num_bytes for p in reductions)
    copied_s = library.gradient_copies * num_bytes / cluster.memory_bandwidth_bytes_per_s
    gathered_s = sum(p.time_s for p in reductions if p.collective.kind == "reduce_scatter")
    return copied_s + library.reduces_whole * gathered_s + _host_update_s(stage, library.host_update)


def _host_update_s(stage: Plan, host: HostUpdate | None) -> float:
    """Seconds of an update on the host beyond those of the device's; a float32 parameter goes either way once."""
    if host is None:
        return 0.0
    layouts, of_mesh = stage.assignment.layouts, (stage.mesh.shape, stage.training)
    moved = sum(update_bytes(item, layouts[item.value.name], *of_mesh) for item in stage.graph.inputs)
    num = stage.costs.memory_bytes["optimizer"] / stage.training.state_bytes(torch.float32.itemsize)
    update_s = moved / host.rank_bytes_per_s + moved * host.ranks / host.node_bytes_per_s
    return update_s + 2 * 4 * num * stage.cluster.host_s_per_byte - stage.costs.optimizer_s


def _casts_s(stage: Plan, library: Library, again: Collection[str], *, has_head: bool) -> float:
    """Seconds of a step's casts: of both operands in forward, also in one that is made again, and of the gradient and
    both in backward, unless they are kept; and of the head, which is not cast.
    """
    if not library.cast_bytes:
        return 0.0
    elements, weights, known = 0, 0, set[str]()
    cast = [op for op in stage.graph.ops if family(op.target) in library.cast_ops]
    head = [op.name for op in cast if family(op.target) == LINEAR][-1] if has_head else ""
    for op in cast:
        if op.name == head:
            continue
        (taken, weight, *_), outputs = local_shapes(op, stage.assignment.strategies[op.name], stage.mesh.shape)
        num_forwards, is_known = 1 + (op.name in again), op.inputs[0].name in known
        known.add(op.inputs[0].name)
        elements += math.prod(outputs[0])
        if library.keeps_casts:
            elements += 0 if is_known else num_forwards * math.prod(taken)
            weights += math.prod(weight)
        else:
            elements += (1 + num_forwards) * (math.prod(taken) + math.prod(weight))
    moved = (stage.training.num_microbatches * elements + weights) * library.cast_bytes
    return moved / stage.cluster.memory_bandwidth_bytes_per_s + (_uncast_s(stage, head) if has_head else 0.0)


def _uncast_s(stage: Plan, head: str) -> float:
    """Seconds of a step that the head takes beyond its price, for which it is cast as other linear layers are."""
    shares = tuple(share for share in stage.cluster.product_shares if share.op != LINEAR)
    cast, uncast = (
        step_cost(Sampled(stage.graph), stage.assignment, stage.mesh, cluster, stage.training).ops[head]
        for cluster in (stage.cluster, replace(stage.cluster, product_shares=shares))
    )
    more_s = uncast.forward_s + uncast.backward_s - cast.forward_s - cast.backward_s
    return stage.training.num_microbatches * more_s
