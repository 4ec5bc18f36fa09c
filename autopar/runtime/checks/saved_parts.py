"""Files of parts: what torch would write for one rank alone, or read into another rank, is named."""

import functools
import re
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, warn
from autopar.mesh import PIPELINE
from autopar.torch_compat import root_of, watch_saved

# A tensor of optimizer.state_dict(), which numbers the parameters that this optimizer has.
_NUMBERED = re.compile(r"(^|\.)state\.\d+\.(?!weight$|bias$)[^.]+$")


@functools.cache
def watch_files() -> None:
    """From now on checkpoints and files of DTensors of this process are looked at."""
    watch_saved(_check_key, _tell_of_parts)


def _check_key(x: DTensor, key: str) -> None:
    """AutoparError for an optimizer's numbers where each rank has other parameters under the same ones."""
    if _NUMBERED.search(key) and PIPELINE in (root_of(x.device_mesh).mesh_dim_names or ()):
        raise AutoparError(
            f"{key}: the state of the optimizer is numbered, and each rank's optimizer has the parameters of its own"
            " stages only, so that a checkpoint would mix them: save and load get_optimizer_state_dict(model,"
            " optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)), of"
            " torch.distributed.checkpoint.state_dict, which goes by name"
        )


@functools.cache  # said once
def _tell_of_all_parts() -> None:
    warn(
        "torch.save writes this rank's parts of DTensors: a file that one rank alone writes has no others'. Write"
        " model.full_state_dict(rank0_only=True), called on every rank, or one file on each rank, which that rank"
        " reads, or torch.distributed.checkpoint.save"
    )


def _tell_of_parts(x: DTensor) -> None:
    if any(not placement.is_replicate() for placement in x.placements) or x.device_mesh.size() < dist.get_world_size():
        _tell_of_all_parts()


def check_saved_here(x: Any, name: str) -> None:
    """AutoparError if `x`, called so, is a part that another rank saved, or of stages that only others have."""
    if not isinstance(x, DTensor):
        return
    mesh, place = x.device_mesh, x.device_mesh.get_coordinate()
    if dist.get_rank() in mesh.mesh and all(placement.is_replicate() for placement in x.placements):
        return
    saver = None if place is None else int(mesh.mesh[tuple(place)])
    if saver != dist.get_rank():
        raise AutoparError(
            f"the loaded state holds parts that another rank saved: {name} on rank {dist.get_rank()} is the part of"
            f" rank {saver}. A file written by one rank has that rank's parts only: save model.full_state_dict() and"
            " model.full_optimizer_state_dict(optimizer), called on every rank, and load those, or save by"
            " torch.distributed.checkpoint; docs/trainers.md has the lines for each trainer"
        )
