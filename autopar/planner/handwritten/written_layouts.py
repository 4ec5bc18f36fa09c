"""`read_function`: what a hand-written function does to a model, read from the DTensors and hooks that it leaves."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.planner.handwritten.fake_ranks import HandFunction, call_function, clean, fake_ranks, place_of, unwrapped
from autopar.sbp.placement import I, Layout, S
from autopar.torch_compat import CheckpointWrapper

# The size of each dim of the tensors by which hooks are tried, times the ranks: any that is no other dim's.
_SIZES = (3, 5, 7, 11, 13)


@dataclass(frozen=True)
class WeightUse:
    """How an op reads a weight: the dim that is split for a column-parallel and for a row-parallel product (-1: none),
    and the number of dims of its result. A lookup whose rows are split is row-parallel.
    """

    column_dim: int
    row_dim: int
    num_dims: int


@dataclass(frozen=True)
class DTensorLayout:
    """The layout of a parameter by mesh axes, and the text of what DTensor has."""

    layout: Layout
    text: str


@dataclass(frozen=True)
class WrittenLayouts:
    """The effect of a function on a model.

    `stored`: FQN -> layout, of every parameter. `styles`: FQN of a weight, or module of a lookup -> "colwise",
    "colwise_gather_output", "rowwise" or "embedding_rowwise". `tensor_axes`: mesh axes that split tensors; all others
    split the batch. `regathered`, `on_host`: FQNs of parameters that are gathered again for backward, and offloaded.
    `checkpointed`: FQNs of modules whose activations are computed again. `reduce_dtype`: of gradients, "" for their
    own. `remarks`: what no plan can say, in sentences.
    """

    stored: Mapping[str, DTensorLayout]
    styles: Mapping[str, str]
    tensor_axes: tuple[int, ...]
    is_sequence_parallel: bool
    regathered: frozenset[str]
    on_host: frozenset[str]
    checkpointed: tuple[str, ...]
    reduce_dtype: str
    param_dtype: str
    remarks: tuple[str, ...]


def read_function(
    function: HandFunction, model: nn.Module, mesh: Mesh, uses: Mapping[str, WeightUse]
) -> WrittenLayouts:
    """The effect of `function(model, device mesh)` on `model`, which is on the meta device and is changed.

    `uses`: FQN -> use of each weight of a product or lookup. PlanError with the line where the function raises, or with
    its name where it leaves a mesh axis without any use, or parameters whose gradients nobody sums.
    """
    before = {clean(name): _Facts(x) for name, x in model.named_parameters(remove_duplicate=False)}
    with fake_ranks(mesh) as devices:
        made = call_function(function, model, devices)
        return _Reader(function, made, unwrapped(made, model), mesh, uses, before).read()


class _Facts:
    """A parameter's global shape, dtype and whether it is trained."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.shape, self.dtype, self.is_trained = parameter.shape, parameter.dtype, parameter.requires_grad


