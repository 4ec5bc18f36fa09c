"""One rank of a large mesh in one process: process groups without peers, tensors without data.

The generated module runs, on the meta device, with the shapes of this rank's parts; collectives give tensors of the
right shapes. What the ranks tell one another while a program is loaded (same model, same plan) is taken to be what this
rank says. Initial weights are not drawn: on the meta device there are none.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.mesh import Mesh
from autopar.torch_compat import register_fake_backend


@contextmanager
def one_rank_of(mesh: Mesh) -> Iterator[DeviceMesh]:
    """This process as the first rank of `mesh`."""
    register_fake_backend()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=mesh.num_devices)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for name, stand_in in _STAND_INS.items():
            stack.enter_context(mock.patch(f"autopar.runtime.{name}", stand_in))
        yield init_device_mesh("meta", mesh.shape, mesh_dim_names=mesh.axis_names)


def _gather(mesh: DeviceMesh, item: Any) -> list[Any]:
    return [item] * mesh.size()


def _from_first(mesh: DeviceMesh, item: Any) -> Any:
    return item


_STAND_INS = {
    "rank_agreement.gather": _gather,
    "rank_agreement.from_first": _from_first,
    "sharded_module.from_first": _from_first,
    "dtensor_state.from_first": _from_first,
    "module_runtime.meet": lambda *_: None,
}
