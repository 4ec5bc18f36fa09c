"""What the ranks of a mesh must agree on before the first collective of the model."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.codegen.random import draw_seed
from autopar.errors import AutoparError, RankMismatch
from autopar.ir.graph import Graph
from autopar.ir.text import fingerprint


def gather(mesh: DeviceMesh, item: Any) -> list[Any]:
    """`item` of every rank of the mesh, in rank order; any picklable object."""
    found = [item]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        rows: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, found, group=group)
        found = [entry for row in rows for entry in row]
    return found


def from_first(mesh: DeviceMesh, item: Any) -> Any:
    """The first rank's `item`, on every rank."""
    box = [item]
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def agreed_graph(mesh: DeviceMesh, make: Callable[[], Graph]) -> Graph:
    """This rank's graph, if every rank has got the same one; otherwise every rank raises, naming the first that differs."""
    try:
        graph, mine = make(), None
    except AutoparError as error:
        graph, mine = None, error
    reports = gather(mesh, mine or fingerprint(graph))
    failed = next((rank for rank, report in enumerate(reports) if isinstance(report, AutoparError)), None)
    if failed is not None:
        raise mine or RankMismatch(f"rank {failed} could not trace its model: {reports[failed]}")
    different = next((rank for rank, report in enumerate(reports) if report != reports[0]), None)
    if different is not None:
        raise RankMismatch(
            f"rank {different} and rank 0 were given different models or arguments (graphs {reports[different][:12]} and "
            f"{reports[0][:12]}); build the same model and pass arguments of the same shapes on every rank"
        )
    return graph


def check_seed(mesh: DeviceMesh) -> None:
    """Random ops need the same random state on every rank."""
    state = torch.get_rng_state()
    seeds = gather(mesh, draw_seed())
    torch.set_rng_state(state)
    if len(set(seeds)) > 1:
        rank = next(rank for rank, seed in enumerate(seeds) if seed != seeds[0])
        raise RankMismatch(
            f"the model has random ops (dropout) and rank {rank}'s random state differs from rank 0's; call torch.manual_seed with "
            "the same seed on every rank: different parts of a batch get different numbers all the same"
        )


def check_weights(mesh: DeviceMesh, model: nn.Module) -> None:
    """Parameters must be equal on every rank: compare a sum of each."""
    sums = {name: float(p.detach().double().sum()) for name, p in model.named_parameters() if not p.is_meta and not isinstance(p, DTensor)}
    reports = gather(mesh, sums)
    for rank, report in enumerate(reports):
        different = next((name for name, total in report.items() if total == total and total != reports[0].get(name)), None)
        if different is not None:
            raise RankMismatch(
                f"{different} on rank {rank} differs from rank 0's; seed alike or load the same checkpoint on every rank before autopar.compile"
            )
