"""The plan found when the mesh is left open, beside the best hand plans over all ways to be data times tensor
parallel.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.costmodel.cluster.load_cluster import Cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Devices
from autopar.planner.budget import Budget
from autopar.planner.handwritten.tune import Tried, tuned
from autopar.planner.layouts.search_meshes import make_plan
from autopar.plans.plan import Plan


@dataclass(frozen=True)
class Compared:
    """plan: what the search found. ddp: whole parameters, all devices split the batch. megatron: the best of all
    tensor-parallel degrees from 2 up, with and without sequence parallelism, parameters whole on the data axes. expert:
    the best of these and of all with ZeRO.
    """

    plan: Plan
    ddp: Tried
    megatron: Tried
    expert: Tried


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> Graph:
    """The graph of one call."""
    return trace(skeleton(model), args, kwargs)


def compare(graph: Graph, num_devices: int, cluster: Cluster, *, time_limit_s: float) -> Compared:
    """InfeasibleError if no plan fits."""
    plan = make_plan(graph, Devices(num_devices), cluster, budget=Budget.of(time_limit_s))
    limit = plan.memory_limit_bytes
    tried = tuned(graph, fold(graph), Devices(num_devices), cluster).tried
    whole = [one for one in tried if one.plan.flavour == "ddp"]
    return Compared(
        plan,
        ddp=fastest((one for one in whole if not one.plan.tensor_axes), limit),
        megatron=fastest((one for one in whole if one.plan.tensor_axes), limit),
        expert=fastest(tried, limit),
    )


def fastest(tried: Iterable[Tried], memory_limit_bytes: float) -> Tried:
    """The fastest that fits, or if none does the fastest."""
    return min(tried, key=lambda one: (one.costs.memory_bytes > memory_limit_bytes, one.costs.step_s))