class _Reader:
    """One module that a function made, while its ranks are there."""

    def __init__(
        self,
        function: HandFunction,
        made: nn.Module,
        model: nn.Module,
        mesh: Mesh,
        uses: Mapping[str, WeightUse],
        before: Mapping[str, _Facts],
    ) -> None:
        self.place, self.made, self.model, self.mesh = place_of(function), made, model, mesh
        self.uses, self.before = uses, before
        self.parameters = {clean(n): p for n, p in self.model.named_parameters(remove_duplicate=False)}
        self.groups = list(_groups(self.made))

    def read(self) -> WrittenLayouts:
        self._check_same_model()
        data = {axis for group in self.groups for axis in self._data_axes(group.mesh_info)} | self._ddp_axes()
        stored = {name: self._stored(parameter) for name, parameter in self.parameters.items()}
        split = {axis for one in stored.values() for axis, placement in enumerate(one.layout) if placement.is_split}
        tensor_axes = tuple(sorted(split - data))
        if idle := [a for a, size in enumerate(self.mesh.shape) if size > 1 and a not in data and a not in tensor_axes]:
            raise PlanError(
                f"{self.place} splits no parameter on mesh axis {self.mesh.axis_names[idle[0]]!r} and sums no gradients"
                " there, so that its ranks would train models that differ: call fully_shard or parallelize_module on it"
            )
        outputs = {name: self._output(name, use, tensor_axes, stored[name]) for name, use in self.uses.items()}
        self._check_all_sharded(data)
        rows = [out for name, out in outputs.items() if out and out[0] == "row"]
        is_sp = any(out[1] == "sequence" for out in rows)
        mixed = is_sp and any(out[1] == "whole" for out in rows)
        return WrittenLayouts(
            stored,
            {name: _style(out, self._is_lookup(name)) for name, out in outputs.items() if out},
            tensor_axes,
            is_sp,
            frozenset(name for group, again in self._with_names() if again for name in group),
            frozenset(name for group in self.groups if _offloads(group) for name in self._names(group)),
            tuple(clean(f"{n}.")[:-1] for n, m in self.model.named_modules() if _is_checkpointed(m)),
            self._dtype("reduce_dtype", "sums gradients"),
            self._dtype("param_dtype", "computes"),
            tuple(self._remarks(mixed)),
        )

    def _check_same_model(self) -> None:
        """PlanError if the function makes another model than the one that was traced."""
        if missing := [name for name in self.before if name not in self.parameters]:
            raise PlanError(f"{self.place} leaves no parameter {missing[0]}: the model that it is given has one")
        added = next((name for name in self.parameters if name not in self.before), None)
        other = next((n for n, facts in self.before.items() if self.parameters[n].shape != facts.shape), None)
        if added or other:
            what = f"adds parameter {added}" if added else f"gives {other} another shape"
            raise PlanError(f"{self.place} {what}: that is another model than it is given; change the model before")

    def _axes(self, mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
        """The mesh axes, together one dim of a device mesh that the function made of them."""
        ranks = mesh.mesh.movedim(dim, 0).reshape(mesh.size(dim), -1)[:, 0].tolist()
        axes = [axis for axis, size in enumerate(self.mesh.shape) if size > 1]
        for some in (some for count in range(len(axes) + 1) for some in combinations(axes, count)):
            if ranks == _ranks_along(some, self.mesh):
                return some
        raise PlanError(
            f"{self.place} makes a mesh whose axis {(mesh.mesh_dim_names or '?' * mesh.ndim)[dim]!r} has ranks {ranks},"
            f" which are no axes of mesh {self.mesh} together: take slices of the mesh that it is given"
        )

    def _data_axes(self, shards: Any) -> set[int]:
        dims = (shards.shard_mesh_dim, shards.replicate_mesh_dim)
        return {axis for dim in dims if dim is not None for axis in self._axes(shards.mesh, dim)}

    def _ddp_axes(self) -> set[int]:
        if not isinstance(self.made, DistributedDataParallel):
            return set()
        ranks = dist.get_process_group_ranks(self.made.process_group)
        axes = range(self.mesh.ndim)
        for some in (some for count in range(len(axes) + 1) for some in combinations(axes, count)):
            if ranks == _ranks_along(some, self.mesh):
                return set(some)
        raise PlanError(f"{self.place}: the ranks {ranks} of DistributedDataParallel are no axes of mesh {self.mesh}")

    def _stored(self, parameter: nn.Parameter) -> DTensorLayout:
        if not isinstance(parameter, DTensor):
            return DTensorLayout((I,) * self.mesh.ndim, "plain")
        layout, names = [I] * self.mesh.ndim, parameter.device_mesh.mesh_dim_names or ()
        for dim, placement in enumerate(parameter.placements):
            shard_dim = getattr(placement, "dim", None)
            for axis in self._axes(parameter.device_mesh, dim):
                layout[axis] = I if shard_dim is None else S(shard_dim % parameter.ndim)
        placed = ", ".join(map(repr, parameter.placements))
        return DTensorLayout(tuple(layout), f"({placed}) on {', '.join(names)}")

    def _output(
        self, name: str, use: WeightUse, tensor_axes: tuple[int, ...], stored: DTensorLayout
    ) -> tuple[str, str] | None:
        """("column" or "row", "split", "whole" or "sequence") of the op that reads weight `name`; None: all whole."""
        dims = {stored.layout[axis].dim for axis in tensor_axes if stored.layout[axis].is_split}
        if not dims:
            return None
        if len(dims) > 1 or not dims & {use.column_dim, use.row_dim} - {-1}:
            raise PlanError(
                f"{self.place} splits {name} as {stored.text}: only products whose outputs or inputs are split, and"
                " lookups whose rows are, can be priced; --pin prices a layout alone"
            )
        kind = "column" if use.column_dim in dims else "row"
        module = _module(self.model, name)
        hooks = [h for h in module._forward_hooks.values() if h.__module__.startswith("torch.distributed.tensor")]
        if not hooks:
            return kind, "split" if kind == "column" else "whole"
        return kind, self._tried(name, module, hooks, kind, use.num_dims)

    def _tried(self, name: str, module: nn.Module, hooks: list[Any], kind: str, num_dims: int) -> str:
        """The layout in which the hooks of a module leave its output."""
        mesh = self._own_mesh(name)
        shape = [size * mesh.size() for size in _SIZES[:num_dims]]
        local = list(shape)
        if kind == "column":
            local[-1] //= mesh.size()
        placement = Shard(num_dims - 1) if kind == "column" else Partial()
        empty = torch.empty(local, device="meta")
        output: Any = DTensor.from_local(empty, mesh, [placement], run_check=False)
        for hook in hooks:
            changed = hook(module, (empty,), output)
            output = output if changed is None else changed
        found = output.to_local().shape if isinstance(output, DTensor) else output.shape
        split = [dim for dim, (part, size) in enumerate(zip(found, shape)) if part != size]
        if not split:
            return "whole"
        if kind == "column" and split == [num_dims - 1]:
            return "split"
        if kind == "row" and split == [num_dims - 2] and num_dims > 2:
            return "sequence"
        raise PlanError(
            f"{self.place} leaves the output of the module of {name} split along dim {split[0]}: a column-parallel"
            " product may leave it split as it is or gather it, a row-parallel one sum it or split the sequence"
        )

    def _own_mesh(self, name: str) -> DeviceMesh:
        """The mesh of one axis on which the parameter is split as a tensor."""
        parameter = self.parameters[name]
        assert isinstance(parameter, DTensor)
        data = {axis for group in self.groups for axis in self._data_axes(group.mesh_info)}
        mesh = parameter.device_mesh
        own = [d for d in range(mesh.ndim) if mesh.size(d) > 1 and not data & set(self._axes(mesh, d))]
        if len(own) != 1:
            raise PlanError(f"{self.place} splits {name} as a tensor on several axes: flatten them into one first")
        return mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[own[0]]]

    def _is_lookup(self, name: str) -> bool:
        return isinstance(_module(self.model, name), nn.Embedding)

    def _names(self, group: Any) -> list[str]:
        own = {id(one.sharded_param) for one in group.fsdp_params}
        return [name for name, parameter in self.parameters.items() if id(parameter) in own]

    def _with_names(self) -> Iterator[tuple[list[str], bool]]:
        """The parameters of each group, and whether forward frees what it gathers of them; the root's does not unless
        that is asked for, since backward begins with it.
        """
        root = next((module for module in self.made.modules() if isinstance(module, FSDPModule)), None)
        for module in self.made.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                is_freed = not (module is root and state._auto_reshard_after_forward)
                for group in _groups_of(module):
                    yield self._names(group), is_freed and group.post_forward_mesh_info is not None

    def _check_all_sharded(self, data: set[int]) -> None:
        if not self.groups:
            return
        known = {name for group in self.groups for name in self._names(group)}
        left = [name for name, p in self.parameters.items() if name not in known and p.requires_grad]
        if left:
            axes = ", ".join(self.mesh.axis_names[axis] for axis in sorted(data))
            raise PlanError(
                f"{self.place} leaves {len(left)} parameters, {left[0]} first, out of fully_shard: nobody sums their"
                f" gradients over {axes}; call fully_shard of the whole model last"
            )

    def _dtype(self, name: str, what: str) -> str:
        """The dtype that the policies of all groups have as `name`; "" for none."""
        dtypes = {getattr(group.mp_policy, name) for group in self.groups}
        if len(dtypes) > 1:
            raise PlanError(f"{self.place} {what} in several dtypes, {dtypes}: give all groups one")
        (dtype,) = dtypes or {None}
        return str(dtype).removeprefix("torch.") if dtype is not None else ""

    def _remarks(self, is_mixed: bool) -> Iterator[str]:
        if is_mixed:
            yield "Some row-parallel products split their output along the sequence, some not: priced as if all did."
        wrapped = (module for module in self.model.modules() if isinstance(module, CheckpointWrapper))
        if any("context_fn" in getattr(module.checkpoint_fn, "keywords", {}) for module in wrapped):
            yield "Selective activation checkpointing is priced as if all activations were computed again."
        frozen = [n for n, facts in self.before.items() if facts.is_trained and not self.parameters[n].requires_grad]
        if frozen:
            yield f"{len(frozen)} parameters, {frozen[0]} first, are frozen here, priced as trained; freeze them first."
        other = {facts.dtype for n, facts in self.before.items() if self.parameters[n].dtype != facts.dtype}
        if other:
            yield (
                f"Parameters of {', '.join(map(str, other))} get another dtype here, which is not priced: give"
                " autopar a model of that dtype."
            )
        if any(_keeps_fewer_parts(group) for group in self.groups):
            yield (
                "A number as reshard_after_forward is priced as True: parameters are gathered again among all ranks,"
                " not among so many, which hold larger parts until then."
            )
        if any(_offloads(group) for group in self.groups):
            yield "CPUOffloadPolicy is priced as optimizer state on the host; parameters and gradients stay."


