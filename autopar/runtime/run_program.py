"""One call of a loaded program: global arguments in, the outputs of the model out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.errors import AutoparError
from autopar.ir.autocast import autocast_off
from autopar.ir.export.placeholders import flat_arguments
from autopar.ir.graph import Input
from autopar.ir.inference.kv_caches import caches_given, giving_back
from autopar.runtime.interop.compiled_after import check_not_traced
from autopar.runtime.interop.output_hooks import refuse_hooks
from autopar.runtime.interop.plain_layers import note_backward
from autopar.runtime.load_program import Loaded, torch_placements
from autopar.runtime.local_batch import LocalBatch, redistributed
from autopar.runtime.rank_agreement import peers_alive
from autopar.sbp.axis import Axis
from autopar.sbp.convert import move
from autopar.sbp.placement import I, Layout, S, is_even
from autopar.torch_compat import has_hooks_of_all_modules, peek_interpreter_stack, pytree


@dataclass(frozen=True, eq=False)
class Fetched:
    """The `self` of a program (`GeneratedSelf`) under torch.compile, to which reading a DTensor is the end of a graph:
    `loaded`, with `parts` of parameters and buffers by FQN, which were read before.
    """

    loaded: Loaded
    parts: Mapping[str, torch.Tensor]

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.loaded.axes

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        return self.loaded.constants

    @property
    def used(self) -> Mapping[str, torch.Tensor]:
        return self.loaded.used

    @property
    def step_seed(self) -> int:
        return self.loaded.step_seed

    def draw_seed(self) -> int:
        return self.loaded.draw_seed()

    def local(self, fqn: str) -> torch.Tensor:
        return self.parts[fqn]

    def locals_together(self, *fqns: str) -> tuple[torch.Tensor, ...]:
        return tuple(map(self.local, fqns))

    def local_copy(self, fqn: str) -> torch.Tensor:
        return self.parts[fqn].clone()

    def write_back(self, fqn: str, value: torch.Tensor) -> None:
        self.loaded.write_back(fqn, value)


@torch.compiler.disable
def _fetched(loaded: Loaded) -> Fetched:
    kinds = "parameter", "buffer"
    return Fetched(
        loaded, {item.fqn: loaded.local(item.fqn) for item, _ in loaded.program.inputs if item.kind in kinds}
    )


def run(
    loaded: Loaded,
    args: tuple,
    kwargs: dict,
    parts: LocalBatch | None,
    *,
    leaves: list[Any] | None = None,
    is_whole: bool,
) -> Any:
    """Call the program on the arguments and put its outputs together again.

    `parts`: of arguments and outputs, if ranks hold the batch so. `leaves`: of the arguments, if they are known.
    `is_whole`: all other outputs are given whole, as plain tensors; otherwise those that lie split are DTensors.
    """
    if leaves is None or torch.compiler.is_compiling():  # whose graph begins with the arguments themselves
        leaves = flat_arguments(loaded.graph.argument_spec, args, kwargs)
    inputs = {item.value.name: (item, layout) for item, layout in loaded.program.inputs if item.kind == "argument"}
    by_name = {
        name: leaf for name, leaf in zip(loaded.graph.arguments, leaves) if isinstance(name, str) and name in inputs
    }
    own = _fetched(loaded) if torch.compiler.is_compiling() else loaded
    if parts is not None and torch.is_grad_enabled():
        by_name = {name: _with_own_gradient(x, loaded, parts) for name, x in by_name.items()}
    with peers_alive(), autocast_off(loaded.mesh.device_type):
        flat = loaded.function(own, *(_enter(by_name[name], *found, loaded, parts) for name, found in inputs.items()))
    carried = dict(loaded.choices.graph.carried)
    outputs = [
        _leave_in_place(x, layout, loaded)
        if i in carried
        else parts.leave(x, loaded.graph.outputs[i].shape, loaded.axes, layout, loaded.rows[i])
        if parts is not None and i in loaded.rows
        else _leave(x, loaded.graph.outputs[i], layout, loaded, is_whole=is_whole)
        for i, (x, (_, layout)) in enumerate(zip(flat, loaded.program.outputs))
    ]
    if parts is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        note_backward([outputs[number] for number in loaded.rows], loaded.mesh)
    for number in loaded.copied if torch.is_grad_enabled() else ():
        refuse_hooks(outputs[number])
    if caches := caches_given(args, kwargs):
        with giving_back(caches):
            return pytree.tree_unflatten(outputs, loaded.graph.output_spec)
    return pytree.tree_unflatten(outputs, loaded.graph.output_spec)


def whole_batch(
    args: tuple, kwargs: dict, parts: LocalBatch, axes: tuple[Axis, ...], device_type: str
) -> tuple[tuple, dict]:
    """The arguments of a step in microbatches, all ranks' parts gathered."""
    moved = {"move": lambda x: on_device(x, "of the batch", device_type), "axes": axes}
    return pytree.tree_map(lambda x: parts.whole(x, **moved), (args, kwargs))


