"""Parameters and buffers as DTensors: cut out of a real model, or materialised module by module from a meta one."""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.errors import AutoparError
from autopar.ir.export.meta_copy import bare
from autopar.ir.graph import Graph, Input
from autopar.ir.guards.example_values import keep_value
from autopar.mesh import PIPELINE
from autopar.runtime.checks.own_memory import check_own_memory
from autopar.runtime.interop.place_on_one_device import mark_places
from autopar.runtime.load_program import axes_of, torch_placements
from autopar.runtime.materialise import initialise
from autopar.runtime.pipeline.parameter_elsewhere import ParameterElsewhere, parameter_elsewhere, take_out_of_optimizers
from autopar.runtime.rank_agreement import from_first
from autopar.sbp.convert import is_float8, move
from autopar.sbp.placement import I, Layout, S, format_layout
from autopar.sbp.uneven.extents import extents_of_parts
from autopar.torch_compat import root_of

MOST_TOLD = 1 << 16  # elements of a buffer that ranks without it keep on the host: flags and masks of features
_SHARDED_HERE = "_is_of_autopar"  # attribute of the DTensors that `shard_model` made; False of a stand-in for one


def is_of_autopar(x: torch.Tensor) -> bool:
    """Whether `x` is a parameter or buffer of a compiled model, or stands for one until the model is planned."""
    return _SHARDED_HERE in vars(x)


def mark_stand_in(x: nn.Parameter) -> nn.Parameter:
    """`x`, known as one that stands for a parameter of a compiled model."""
    vars(x)[_SHARDED_HERE] = False
    return x


def is_taken_over(x: DTensor) -> bool:
    """Whether `x` is of a compiled model without stages, so that a module taken out of it can be compiled again."""
    return vars(x).get(_SHARDED_HERE, False) and PIPELINE not in (root_of(x.device_mesh).mesh_dim_names or ())


