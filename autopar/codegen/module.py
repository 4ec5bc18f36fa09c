"""The sharded module: the user's own module class, its tensors DTensors, its forward the generated program."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.utils import _pytree as pytree  # the pytree of torch.export's specs; there is no public one in all our torch versions

from autopar.codegen.agree import agreed_graph, check_seed, check_weights
from autopar.codegen.load import Loaded, axes_of, load, torch_placements
from autopar.codegen.lower import lower
from autopar.codegen.state import install, owners, shard_model, stateful, without_data
from autopar.errors import AutoparError
from autopar.ir.constants import run_constants
from autopar.ir.graph import Graph, Input
from autopar.ir.skeleton import skeleton
from autopar.ir.trace import trace
from autopar.plan.plan import Plan
from autopar.sbp.collectives import move
from autopar.sbp.placement import I, format_layout

Planner = Callable[[Graph, dict[str, str]], Plan]  # (graph, pins of what is already laid out) -> plan, equal on every rank


class ShardedModule(nn.Module):
    """Mixed into the class of the user's model by `shard_module`."""

    _autopar: "Runtime"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._autopar.call(self, args, kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._autopar.current()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._autopar.current()
        return super().load_state_dict(*args, **kwargs)

    @property
    def plan(self) -> Plan:
        """The plan in use for the last shapes and mode seen."""
        return self._autopar.current().plan

    @property
    def code(self) -> str:
        """The generated Python of this rank."""
        return self._autopar.current().source

    @property
    def input_placements(self) -> dict[str, tuple[TorchPlacement, ...]]:
        """DTensor placements in which the plan wants each argument; handing them in so saves slicing the global batch."""
        return {item.fqn: torch_placements(layout) for item, layout in self._autopar.current().program.inputs if item.kind == "argument"}


@dataclass
class Runtime:
    """What a sharded module runs with: the programs loaded so far, by mode and input shapes."""

    mesh: DeviceMesh
    plan: Planner
    source: nn.Module  # the user's model until its tensors have been taken over
    original: type[nn.Module]
    loaded: dict[Any, Loaded] = field(default_factory=dict)
    last: Loaded | None = None

    def current(self) -> Loaded:
        """The program last used."""
        if self.last is None:
            raise AutoparError("not planned yet: the model is traced at its first call; call it once, or give args= to autopar.compile")
        return self.last

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        self.prepare_now(module, args, kwargs)
        return run(self.last, pytree.tree_leaves((args, kwargs)))

    def prepare_now(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Make `current()` the program for these arguments and the module's mode."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (spec, tuple(map(_describe, leaves)), tuple(m.training for m in module.modules()))
        if key not in self.loaded:
            self.loaded[key] = self.prepare(module, args, kwargs)
        self.last = self.loaded[key]

    def prepare(self, module: nn.Module, args: tuple, kwargs: dict) -> Loaded:
        """Trace, plan and load for these arguments; the first time, also take over the model's tensors."""
        graph = agreed_graph(self.mesh, lambda: self._trace(module, args, kwargs))
        is_first = not self.loaded
        plan = self.plan(graph, {} if is_first else _pins(next(iter(self.loaded.values()))))
        if is_first:
            check_weights(self.mesh, self.source)
            install(module, graph, shard_model(self.source, graph, plan.assignment.layouts, self.mesh))
            self.source = module
        device = torch.device(self.mesh.device_type)
        program = lower(graph, plan.mesh, plan.assignment)
        if program.has_random_ops:
            check_seed(self.mesh)
        return load(
            program, plan=plan, graph=graph, mesh=self.mesh, axes=axes_of(self.mesh),
            constants=run_constants(graph, device), owners=owners(module),
        )  # fmt: skip

    def _trace(self, module: nn.Module, args: tuple, kwargs: dict) -> Graph:
        bare = skeleton(module)
        del bare._autopar
        bare.__class__ = self.original
        return trace(bare, *pytree.tree_map_only(torch.Tensor, _as_meta, (args, kwargs)))


def shard_module(model: nn.Module, mesh: DeviceMesh, plan: Planner) -> ShardedModule:
    """A module like `model` that plans itself at its first call; `model` itself is left as it is."""
    module = skeleton(model)
    without_data(module, mesh)
    original = type(model)
    module.__class__ = type(f"Sharded{original.__name__}", (ShardedModule, original), {})
    module._autopar = Runtime(mesh, plan, model, original)
    return module


def run(loaded: Loaded, leaves: list[Any]) -> Any:
    """Call the program on the flat arguments and put its outputs together again."""
    inputs = {item.value.name: (item, layout) for item, layout in loaded.program.inputs if item.kind == "argument"}
    by_name = {name: leaf for name, leaf in zip(loaded.graph.arguments, leaves) if isinstance(name, str) and name in inputs}
    flat = loaded.function(loaded, *(_enter(by_name[name], *found, loaded) for name, found in inputs.items()))
    return pytree.tree_unflatten([_leave(x, layout, loaded) for x, (_, layout) in zip(flat, loaded.program.outputs)], loaded.graph.output_spec)


def _enter(leaf: torch.Tensor, item: Input, layout: tuple, loaded: Loaded) -> torch.Tensor:
    if isinstance(leaf, DTensor):
        return leaf.redistribute(loaded.mesh, torch_placements(layout)).to_local()
    leaf = leaf.to(loaded.mesh.device_type)
    for axis, placement in zip(loaded.axes, layout):
        leaf = move(leaf, axis, I, placement)
    return leaf


def _leave(x: Any, layout: tuple, loaded: Loaded) -> Any:
    if any(placement.is_split for placement in layout):
        return DTensor.from_local(x, loaded.mesh, torch_placements(layout), run_check=False)
    return x


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return type(leaf), leaf


def _as_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)


def _pins(loaded: Loaded) -> dict[str, str]:
    layouts = loaded.plan.assignment.layouts
    return {item.fqn: format_layout(layouts[item.value.name]) for item in stateful(loaded.graph)}
