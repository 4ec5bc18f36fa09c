"""The three calls: `plan`, `compile`, and what they share. Each line of `make_plan` and of `codegen` is one stage of docs/architecture.md."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.codegen.agree import from_first
from autopar.codegen.module import ShardedModule, shard_module
from autopar.costmodel.cluster import Cluster, load_cluster
from autopar.errors import AutoparError, MeshError
from autopar.ir.graph import Graph
from autopar.ir.skeleton import skeleton
from autopar.ir.trace import trace
from autopar.mesh import Mesh, as_mesh
from autopar.plan.assemble import make_plan
from autopar.plan.plan import Plan

AnyMesh = Mesh | DeviceMesh | str | tuple[int, ...]
AnyCluster = Cluster | str | os.PathLike


def plan(
    model: nn.Module,
    mesh: AnyMesh,
    *,
    cluster: AnyCluster,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    pins: Mapping[str, str] | None = None,
    memory_limit_bytes: float | None = None,
) -> Plan:
    """Plan `model` called with these (global) arguments on `mesh`; needs no process group, and no memory for a meta-device model.

    `pins`: FQN -> stored layout, e.g. {"lm_head.weight": "S(0)B"}. Raises an AutoparError saying what to change.
    """
    graph = trace(skeleton(model), args, dict(kwargs or {}))
    return make_plan(graph, as_mesh(mesh), load_cluster(cluster), pins=dict(pins or {}), memory_limit_bytes=_limit(memory_limit_bytes))


def compile(  # noqa: A001 - torch.compile has the name too
    model: nn.Module,
    mesh: AnyMesh,
    *,
    args: tuple | None = None,
    kwargs: Mapping[str, Any] | None = None,
    cluster: AnyCluster | None = None,
    pins: Mapping[str, str] | None = None,
    memory_limit_bytes: float | None = None,
    plan: Plan | str | os.PathLike | None = None,
) -> ShardedModule:
    """The same module, sharded over `mesh`; every rank calls this with the same model. `model` itself is left as it is.

    Planned at once when example `args`/`kwargs` (global batch) are given, else at the first call. `cluster`: a preset's name,
    a JSON file or a Cluster; by default the one that fits the mesh's devices. `plan`: one made before, or its file.
    """
    mesh = _device_mesh(mesh)
    module = shard_module(model, mesh, _Planner(mesh, cluster, dict(pins or {}), _limit(memory_limit_bytes), plan))
    if args is not None or kwargs is not None:
        module._autopar.prepare_now(module, args or (), dict(kwargs or {}))
    return module


class _Planner:
    """Plans on the mesh's first rank and gives every rank the same plan, or the same error."""

    def __init__(self, mesh: DeviceMesh, cluster: AnyCluster | None, pins: dict[str, str], limit: float, given: Any) -> None:
        self.mesh, self.cluster, self.pins, self.limit, self.given = mesh, cluster, pins, limit, given

    def __call__(self, graph: Graph, fixed: dict[str, str]) -> Plan:
        text = None
        if all(index == 0 for index in self.mesh.get_coordinate()):
            try:
                text = self._make(graph, fixed).dumps()
            except AutoparError as error:
                text = error
        text = from_first(self.mesh, text)
        if isinstance(text, AutoparError):
            raise text
        return Plan.loads(text, graph, as_mesh(self.mesh))

    def _make(self, graph: Graph, fixed: dict[str, str]) -> Plan:
        mesh = as_mesh(self.mesh)
        if self.given is not None and not fixed:
            text = self.given.dumps() if isinstance(self.given, Plan) else Path(self.given).read_text()
            return Plan.loads(text, graph, mesh)
        cluster = load_cluster(self.cluster if self.cluster is not None else _preset_of(self.mesh.device_type))
        return make_plan(graph, mesh, cluster, pins=fixed or self.pins, memory_limit_bytes=self.limit)


def _device_mesh(mesh: AnyMesh) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        return mesh if mesh.mesh_dim_names else _named(mesh)
    mesh = as_mesh(mesh)
    if not dist.is_initialized():
        raise MeshError("autopar.compile needs a process group: call torch.distributed.init_process_group first (torchrun sets it up)")
    if mesh.num_devices > dist.get_world_size():
        raise MeshError(f"mesh {mesh} needs {mesh.num_devices} ranks, the world has {dist.get_world_size()}; start more or use a smaller mesh")
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", mesh.shape, mesh_dim_names=mesh.axis_names)


def _named(mesh: DeviceMesh) -> DeviceMesh:
    return DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=as_mesh(mesh).axis_names)


def _preset_of(device_type: str) -> str:
    if device_type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name()
    for key, preset in {"H100": "h100", "H200": "h100", "A100": "a100", "V100": "v100", "P100": "p100"}.items():
        if key in name:
            return preset
    raise AutoparError(f"no cluster preset for {name!r}; pass cluster= (a preset's name, a JSON file or a Cluster)")


def _limit(memory_limit_bytes: float | None) -> float:
    return float("inf") if memory_limit_bytes is None else float(memory_limit_bytes)