def shard(whole: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """This rank's part of `whole`, as a DTensor of whole shape on the mesh's device."""
    part = whole.detach()
    part = part.full_tensor() if isinstance(part, DTensor) else part  # of a module that was part of a compiled one
    for axis, placement in zip(axes_of(mesh), layout):
        part = move(part, axis, I, placement)
    part = torch.empty_like(part, device=mesh.device_type, memory_format=torch.contiguous_format).copy_(part)
    return on_mesh(part, whole, layout, mesh)


def on_mesh(part: torch.Tensor, whole: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """The DTensor of `part`, which this rank has of a tensor like `whole`, on the mesh's device."""
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(part, mesh, torch_placements(layout), run_check=False, shape=whole.shape, stride=stride)


def _set(owner: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Put `tensor` in the place of a parameter or buffer of `owner`."""
    table: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    table[name] = tensor
    if isinstance(owner, nn.RNNBase) and name in owner._flat_weights_names:  # it keeps them in a list besides
        position = owner._flat_weights_names.index(name)
        owner._flat_weights[position], owner._flat_weight_refs[position] = tensor, None


@contextmanager
def holding(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """`module` with `tensors`, by FQN, in place of what it has."""
    places = owners(module)
    present = {fqn: places[fqn][0]._parameters[places[fqn][1]] for fqn in tensors}
    put(module, tensors)
    try:
        yield
    finally:
        put(module, present)


def owners(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """FQN -> (module, attribute) of every parameter and buffer, each tied one under all its names."""
    places = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name in [*owner._parameters, *owner._buffers]:
            places[f"{prefix}.{name}" if prefix else name] = (owner, name)
    return places


def held(owner: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter or buffer of `owner` called so."""
    return owner._parameters[name] if name in owner._parameters else owner._buffers[name]


def not_sharded(module: nn.Module) -> list[str]:
    """FQNs of parameters and buffers that are no DTensors."""
    tensors = ((fqn, held(*place)) for fqn, place in owners(module).items())
    return [fqn for fqn, x in tensors if x is not None and not isinstance(x, (DTensor, ParameterElsewhere))]


def layout_of(x: DTensor, fqn: str, mesh: DeviceMesh) -> Layout:
    """How `x`, called `fqn`, lies on `mesh`; AutoparError if it does not lie there in parts or whole."""
    if x.device_mesh != mesh:
        raise AutoparError(f"{fqn} lies on mesh {x.device_mesh}, the model on {mesh}; expected the model's mesh")
    known = [placement for placement in x.placements if type(placement) in (Shard, Replicate)]
    if len(known) < len(x.placements):
        raise AutoparError(f"{fqn} lies in {x.placements}; a parameter or buffer is expected to be Shard or Replicate")
    return tuple(S(placement.dim) if isinstance(placement, Shard) else I for placement in known)


def install(module: nn.Module, graph: Graph, tensors: Mapping[str, DTensor], *, is_in_use: bool) -> None:
    """Put each DTensor of `tensors` (by FQN of `graph`'s inputs) in its place, tied places included.

    If the module `is_in_use`, what stands for its parameters stays the objects they are, for an optimizer may hold
    them; AutoparError if one cannot.
    """
    places = owners(module)
    for item in stateful(graph):
        tensor = tensors[item.fqn]
        for fqn in (item.fqn, *item.aliases):
            owner, name = places[fqn]
            if is_in_use and isinstance(old := owner._parameters.get(name), DTensor):
                tensor = _in_place_of(old, tensor, fqn)
            _set(owner, name, tensor)


@torch.no_grad()
def fill_in(module: nn.Module, contents: Mapping[str, torch.Tensor]) -> None:
    """Give parameters and buffers of `module`, by FQN, these contents; those on the meta device are replaced."""
    places = owners(module)
    for fqn, content in contents.items():
        old = held(*places[fqn])
        assert old is not None, f"{fqn} is a tensor of the module"
        if not old.is_meta:
            old.copy_(content)
            continue
        new = nn.Parameter(content, old.requires_grad) if isinstance(old, nn.Parameter) else content
        put(module, {same: new for same, place in places.items() if held(*place) is old})


def drop_others(module: nn.Module, graph: Graph, device: torch.device) -> dict[str, torch.Tensor]:
    """Leave nothing in the places of buffers that the graph has not, for other ranks hold them, and in those of such
    parameters what has no content: FQN -> what it is like.
    """
    own = {fqn for item in stateful(graph) for fqn in (item.fqn, *item.aliases)}
    written = {fqn for fqn, _ in graph.mutations}
    dropped: dict[str, torch.Tensor] = {}
    bares: dict[int, torch.Tensor] = {}  # a tied one under all its names
    gone: list[torch.Tensor] = []
    for fqn, (owner, name) in owners(module).items():
        held = owner._parameters if name in owner._parameters else owner._buffers
        tensor = held[name]
        if fqn not in own and tensor is not None:
            dropped[fqn] = bares.setdefault(id(tensor), _like(tensor, is_written=fqn in written))
            gone.append(tensor)
    if dropped:
        mark_places(module)
        empty = {
            id(x): parameter_elsewhere(x, fqn, device)
            for fqn, x in reversed(dropped.items())
            if isinstance(x, nn.Parameter)
        }
        put(module, {fqn: empty.get(id(x)) for fqn, x in dropped.items()})
        take_out_of_optimizers(gone)
        _refuse_loads_inside(module)
    return dropped


def _like(x: torch.Tensor, *, is_written: bool) -> torch.Tensor:
    """`x` without data, with what a small buffer holds that no forward writes to, for branches of later traces."""
    is_told = not (is_written or isinstance(x, nn.Parameter) or x.is_meta) and x.numel() <= MOST_TOLD
    return keep_value(bare(x), x.detach().cpu()) if is_told else bare(x)


def _refuse_loads_inside(module: nn.Module) -> None:
    """From now on load_state_dict of a module inside `module`, of which this rank holds a part, raises AutoparError."""
    named: dict[nn.Module, list[str]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        if prefix and (owner._parameters or owner._buffers):
            named.setdefault(owner, []).append(f"{prefix}.")
    for owner, places in named.items():
        owner.register_load_state_dict_pre_hook(functools.partial(_check_load_of_all, tuple(places)))
    for owner in (module, *named):
        owner.register_state_dict_post_hook(_leave_out_others)


def _leave_out_others(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, x in module._parameters.items():
        if isinstance(x, ParameterElsewhere):
            state.pop(prefix + name, None)


def _check_load_of_all(
    places: tuple[str, ...], module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
) -> None:
    if not prefix.endswith(places):
        raise AutoparError(
            f"{places[0].removesuffix('.')} was loaded by load_state_dict of a module inside the compiled one, of whose"
            " stages this rank holds its own only: call model.load_state_dict(state, strict=False) on the compiled"
            f" model, with keys such as {places[0]}{next(iter(module._parameters or module._buffers))}"
        )


def put(module: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Each of `tensors`, by FQN, in the place of a parameter or buffer."""
    places = owners(module)
    for fqn, tensor in tensors.items():
        _set(*places[fqn], tensor)


def _in_place_of(old: nn.Parameter, new: torch.Tensor, fqn: str) -> nn.Parameter:
    """`old` with the content of `new`, and its own hooks, which torch leaves with the content."""
    if old is new:
        return old
    if weakref.getweakrefs(old):
        raise AutoparError(
            f"parameter {fqn} cannot be sharded at the first call, because there are weak references to it; give"
            " example args= or kwargs= to autopar.compile, so that it is sharded at once"
        )
    on_gradient, on_accumulated = old._backward_hooks, old._post_accumulate_grad_hooks
    torch.utils.swap_tensors(old, new)
    old._backward_hooks, old._post_accumulate_grad_hooks = on_gradient, on_accumulated
    return old


def stateful(graph: Graph) -> Iterator[Input]:
    """Parameters and buffers among the graph's inputs."""
    return (item for item in graph.inputs if item.kind in ("parameter", "buffer"))


def shard_model(model: nn.Module, graph: Graph, layouts: Mapping[str, Layout], mesh: DeviceMesh) -> dict[str, DTensor]:
    """This rank's parts of those parameters and buffers of `model` that the graph has, by FQN of its inputs.

    Tensors on the meta device are initialised here, as `materialise.initialise` says, from the first rank's random
    state.
    """
    check_own_memory(model, {fqn for fqn, _ in graph.mutations})
    items = {fqn: item for item in stateful(graph) for fqn in (item.fqn, *item.aliases)}
    named = [(items.get(fqn), x) for fqn, x in (*model.named_parameters(), *model.named_buffers())]
    by_tensor = {id(x): item for item, x in named}
    done: dict[str, DTensor] = {}

    def store(old: torch.Tensor, content: torch.Tensor) -> None:
        item = by_tensor[id(old)]
        if item is None:  # another rank's
            return
        part = shard(content, layouts[item.value.name], mesh)
        is_parameter = item.kind == "parameter"
        done[item.fqn] = as_dtensor(nn.Parameter(part, requires_grad=old.requires_grad)) if is_parameter else part
        vars(done[item.fqn])[_SHARDED_HERE] = True

    def fetch(old: torch.Tensor) -> torch.Tensor | None:
        item = by_tensor[id(old)]
        return whole(done[item.fqn], layouts[item.value.name], mesh) if item is not None and item.fqn in done else None

    for _, x in named:
        if not x.is_meta:
            store(x, x)
    if any(x.is_meta for _, x in named):
        with _random_state_of_first(mesh):
            initialise(model, mesh.device_type, fetch, store)
    return done


def as_dtensor(x: torch.Tensor) -> DTensor:
    """`x`, a parameter, buffer or gradient of a sharded model."""
    assert isinstance(x, DTensor), f"a sharded model holds DTensors, found {type(x).__name__}"
    return x


def whole(x: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """All of a tensor stored in `layout`, on every rank."""
    part, axes = as_dtensor(x).to_local().detach(), axes_of(mesh)
    for axis, placement, extent in reversed([*zip(axes, layout, extents_of_parts(x.shape, axes, layout))]):
        part = move(part, axis, placement, I, extent)
    return part.clone()


@contextmanager
def _random_state_of_first(mesh: DeviceMesh) -> Iterator[None]:
    """Draw as the first rank would; afterwards each rank has its own random state back."""
    devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
    state, *device_states = from_first(mesh, [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)])
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(state)
        for device, device_state in zip(devices, device_states):
            torch.cuda.set_rng_state(device_state, device)
        yield


def cut_to_parts(
    module: nn.Module,
    state: dict[str, Any],
    elsewhere: Mapping[str, torch.Tensor],
    missing: list[str],
    errors: list[str],
) -> None:
    """Take what is `elsewhere` out of `state`, which is about to be loaded, and cut every whole tensor that stands for
    a DTensor of `module` to this rank's part of it.

    What is wrong with the former is added to the lists of torch's `load_state_dict`, so that all ranks say the same;
    the state of this rank's stages alone has none of it.
    """
    places = owners(module)
    is_whole = any(fqn in state for fqn in elsewhere) or not any(fqn in state for fqn in places if fqn not in elsewhere)
    for fqn, like in elsewhere.items():
        owner, name = places[fqn]
        if is_whole and fqn not in state and name not in owner._non_persistent_buffers_set:
            missing.append(fqn)
        elif isinstance(x := state.pop(fqn, None), torch.Tensor) and x.shape != like.shape:
            errors.append(
                f"size mismatch for {fqn}: copying a param with shape {x.shape} from checkpoint, the shape in current"
                f" model is {like.shape}."
            )
        if isinstance(x := held(owner, name), ParameterElsewhere):
            state[fqn] = x  # nothing is missing here, and nothing is written
    for fqn, place in places.items():
        x, like = state.get(fqn), held(*place)
        if (
            isinstance(x, torch.Tensor)
            and not isinstance(x, DTensor)
            and isinstance(like, DTensor)
            and x.shape == like.shape
        ):
            whole = x.detach().to(like.device)
            state[fqn] = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def whole_state(own: Mapping[str, Any], modules: Sequence[str], group: dist.ProcessGroup) -> dict[str, Any]:
    """The whole tensors of all stages, on every rank, in the order of the `modules` whose they are: each is sent along
    the pipeline's `group` by the first rank that has it in `own`, whatever hooks of state dicts made of the parameters.
    """
    has = {name: isinstance(x, torch.Tensor) and not isinstance(x, ParameterElsewhere) for name, x in own.items()}
    reports: list[Any] = [None] * dist.get_world_size(group)
    mine = {name: (x.shape, x.dtype) for name, x in own.items() if has[name]}
    dist.all_gather_object(reports, mine, group=group)
    holders = {name: rank for rank in reversed(range(len(reports))) for name in reports[rank]}
    places = {module: number for number, module in enumerate(modules)}
    in_order = dict.fromkeys(name for reported in reports for name in reported)
    device = next(x.device for x in own.values() if isinstance(x, DTensor))
    state: dict[str, Any] = {}
    for name in sorted(in_order, key=lambda name: _place(name, places)):
        shape, dtype = reports[holders[name]][name]
        x = own[name] if has.get(name) else torch.empty(shape, dtype=dtype, device=device)
        whole = (x.full_tensor() if isinstance(x, DTensor) else x.to(device)).detach().contiguous()
        dist.broadcast(whole, group=group, group_src=holders[name])
        state[name] = whole
    return state | {name: x for name, x in own.items() if name not in state}


def _place(name: str, places: Mapping[str, int]) -> float:
    """The place of an entry of a state dict: that of the module whose it is, or behind all of the module whose hook
    made it.
    """
    owner = name.rpartition(".")[0]
    if owner in places:
        return places[owner]
    while owner and owner not in places:
        owner = owner.rpartition(".")[0]
    inside = f"{owner}." if owner else ""
    return max(number for module, number in places.items() if module == owner or module.startswith(inside)) + 0.5


def stored_layouts(module: nn.Module, graph: Graph, mesh: DeviceMesh) -> dict[str, str]:
    """FQN -> layout of the parameters and buffers of the graph that lie on the mesh."""
    places = owners(module)
    tensors = {item.fqn: held(*places[item.fqn]) for item in stateful(graph)}
    return {fqn: format_layout(layout_of(x, fqn, mesh)) for fqn, x in tensors.items() if isinstance(x, DTensor)}


def gathered(x: DTensor) -> torch.Tensor:
    """All of `x`, on every rank of its mesh; of float8, which backends do not know, its bytes are gathered."""
    if not is_float8(x.dtype):
        return x.full_tensor()
    raw = x.to_local().view(torch.uint8)
    kept = DTensor.from_local(raw, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    return kept.full_tensor().view(x.dtype)
