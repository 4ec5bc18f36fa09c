"""Ranks that are not there leave nothing to those that come after them."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.mesh import Mesh
from autopar.planner.handwritten.fake_ranks import fake_ranks


def test_layouts_of_ranks_that_ended_are_forgotten() -> None:
    def whole(mesh: Any) -> torch.Tensor:
        x = DTensor.from_local(torch.ones(2), mesh["tp"], [Shard(0)], run_check=False)
        return x.detach().redistribute(placements=[Replicate()]).to_local()  # torch keeps its layout

    shape = Mesh((2, 2), ("dp", "tp"))
    with fake_ranks(shape):  # a second mesh, whose groups have later names
        assert whole(init_device_mesh("cpu", shape.shape, mesh_dim_names=shape.axis_names)).shape == (4,)
    with fake_ranks(shape) as mesh:
        assert whole(mesh).shape == (4,)