def _is_checkpointed(module: nn.Module) -> bool:
    """Whether the module is wrapped to compute its activations again, or is a block of transformers that does so."""
    is_block = any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
    return isinstance(module, CheckpointWrapper) or (is_block and module.gradient_checkpointing is True)


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from _groups_of(module)


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # from torch 2.13 on
    return [state._fsdp_param_group] if several is None else several


def _keeps_fewer_parts(group: Any) -> bool:
    after = group.post_forward_mesh_info
    return after is not None and after.shard_mesh_size != group.mesh_info.shard_mesh_size


def _offloads(group: Any) -> bool:
    return isinstance(group.offload_policy, CPUOffloadPolicy)


def _module(model: nn.Module, parameter: str) -> nn.Module:
    modules = {clean(f"{name}."): module for name, module in model.named_modules()}
    return modules[parameter.rpartition(".")[0] + "."]


def _style(output: tuple[str, str], is_lookup: bool) -> str:
    if is_lookup:
        return "embedding_rowwise"
    if output[0] == "row":
        return "rowwise"
    return "colwise" if output[1] == "split" else "colwise_gather_output"


def _ranks_along(axes: tuple[int, ...], mesh: Mesh) -> list[int]:
    """The ranks along `axes`, row-major, of which rank 0 is the first."""
    ranks = [0]
    for axis in axes:
        stride = math.prod(mesh.shape[axis + 1 :])
        ranks = [rank + stride * number for rank in ranks for number in range(mesh.shape[axis])]
    return ranks
