"""Parameters and buffers as DTensors: cut out of a real model, or materialised module by module from a meta one."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.codegen.load import axes_of, torch_placements
from autopar.errors import AutoparError
from autopar.ir.graph import Graph, Input
from autopar.sbp.collectives import move
from autopar.sbp.placement import I, Layout


def shard(whole: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """This rank's part of `whole`, as a DTensor of whole shape on the mesh's device."""
    part = whole.detach()
    for axis, placement in zip(axes_of(mesh), layout):
        part = move(part, axis, I, placement)
    part = torch.empty_like(part, device=mesh.device_type, memory_format=torch.contiguous_format).copy_(part)
    return _as_dtensor(part, whole, layout, mesh)


def _as_dtensor(part: torch.Tensor, whole: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(part, mesh, torch_placements(layout), run_check=False, shape=whole.shape, stride=stride)


def without_data(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the meta-device parameters of `module` DTensors, so that each can later become its part of the real one in place."""
    done: dict[int, nn.Parameter] = {}
    for owner, name in owners(module).values():
        parameter = owner._parameters.get(name)
        if parameter is not None:
            if id(parameter) not in done:
                whole = _as_dtensor(parameter.detach(), parameter, (I,) * mesh.ndim, mesh)
                done[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            owner._parameters[name] = done[id(parameter)]


def owners(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """FQN -> (module, attribute) of every parameter and buffer, each tied one under all its names."""
    found = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name in [*owner._parameters, *owner._buffers]:
            found[f"{prefix}.{name}" if prefix else name] = (owner, name)
    return found


def install(module: nn.Module, graph: Graph, tensors: Mapping[str, DTensor]) -> None:
    """Put each DTensor of `tensors` (by FQN of `graph`'s inputs) in its place, tied places included."""
    places = owners(module)
    for item in stateful(graph):
        tensor = tensors[item.fqn]
        for fqn in (item.fqn, *item.aliases):
            owner, name = places[fqn]
            if name in owner._parameters:
                replaced = owner._parameters[name] = _in_place_of(owner._parameters[name], tensor)
                tensor = replaced
            else:
                owner._buffers[name] = tensor


def _in_place_of(old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """`old` with the content of `new`: an optimizer made before the first call keeps holding the right objects."""
    if old is not new:
        torch.utils.swap_tensors(old, new)
    return old


def stateful(graph: Graph) -> Iterator[Input]:
    """Parameters and buffers among the graph's inputs."""
    return (item for item in graph.inputs if item.kind in ("parameter", "buffer"))


def shard_model(model: nn.Module, graph: Graph, layouts: Mapping[str, Layout], mesh: DeviceMesh) -> dict[str, DTensor]:
    """Parts of a model whose tensors are real, or are on the meta device and initialised here module by module, so that
    never more than one module's own tensors are whole on a rank. Numbers are those of the same initialisation on one device."""
    items = {fqn: item for item in stateful(graph) for fqn in (item.fqn, *item.aliases)}
    done: dict[str, DTensor] = {}
    for prefix, owner in model.named_modules():
        tensors = {name: tensor for name, tensor in [*owner._parameters.items(), *owner._buffers.items()] if tensor is not None}
        if any(tensor.is_meta for tensor in tensors.values()):
            tensors = _initialised(model, owner, prefix, mesh.device_type)
        for name, tensor in tensors.items():
            item = items[f"{prefix}.{name}" if prefix else name]
            if item.fqn not in done:
                done[item.fqn] = _stored(tensor, item, layouts[item.value.name], mesh)
    return done


def _stored(tensor: torch.Tensor, item: Input, layout: Layout, mesh: DeviceMesh) -> DTensor:
    part = shard(tensor, layout, mesh)
    return nn.Parameter(part, requires_grad=tensor.requires_grad) if item.kind == "parameter" else part


def _initialised(model: nn.Module, owner: nn.Module, prefix: str, device: str) -> dict[str, torch.Tensor]:
    """The module's own tensors after its own initialisation; the module itself is left as it was."""
    saved = owner._parameters, owner._buffers
    owner._parameters = {name: _allocated(tensor, device) for name, tensor in owner._parameters.items()}
    owner._buffers = {name: _allocated(tensor, device) for name, tensor in owner._buffers.items()}
    try:
        _initialise(model, owner, prefix)
        return {name: tensor for name, tensor in [*owner._parameters.items(), *owner._buffers.items()] if tensor is not None}
    finally:
        owner._parameters, owner._buffers = saved


def _allocated(tensor: torch.Tensor | None, device: str) -> torch.Tensor | None:
    if tensor is None or not tensor.is_meta:
        return tensor
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _initialise(model: nn.Module, owner: nn.Module, prefix: str) -> None:
    if hasattr(owner, "reset_parameters"):
        owner.reset_parameters()
    if hasattr(model, "_init_weights"):  # Hugging Face models initialise each module from the top
        with torch.no_grad():
            model._init_weights(owner)
    elif not hasattr(owner, "reset_parameters"):
        raise AutoparError(
            f"{type(owner).__name__} {prefix or '(the model)'} has parameters on the meta device and no reset_parameters() to initialise "
            "them; give it one, or build the model on a real device"
        )
