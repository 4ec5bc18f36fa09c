"""The two public calls, `plan` and `compile`: they check their arguments and run the stages of docs/architecture.md."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.calibrate.default_cluster import default_cluster
from autopar.costmodel.cluster.load_cluster import Cluster, given_cluster
from autopar.errors import AutoparError, InfeasibleError, MeshError, warn
from autopar.explain.batch_size import notes
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.export.refused_state import check_given_model
from autopar.ir.graph import Graph
from autopar.ir.precision.mixed_precision import traced_in
from autopar.ir.trace_with_loss import LossFunction, traced
from autopar.logical.logical_module import logical_module
from autopar.mesh import Devices, Mesh, as_mesh, mesh_of
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.budget import Progress
from autopar.planner.choose import choose_plan
from autopar.planner.choose_devices import choose_devices
from autopar.planner.request import ANYTHING, FORWARD_ALONE, PlanRequest, check_shares, request_of
from autopar.planner.status import status
from autopar.plans import serialise, staged_plan
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.runtime.checks.given_call import check_not_parallel, checked_call, named_type
from autopar.runtime.local_batch import LocalBatch, local_batch
from autopar.runtime.process_groups import with_axis_names, with_stages_first
from autopar.runtime.rank_agreement import agreed_graph, all_here, check_same, of_first_rank, on_every_rank
from autopar.runtime.sharded_module import ShardedModule, shard_module, unsharded_on_error
from autopar.sbp.placement import Layout
from autopar.sbp.proof.unknown_ops import UnknownOps, with_unknown_ops

AnyMesh = Mesh | Devices | DeviceMesh | str | int | tuple[int, ...]
AnyCluster = Cluster | str | os.PathLike

_LONG_S = 2.0  # planning that takes longer shows what it does
# What may fit where outputs that are given whole do not.
_LESS_THAN_WHOLE = (
    'every rank is given all outputs: autopar.compile(..., outputs="sharded") leaves them split, model.train_step(...)'
    " makes the loss alone"
)


def plan(
    model: nn.Module,
    mesh: AnyMesh,
    *,
    cluster: AnyCluster | None = None,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    pins: Mapping[str, str] | None = None,
    memory_limit_bytes: float | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    unknown_ops: UnknownOps = "discover",
    shares: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    loss_fn: LossFunction | None = None,
    time_limit_s: float | None = None,
    trains: bool = True,
) -> Plan | StagedPlan:
    """The fastest plan found for `model`, called with these global arguments, on `mesh`.

    Needs no process group, and no memory for a model on the meta device. AutoparError says what to change.

    `args`, `kwargs`: an example batch as the model is called with it; its shapes are global, tensors may be meta.
    `mesh`: a DeviceMesh, (8, 8), "8x8" or "dp=8,tp=8"; 64, "64" or "nodes=8,devices=8" lets the search choose how to
        factorise it. An axis called "pp" holds the stages of a pipeline and is priced as the outermost; an open mesh
        gets one if that is faster.
    `cluster`: a preset's name, a JSON file, groups of devices that differ ("8 v100 + 8 p100 over 3GB/s"; the plan is on
        all of them or some) or a Cluster; required unless `mesh` is a DeviceMesh.
    `pins`: FQN -> stored layout, e.g. {"lm_head.weight": "S(0)B"}.
    `memory_limit_bytes`: per device; by default nine tenths of the memory of the cluster's devices.
    `num_microbatches`, `schedule` ("1f1b", "interleaved", "zero-bubble", "gpipe"): by default those of the fastest plan
        that fits.
    `param_dtype`: torch.bfloat16 or torch.float16, in which the model computes: parameters are cast before they are
        gathered, and floating inputs; what is stored, gradients and the optimizer's state stay as they are
        (docs/howto/low_precision.md). By default all is computed in its own dtype.
    `reduce_dtype`: in which gradients of parameters are summed over ranks, e.g. torch.float32; by default their own,
        with `param_dtype` torch.float32.
    `unknown_ops`: "discover", the rule of an op that autopar has none for is found by running it on small samples;
        "whole", it is not run, and whole on each device.
    `shares`: rows of the batch that each rank of an axis gets, where they are not to get as many: (24, 8), or {"dp":
        (24, 8)}. Means, losses and batch statistics stay those of the whole batch.
    `loss_fn`: called with the model's output and the target, which is then the last of `args`.
    `time_limit_s`: seconds for planning after tracing, by default 30.
    `trains`: False for inference: a call without gradients, nothing saved for backward, no optimizer and no stages.
    """
    args, kwargs = checked_call(model, args, kwargs)
    check_given_model(model)
    planar = _mesh(mesh)
    found = given_cluster(cluster, mesh.device_type if isinstance(mesh, DeviceMesh) else None)
    dtypes = param_dtype, reduce_dtype
    request = request_of(
        pins, memory_limit_bytes, time_limit_s, num_microbatches, schedule, dtypes, unknown_ops, shares
    ).trained(trains)
    graph = traced_in(request.training.compute_dtype, traced, skeleton(model), loss_fn, args, kwargs)
    check_shares(request, graph)
    with _telling(graph, planar, request) as progress:
        return _with_notes(choose_devices(graph, planar, found, request, progress=progress, predict=rank_peaks))


@torch.inference_mode(False)  # which a script may be in, and trains later
def compile(
    model: nn.Module,
    mesh: AnyMesh,
    *,
    args: tuple | None = None,
    kwargs: Mapping[str, Any] | None = None,
    cluster: AnyCluster | None = None,
    pins: Mapping[str, str] | None = None,
    memory_limit_bytes: float | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    unknown_ops: UnknownOps = "discover",
    shares: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    loss_fn: LossFunction | None = None,
    time_limit_s: float | None = None,
    plan: Plan | StagedPlan | str | os.PathLike | None = None,
    batch: str | Sequence[str] = "global",
    outputs: Literal["whole", "sharded"] = "whole",
    check: bool | Literal["strict"] = True,
    logical_ranks: int | None = None,
    trains: bool = True,
) -> ShardedModule:
    """Shard the module `model` over `mesh`, in place; every rank calls this with the same model, and gets it back.

    Parameters and buffers that differ between ranks get the values of the first rank, as DistributedDataParallel does;
    ranks other than the first may have them on the meta device.

    The object and the names of its parameters stay, its parameters become DTensors. Optimizers and averages are made
    afterwards: what was a parameter before raises AutoparError at its next use. A copy.deepcopy keeps the model.
    It is planned at once if example `args`/`kwargs` (the global batch) are given, else at its first call.

    `mesh`: as in `autopar.plan`; a mesh that is left open needs `plan` or example arguments, which decide it.
    `cluster`: a preset's name, a JSON file or a Cluster; by default these hosts as they were calibrated, or are now, in
        some seconds (`autopar.calibrate.default_cluster`).
    `plan`: a plan made before, or its file; it cannot be combined with `cluster` or planning options (`pins`,
        `memory_limit_bytes`, `time_limit_s`, `num_microbatches`, `schedule`, `param_dtype`, `reduce_dtype`,
        `unknown_ops`, `shares`).
    `batch`: "global", every rank is called with the whole batch; or "local", each with its own part, and the global
        batch is all parts, one after the other: every tensor with a dim 0, labels too, is split along it. Ranks that
        differ only on axes called pp, tp, cp, sp, mp or model give the same part, all others their own, in row-major
        order (a data loader's rank and number of ranks are those on the other axes); ("dp",) names the axes
        on which parts differ. What all ranks share is a DTensor, a buffer or no tensor. Outputs that have the batch's
        rows come back as those of the rank's part, and backward of a loss made of them trains on the mean of the ranks'
        losses, as under DistributedDataParallel; a loss that the model returns is that of the whole batch.
    `outputs`: "whole", a call gives plain tensors, all of each on every rank (with batch="local" the rank's rows), and
        the plan counts what gathering them takes; or "sharded", an output that the plan splits is a DTensor. The loss
        of train_step is a plain tensor, and train_step gathers nothing else.
    `check`: compare between the ranks, in calls 1, 2, 4, 8, ..., the rows that they are given and the random state of
        models that use it, and tensors that are loaded; "strict" refuses weights that differ, too; False turns all this
        off, also the first rank's values. docs/checks.md says what it costs.
    `logical_ranks`: train as on so many ranks of data parallelism, with the same bits on that number of ranks or fewer:
        nothing is planned, parameters are whole, and `train_step` is given the whole batch (docs/howto/elastic.md).
    `trains`: False for inference: calls record no gradients, as with a `plan` made so (docs/howto/inference.md).
    All others: as in `autopar.plan`. `train_step` of the result runs every plan; calling the result is for plans
        without stages.
    """
    example = checked_call(model, args, kwargs)
    check_not_parallel(model)
    check_given_model(model)
    dtypes = param_dtype, reduce_dtype
    request = request_of(
        pins, memory_limit_bytes, time_limit_s, num_microbatches, schedule, dtypes, unknown_ops, shares
    ).trained(trains)
    _check_options(plan, request, cluster, outputs, check)
    if logical_ranks is not None:
        return _on_logical_ranks(model, mesh, logical_ranks, loss_fn, plan is None and request == ANYTHING, batch)
    if not isinstance(mesh, DeviceMesh) and isinstance(devices := _mesh(mesh), Devices):
        if plan is None:
            _check_open(mesh, args is not None or kwargs is not None, batch)
        mesh, plan = _settled(model, devices, example, cluster, request, plan, loss_fn)
    mesh = all_here(mesh, _device_mesh)
    found = _cluster_of(mesh, cluster) if plan is None else None
    given = None if plan is None else on_every_rank(mesh, "reading the plan", lambda: _text_of(plan))
    planner = _Planner(mesh, found, request, given, isinstance(plan, Plan | StagedPlan) and not plan.is_from_file)
    how = {"parts": _parts(mesh, batch, request, given, found), "outputs": outputs, "check": check}
    module = shard_module(model, mesh, planner, loss_fn, planner.param_dtype, **how)
    module._autopar.trains = planner.trains
    if args is not None or kwargs is not None:
        with unsharded_on_error(module):
            module._autopar.prepare(module, *example, trains=planner.trains)
    module._autopar.is_in_use = True
    return module


def _on_logical_ranks(
    model: nn.Module, mesh: AnyMesh, num_logical: int, loss_fn: LossFunction | None, is_free: bool, batch: Any
) -> Any:
    """A module with `train_step` that is not sharded. `is_free`: nothing was asked of the plan."""
    if not is_free or batch != "global":
        raise AutoparError(
            "logical_ranks= cannot be combined with plan=, planning options (pins=, ...) or batch='local'"
        )
    devices = mesh if isinstance(mesh, DeviceMesh) else _mesh(mesh)
    flat = Mesh((devices.num_devices,), ("dp",)) if isinstance(devices, Devices) else devices
    return logical_module(model, all_here(flat, _device_mesh), num_logical, loss_fn)


def _check_open(mesh: AnyMesh, has_example: bool, batch: str | Sequence[str]) -> None:
    if not has_example:
        raise MeshError(
            f"mesh={mesh!r} leaves the axes open: give example args=, a plan=, or a mesh such as '2x4' or 'dp=2,tp=4'"
        )
    if batch != "global":
        raise MeshError(f"mesh={mesh!r} leaves open how many parts the batch has; with batch={batch!r} name the axes")


def _parts(
    mesh: DeviceMesh, batch: str | Sequence[str], request: PlanRequest, given: str | None, cluster: Cluster | None
) -> LocalBatch | None:
    """The parts of the batch that ranks give, in the shares that are asked for or those of a plan in the text `given`;
    a plan for another mesh is refused later.
    """
    if cluster is not None and cluster.groups is not None and batch != "global" and not request.shares:
        raise AutoparError(
            f"batch={batch!r}: the rows of each rank of {cluster.name} are not known before planning; give shares=, or"
            " plan= with a plan that was made before, whose mesh.shares has them"
        )
    own = mesh_of(mesh)
    placed = request.in_shares(own) if given is None else staged_plan.mesh_in(given)
    return local_batch(mesh, batch, placed.shares if placed.shape == own.shape else ())


def _check_options(plan: Any, request: PlanRequest, cluster: AnyCluster | None, outputs: Any, check: Any) -> None:
    if plan is not None and (request not in (ANYTHING, FORWARD_ALONE) or cluster is not None):
        raise AutoparError(
            "plan= cannot be combined with cluster= or planning options (pins=, memory_limit_bytes=, time_limit_s=,"
            " num_microbatches=, schedule=, param_dtype=, reduce_dtype=, unknown_ops=, shares=): give either the plan"
            " or the options"
        )
    if plan is not None and not isinstance(plan, Plan | StagedPlan | str | os.PathLike):
        raise AutoparError(f"plan= expects a Plan or the path of its file, found {named_type(plan)}")
    if outputs not in ("whole", "sharded"):
        raise AutoparError(f'outputs= expects "whole" or "sharded", found {outputs!r}')
    if check not in (True, False, "strict"):
        raise AutoparError(f'check= expects True, False or "strict", found {check!r}')


@dataclass
class _Planner:
    """A planner that runs on the first rank and gives all the same plan, or error. `cluster` or `given` is None."""

    mesh: DeviceMesh
    cluster: Cluster | None
    request: PlanRequest
    given: str | None  # JSON text of a plan made before
    is_own: bool  # the given plan was made by this run rather than read from a file
    peaks = staticmethod(rank_peaks)  # which every rank computes alike

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype in which plans compute, None for the model's own."""
        return self.request.training.compute_dtype if self.given is None else staged_plan.param_dtype_in(self.given)

    @property
    def trains(self) -> bool:
        """Whether neither the options nor the given plan are of inference."""
        asked = {} if self.given is None else staged_plan.made_for(self.given)[1]
        return self.request.training.trains and asked.get("training", self.request.training).trains

    def __call__(
        self, graph: Graph, fixed: dict[str, str], trains: bool, outputs: Mapping[str, Layout]
    ) -> Plan | StagedPlan:
        text, is_own, graph = self.given, self.is_own, with_unknown_ops(graph, self.request.unknown_ops)
        asked = (text, self.request, self.cluster and self.cluster.to_json())
        check_same(self.mesh, asked, "plans, pins, memory limits or clusters", "give every rank the same")
        if text is None or fixed:
            with of_first_rank(self.mesh, "planning") as made:
                if made.is_here:
                    cluster, request = self._asked(fixed, trains)
                    if not fixed:
                        check_shares(request, graph)  # of other batches they are proportions
                    request = replace(request, outputs=outputs)
                    mesh = mesh_of(self.mesh)
                    with _telling(graph, mesh, request) as progress:
                        plan = choose_plan(graph, mesh, cluster, request, progress=progress, predict=rank_peaks)
                    made.value = _with_notes(plan).dumps()
            text, is_own = made.value, True
        return on_every_rank(
            self.mesh, "reading the plan", lambda: staged_plan.loads(text, graph, mesh_of(self.mesh), is_own=is_own)
        )

    def _asked(self, fixed: dict[str, str], trains: bool) -> tuple[Cluster, PlanRequest]:
        """The cluster and the planning options; those of the given plan if new shapes are planned."""
        pins = {} if fixed else self.request.pins
        request = replace(self.request, pins=pins, stored=fixed, trains=trains)
        if self.given is None:
            assert self.cluster is not None, "a cluster is given where a plan is not"
            return self.cluster, request
        cluster, asked = staged_plan.made_for(self.given)
        return cluster, replace(request, **asked)


def _settled(
    model: nn.Module,
    devices: Devices,
    example: tuple,
    cluster: AnyCluster | None,
    request: PlanRequest,
    plan: Plan | StagedPlan | str | os.PathLike | None,
    loss_fn: LossFunction | None,
) -> tuple[Mesh, Plan | StagedPlan | str | os.PathLike]:
    """An open mesh settled: the plan's mesh and the plan, which the first rank makes for all if none is given."""
    flat = all_here((devices.num_devices,), _device_mesh)
    if plan is not None:
        return on_every_rank(flat, "reading the plan", lambda: staged_plan.mesh_in(_text_of(plan))), plan
    found = _cluster_of(flat, cluster)
    dtype = request.training.compute_dtype
    graph = agreed_graph(flat, lambda: traced_in(dtype, traced, skeleton(model), loss_fn, *example))
    with of_first_rank(flat, "planning") as made:
        if made.is_here:
            with _telling(graph, devices, request) as progress:
                plan = choose_plan(graph, devices, found, request, progress=progress, predict=rank_peaks)
            made.value = _with_notes(plan).dumps()
    plan = on_every_rank(flat, "reading the plan", lambda: staged_plan.loads(made.value, graph, devices, is_own=True))
    return plan.mesh, plan


@contextmanager
def _telling(graph: Graph, mesh: Mesh | Devices, request: PlanRequest) -> Iterator[Progress]:
    """A context for the choice of a plan, which tells of a batch that cannot be split, of progress and of remedies."""
    for item in graph.of_kind("argument"):
        size = item.value.shape[0] if item.value.shape else 1
        if size > 1 and not _splits(mesh, size):
            warn(
                f"argument {item.fqn} has size {size} along its first dim, less than any axis of mesh {mesh}: it stays"
                " whole on every rank; take a larger batch to split it"
            )
    try:
        with status(after_s=_LONG_S) as progress:
            yield progress
    except InfeasibleError as error:
        if request.outputs:
            raise InfeasibleError(f"{error}; {_LESS_THAN_WHOLE}") from error
        raise


def _with_notes(plan: Plan | StagedPlan) -> Plan | StagedPlan:
    for note in notes(plan):
        warn(note)
    return plan


def _text_of(plan: Plan | StagedPlan | str | os.PathLike) -> str:
    return staged_plan.check_order(plan.dumps() if isinstance(plan, Plan | StagedPlan) else serialise.read(plan))


def _splits(mesh: Mesh | Devices, size: int) -> bool:
    """Whether an axis of the mesh, or a possible axis of an open one, splits `size`; true on a mesh of one device."""
    if isinstance(mesh, Devices):
        return mesh.num_devices == 1 or any(mesh.num_devices % count == 0 for count in range(2, size + 1))
    return mesh.num_devices == 1 or any(size >= count for count in mesh.shape if count > 1)


def _mesh(mesh: AnyMesh) -> Mesh | Devices:
    try:
        return as_mesh(mesh)
    except TypeError as error:
        raise MeshError(
            f"mesh expects a DeviceMesh, a shape such as (2, 4), '2x4' or 'dp=2,tp=4', found {mesh!r}"
        ) from error


def _device_mesh(mesh: AnyMesh) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        if mesh.get_coordinate() is None:
            raise MeshError(f"rank {dist.get_rank()} is not in mesh {mesh}; only its ranks call autopar.compile")
        return with_stages_first(mesh if mesh.mesh_dim_names else with_axis_names(mesh, mesh_of(mesh).axis_names))
    planar = _mesh(mesh)
    if not dist.is_initialized():
        raise MeshError(
            "autopar.compile needs a process group: call torch.distributed.init_process_group first (torchrun sets"
            " it up)"
        )
    if planar.num_devices != dist.get_world_size():
        raise MeshError(
            f"mesh {mesh} needs {planar.num_devices} ranks, the world has {dist.get_world_size()}; use a mesh of that"
            " size, start as many ranks, or give a DeviceMesh of some of them"
        )
    assert isinstance(planar, Mesh), "an open mesh is settled first"
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return with_stages_first(init_device_mesh(kind, planar.shape, mesh_dim_names=planar.axis_names))


def _cluster_of(mesh: DeviceMesh, cluster: AnyCluster | None) -> Cluster:
    return default_cluster(mesh) if cluster is None else given_cluster(cluster, mesh.device_type)