def is_more_than_forward(module: nn.Module) -> bool:
    """Whether a call of `module` runs more than the forward of its class: hooks, or a forward around that."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    is_around = "forward" in module.__dict__ or module._compiled_call_impl is not None
    return any(own) or is_around or has_hooks_of_all_modules()


def check_no_hooks(module: nn.Module) -> None:
    """AutoparError if `module` has hooks of its own, which steps in microbatches do not run."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise AutoparError(
            "the module has hooks of its own, which train_step with stages or microbatches does not run; register"
            " them on its submodules before autopar.compile, or do in the loop what they do"
        )


def check_no_transform() -> None:
    """AutoparError inside torch.func, whose transforms know no collectives, and where the call is traced."""
    check_not_traced("torch.jit.trace" if torch.jit.is_tracing() else "")
    check_not_traced("torch.export" if torch.compiler.is_exporting() else "")
    check_not_traced("make_fx" if get_proxy_mode() is not None else "")
    if peek_interpreter_stack() is not None:
        raise AutoparError(
            "the model was called inside torch.func.grad, vmap or jvp, or what is built of them (jacrev, hessian):"
            " they know no collectives. Call it plainly, and differentiate its output by torch.autograd.grad or"
            " torch.autograd.functional.jacobian, or apply torch.func inside forward, or to the model before"
            " autopar.compile"
        )


def _with_own_gradient(x: torch.Tensor, loaded: Loaded, parts: LocalBatch) -> torch.Tensor:
    """The argument `x`, which gets the gradient of the rank's own loss if it is of one, or if layers before get it."""
    outputs = [value.needs_grad and i not in loaded.rows for i, value in enumerate(loaded.graph.outputs)]
    if not x.requires_grad or isinstance(x, DTensor) or not x.ndim or (x.is_leaf and any(outputs)):
        return x
    own = parts.with_own_gradient(x)
    if not torch.compiler.is_compiling():
        note_backward([own], loaded.mesh)
    return own


def _enter(leaf: torch.Tensor, item: Input, layout: Layout, loaded: Loaded, parts: LocalBatch | None) -> torch.Tensor:
    if isinstance(leaf, DTensor):
        _check_mesh(leaf.device_mesh, item, loaded.mesh)
        if any(placement.shares for placement in layout):  # which DTensor does not know
            whole = leaf.full_tensor()
            return redistributed(whole, whole.shape, loaded.axes, (I,) * len(layout), layout)
        return leaf.redistribute(loaded.mesh, torch_placements(layout)).to_local()
    leaf = on_device(leaf, item.fqn, loaded.mesh.device_type)
    if parts is not None:
        return parts.enter(leaf, loaded.axes, layout)
    for axis, placement in zip(loaded.axes, layout):
        leaf = move(leaf, axis, I, placement)
    return leaf


def on_device(x: torch.Tensor, name: str, device_type: str) -> torch.Tensor:
    """Argument `name` of a call on the device of the mesh; AutoparError if it has no values."""
    if x.is_meta and device_type != "meta":
        raise AutoparError(
            f"argument {name} is on the meta device and has no values; expected a tensor with values: those on"
            " meta are examples, for args= of autopar.compile and autopar.plan"
        )
    return x.to(device_type)


def _check_mesh(found: DeviceMesh, item: Input, expected: DeviceMesh) -> None:
    if found != expected:
        raise AutoparError(
            f"argument {item.fqn} is a DTensor on mesh {found}, the model is on mesh {expected}; expected the model's"
            " mesh"
        )


def _leave_in_place(x: torch.Tensor, layout: Layout, loaded: Loaded) -> torch.Tensor:
    """A value that is carried to the next call, as this call left it: a DTensor, or a plain tensor if it is whole."""
    if not any(placement.is_split for placement in layout):
        return x
    return DTensor.from_local(x, loaded.mesh, torch_placements(layout), run_check=False)


def _leave(x: Any, value: Any, layout: Layout, loaded: Loaded, *, is_whole: bool) -> Any:
    if not any(placement.is_split for placement in layout):
        return x
    if is_whole:
        return redistributed(x, value.shape, loaded.axes, layout, (I,) * len(layout))
    if any(placement.shares or placement.unit > 1 for placement in layout):
        plain = tuple(S(placement.dim) if placement.is_split else I for placement in layout)
        x, layout = redistributed(x, value.shape, loaded.axes, layout, plain), plain
    if is_even(value.shape, layout, tuple(loaded.mesh.shape)):
        return DTensor.from_local(x, loaded.mesh, torch_placements(layout), run_check=False)
    split = {placement.dim for placement in layout}
    shape = torch.Size(value.shape[dim] if dim in split else size for dim, size in enumerate(x.shape))
    ends = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(x, loaded.mesh, torch_placements(layout), run_check=False, **ends)
