"""Clipping by the norm of all gradients of a sharded model, over all ranks."""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.dtensor_state import as_dtensor
from autopar.runtime.pipeline.parameter_elsewhere import ParameterElsewhere
from autopar.runtime.rank_agreement import peers_alive


def clip_gradients(
    module: nn.Module, max_norm: float, mesh: DeviceMesh, counted_elsewhere: Collection[str]
) -> torch.Tensor:
    """Scale the gradients of `module` on all ranks of `mesh` so that their joint 2-norm is at most `max_norm`.

    Returns the norm before. `counted_elsewhere`: FQNs of parameters that another rank of the pipeline holds too and
    counts. A part that several ranks hold is counted by the first of them, so that the squares of all ranks add up to
    the whole and one scalar is reduced.
    """
    own = [(name, p) for name, p in module.named_parameters() if not isinstance(p, ParameterElsewhere)]
    named = [(name, as_dtensor(p.grad)) for name, p in own if p.grad is not None]
    square = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    for name, gradient in named:
        if name not in counted_elsewhere and _is_first_holder(gradient):
            local = gradient.to_local()
            square += torch.linalg.vector_norm(local, dtype=torch.promote_types(local.dtype, torch.float32)).square()
    with peers_alive():
        for axis in range(mesh.ndim):
            dist.all_reduce(square, group=mesh.get_group(axis))
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for _, gradient in named:
        local = gradient.to_local()
        local.mul_(scale.to(local.dtype))
    return norm


def _is_first_holder(x: DTensor) -> bool:
    coordinate = x.device_mesh.get_coordinate() or ()
    return all(placement.is_shard() or index == 0 for placement, index in zip(x.placements, coordinate))
