"""`fake_ranks` and `call_function`: a hand-written function is called as on the first of many ranks, without any."""

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.torch_compat import forget_meshes, register_fake_backend

HandFunction = Callable[[nn.Module, DeviceMesh], Any]
_GPU_WORDS = ("cuda", "nvidia", "nccl", "gpu", "accelerator")
# Files of torch that cannot take a model on the meta device -> what to do.
_HINTS = {
    "torch/nn/parallel/distributed.py": (
        "The model is on the meta device, of which DistributedDataParallel can send nothing: give it init_sync=False"
        " where parameters are on meta"
    ),
    "torch/distributed/fsdp/fully_sharded_data_parallel.py": (
        "FullyShardedDataParallel gives contents to a model on the meta device, and cannot be read: write fully_shard"
    ),
}
# Names that wrappers put into FQNs.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@contextmanager
def fake_ranks(mesh: Mesh) -> Iterator[DeviceMesh]:
    """A device mesh of CPUs, of whose ranks this process is the first; collectives exchange nothing.

    PlanError if the process is a rank already.
    """
    if dist.is_initialized():
        raise PlanError(
            "a hand-written function is read on ranks that are not there, and this process has a process group: read"
            " it in another process, without torchrun"
        )
    register_fake_backend()
    forget_meshes()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=mesh.num_devices)
    try:
        yield init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axis_names)
    finally:
        dist.destroy_process_group()
        forget_meshes()


def call_function(function: HandFunction, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The module that `function(model, mesh)` makes of a model on the meta device: what it returns, or the model.

    PlanError with the line of the function that raised, if it returns something else, or if it gives contents to some
    parameters and leaves others on the meta device.
    """
    try:
        result = function(model, mesh)
    except (Exception, SystemExit) as error:
        raise PlanError(_failure(function, error)) from error
    if result is not None and not isinstance(result, nn.Module):
        raise PlanError(f"{place_of(function)} returned a {type(result).__name__}, expected the module, or None")
    made = model if result is None else result
    devices = {name: parameter.device.type for name, parameter in made.named_parameters()}
    left = [name for name, device in devices.items() if device == "meta"]
    if left and len(left) < len(devices):
        given = next(name for name, device in devices.items() if device != "meta")
        raise PlanError(
            f"{place_of(function)} gives {given} contents and leaves {len(left)} parameters on the meta device,"
            f" {clean(left[0])} first: give contents to all of them, or to none"
        )
    return made


def unwrapped(made: nn.Module, given: nn.Module) -> nn.Module:
    """The module, in `made` by a function, whose parameters have the names that they have in `given`: itself, the model
    inside of DistributedDataParallel, or `given` inside of another module.
    """
    made = made.module if isinstance(made, DistributedDataParallel) else made
    names = {clean(name) for name, _ in made.named_parameters()}
    is_named = names >= {clean(name) for name, _ in given.named_parameters()}
    return given if not is_named and any(module is given for module in made.modules()) else made


def clean(fqn: str) -> str:
    """The FQN as it is in the model, without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def place_of(function: HandFunction) -> str:
    """File, line and name of a function."""
    code = inspect.unwrap(function).__code__ if hasattr(inspect.unwrap(function), "__code__") else None
    name = getattr(function, "__name__", repr(function))
    return f"{code.co_filename}:{code.co_firstlineno}: {name}" if code else name


def _failure(function: HandFunction, error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    file = place_of(function).partition(":")[0]
    frame = next((one for one in reversed(frames) if one.filename == file), None)
    where = f"{frame.filename}:{frame.lineno}: `{frame.line}`" if frame else place_of(function)
    told = f"{where} raised {type(error).__name__}: {error}"
    for end, hint in _HINTS.items():
        if any(one.filename.endswith(end) for one in frames):
            return f"{told}. {hint}"
    if any(word in str(error).lower() for word in _GPU_WORDS):
        return (
            f"{told}. The function is read without a GPU, on a mesh of CPUs and a model on the meta device: take the"
            " device from mesh.device_type, and leave what only a GPU can do to the script around it"
        )
    return (
        f"{told}. The function is called with a model on the meta device, which has shapes and no contents, and a mesh"
        " with the axes of --mesh"
    )
