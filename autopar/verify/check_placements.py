"""A type check of generated code by `spmd_types`, which infers every variable's placement independently of autopar.

The inferred placement is compared with the claimed layout. The checker knows S only as V (varying). It cannot know that
a product contracted over a split dim is a pending sum, so a claim "P" turns an inferred V into P; every other
disagreement is an error. Tests use it: `spmd_types` comes with autopar's extra "dev".
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import spmd_types as spmd
import spmd_types.checker
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.codegen.emit import emit
from autopar.codegen.program import Program
from autopar.ir.op_facts import facts_of
from autopar.runtime.load_program import axes_of, compile_source, namespace
from autopar.sbp.axis import Axis
from autopar.sbp.convert import Extents
from autopar.sbp.placement import Layout, Placement
from autopar.torch_compat import pytree

_KINDS = {"S": spmd.V, "L": spmd.V, "E": spmd.V, "P": spmd.P, "I": spmd.I, "R": spmd.R}
# Ops that are linear in an operand that may be pending and that the checker has no entry for: a pending operand makes
# the result pending, else a varying one makes it varying. The op rules claim the linearity; tests check them against
# the real ops.
_LINEAR = {
    "adaptive_avg_pool2d",
    "avg_pool1d",
    "avg_pool2d",
    "constant_pad_nd",
    "conv1d",
    "conv2d",
    "dropout",
    "embedding",
    "flex_attention",
    "gather",
    "index",
    "index_select",
    "masked_fill",
    "pad",
    "repeat_interleave",
    "scaled_dot_product_attention",
    "scan",
    "slice",
    "split_with_sizes",
    "to",
    "tril",
    "triu",
    "where",
}
_EXPANDING = {"expand", "expand_as", "broadcast_to", "repeat"}
_WITHOUT_BIAS = {"addmm": torch.mm, "baddbmm": torch.bmm, "addmv": torch.mv}


def check(program: Program, mesh: DeviceMesh) -> None:
    """Run `program` once on zeros under the checker's strict mode; SpmdTypeError on the first disagreement.

    Needs a process group, possibly torch's fake one: no numbers are compared.
    """
    check_source(emit(program, is_typed=True), program, mesh)


def check_source(source: str, program: Program, mesh: DeviceMesh) -> None:
    """`check` of the typed source `source`, generated from `program`."""
    referee = _Referee(program, mesh)
    names = namespace() | _names(referee)
    forward = compile_source(source, names)
    inputs = [
        (referee.tensor(item.value, layout), layout) for item, layout in program.inputs if item.kind == "argument"
    ]
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck(strict_mode="strict"):
        for argument, layout in inputs:
            referee.declare(argument, *layout)
        if program.gather is not None:
            referee.used = names["gather"](referee)
        forward(referee, *(argument for argument, _ in inputs))


def _names(referee: "_Referee") -> dict[str, Any]:
    """The functions that generated code calls, by name, replaced by ones that the checker can follow."""

    def together(
        axis: Axis, sources: Any, targets: Any, *tensors: torch.Tensor, extents: Extents = (), **_: Any
    ) -> tuple[torch.Tensor, ...]:
        each = zip(tensors, sources, targets, extents or (None,) * len(tensors), strict=True)
        return tuple(referee.convert(x, axis, src, dst, extent) for x, src, dst, extent in each)

    def bucket(*bucket: Any, **options: Any) -> SimpleNamespace:
        made = SimpleNamespace(converted=lambda: together(*bucket, **options), started=lambda *_: made)
        return made

    return {
        "aten": _Ops(torch.ops.aten, "aten", referee),
        "autopar": _Ops(torch.ops.autopar, "autopar", referee),
        "declare": referee.declare,
        "convert": referee.convert,
        "move": referee.convert,
        "cast_stored": lambda x, dtype: x.to(dtype),
        "local": _Untyped(namespace()["local"]),
        "seeded": lambda *_: torch.enable_grad(),
        "GatherBucket": bucket,
        "regathered": lambda *_: nullcontext(),
        "recomputed": lambda function, *inputs: function(*inputs),
        "Offload": lambda *_: nullcontext(),
        "convert_together": together,
    }


class _Referee:
    """`self` of the generated function."""

    def __init__(self, program: Program, mesh: DeviceMesh) -> None:
        self.mesh_axes = axes_of(mesh, shares=program.mesh.shares)
        self.axes = (*self.mesh_axes, *(tuple(self.mesh_axes[axis] for axis in axes) for axes in program.joint_axes))
        self.program = program
        self.used: dict[str, torch.Tensor] = {}
        self.expanded: dict[int, torch.Tensor] = {}
        self.inputs = {item.fqn: (item.value, layout) for item, layout in program.inputs}
        self.constants = {
            item.value.name: self.tensor(item.value, layout)
            for item, layout in program.inputs
            if item.kind == "constant"
        }

    @property
    def step_seed(self) -> int:
        return 0

    def draw_seed(self) -> int:
        return 0

    def tensor(self, value: Any, layout: Layout) -> torch.Tensor:
        return torch.zeros(
            _own_shape(value.shape, self.mesh_axes, layout), dtype=value.dtype, requires_grad=value.needs_grad
        )

    def local(self, fqn: str) -> torch.Tensor:
        with spmd.no_typecheck():
            tensor = self.tensor(*self.inputs[fqn])
        return nn.Parameter(tensor) if tensor.requires_grad else tensor

    def locals_together(self, *fqns: str) -> tuple[torch.Tensor, ...]:
        return tuple(map(self.local, fqns))

    local_copy = local

    def write_back(self, fqn: str, value: torch.Tensor) -> None:
        """Does nothing: numbers are not compared."""

    def declare(self, x: torch.Tensor, *layout: Placement) -> torch.Tensor:
        """`x` if the checker infers `layout` for it, else SpmdTypeError; a value without a type is given that one."""
        types = {_group(axis): _KINDS[p.kind] for axis, p in zip(self.mesh_axes, layout) if axis.size > 1}
        is_expanded = id(x) in self.expanded
        known = spmd.get_local_type(x) if spmd.has_local_type(x) else {}
        if not known:
            spmd.assert_type(x, types)
            return x
        for group, wanted in types.items():
            inferred = spmd.get_axis_local_type(x, group)
            if wanted is spmd.P and inferred is spmd.V:
                x = spmd.reinterpret(x, group, src=spmd.V, dst=spmd.P)
            elif wanted is spmd.V and is_expanded and (inferred is spmd.R or not x.requires_grad):
                # a part of an expanded whole value is the whole value expanded less
                x = spmd.reinterpret(x, group, src=inferred, dst=spmd.V, expert_mode=True)
            elif wanted is not inferred and not ({wanted, inferred} == {spmd.R, spmd.I} and not x.requires_grad):
                raise spmd.SpmdTypeError(f"claimed {wanted}, inferred {inferred}")
        return x

    def convert(
        self,
        x: torch.Tensor,
        axis: Axis | tuple[Axis, ...],
        src: Placement,
        dst: Placement,
        extent: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """`x` converted by the checker's own functions, which take one mesh axis at a time.

        They know equal parts only: others are filled up before, and cut to the rank's own size after.
        """
        joint = axis if isinstance(axis, tuple) else (axis,)
        wanted, filled = _converted_shapes(x.shape, joint, src, dst, extent)
        x = self._resized(x, filled)
        for single in joint if dst.is_split else reversed(joint):  # parts are nested outermost first
            if single.size > 1:
                function, options = _conversion(src.kind, dst.kind)
                x = function(x.contiguous(), single.group, src=_spmd(src), dst=_spmd(dst), **options)
        return self._resized(x, wanted)

    def _resized(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """`x` filled with zeros, or cut, to `shape`, with its type."""
        if tuple(x.shape) == tuple(shape):
            return x
        ends = [end for old, new in zip(reversed(x.shape), reversed(shape)) for end in (0, new - old)]
        return _Ops(torch.ops.aten, "aten", self).constant_pad_nd.default(x, ends)


def _own_shape(shape: Sequence[int], axes: Sequence[Axis], layout: Layout) -> list[int]:
    """The shape of this rank's part of a tensor of global `shape`."""
    own = list(shape)
    for axis, placement in zip(axes, layout):
        if placement.is_split:
            own[placement.dim] = axis.part_in(placement, own[placement.dim])
    return own


def _converted_shapes(
    shape: Sequence[int], axes: Sequence[Axis], src: Placement, dst: Placement, extent: int | None
) -> tuple[list[int], list[int]]:
    """The shape of what a part of `shape` is converted to, and that of the part filled up so that all are equal."""
    count = math.prod(axis.size for axis in axes)
    whole, filled = list(shape), list(shape)
    if src.is_split:
        whole[src.dim] = shape[src.dim] * count if extent is None else extent
        filled[src.dim] = -(-whole[src.dim] // count)
    if dst.is_split and (src.dim != dst.dim or src.kind == dst.kind):
        filled[dst.dim] = -(-filled[dst.dim] // count) * count
    return _own_shape(whole, axes, (dst,) * len(axes)), filled


def _group(axis: Axis) -> dist.ProcessGroup:
    assert axis.group is not None, f"axis {axis.name} has no peers"
    return axis.group


def _spmd(placement: Placement) -> Any:
    return spmd.S(placement.dim) if placement.is_split else _KINDS[placement.kind]


def _conversion(src: str, dst: str) -> tuple[Callable[..., torch.Tensor], dict[str, bool]]:
    if src == "P":
        return (spmd.reduce_scatter if dst == "S" else spmd.all_reduce), {}
    if src == "S" and dst in "RI":
        return spmd.all_gather, {}
    if src == "S" and dst == "S":
        return spmd.all_to_all, {}
    return spmd.convert, {"expert_mode": True}


class _Ops:
    """`aten` for generated code: each op is replaced by the Python function that the checker knows, if there is one."""

    def __init__(self, ops: Any, path: str, referee: _Referee) -> None:
        self._ops, self._path, self._referee = ops, path, referee

    def __getattr__(self, name: str) -> Any:
        return _Ops(getattr(self._ops, name), f"{self._path}.{name}", self._referee)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self._path.split(".")[1]
        product = facts_of(self._path).product
        if product is not None and 0 <= product.bias < len(args) and args[product.bias] is not None:
            return self._with_bias(name, product.bias, args, kwargs)
        return self._call(name, args, kwargs)

    def _call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if name == "linear":
            return torch.matmul(args[0], args[1].mT)
        if name.startswith(("turned_grouped", "grouped")):
            return self._ops(*args, **kwargs)
        if name == "turned_linear":
            return torch.matmul(args[0], args[1])
        if name in _LINEAR:
            return self._linear(args, kwargs)
        if name in _EXPANDING:
            result = _python_function(self._path)(*args, **kwargs)
            self._referee.expanded[id(result)] = result
            return result
        return _python_function(self._path)(*args, **kwargs)

    def _linear(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        groups = [_group(axis) for axis in self._referee.mesh_axes if axis.size > 1]
        types = {
            g: min((spmd.get_axis_local_type(x, g) for x in tensors), key=[spmd.P, spmd.V, spmd.R, spmd.I].index)
            for g in groups
        }
        result = _Untyped.call(self._ops, args, kwargs)
        for x in pytree.tree_leaves(result):
            spmd.assert_type(x, types)
        return result

    def _with_bias(self, name: str, slot: int, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """The product, and then the bias.

        Contracted over a split dim, the product turns from V to P where its bias is pending.
        """
        bias = args[slot]
        if name in _WITHOUT_BIAS:
            product = _WITHOUT_BIAS[name](*args[1:3])
        else:
            product = self._call(name, (*args[:slot], None, *args[slot + 1 :]), kwargs)
        for group in (_group(axis) for axis in self._referee.mesh_axes if axis.size > 1):
            types = spmd.get_axis_local_type(bias, group), spmd.get_axis_local_type(product, group)
            if types == (spmd.P, spmd.V):
                product = spmd.reinterpret(product, group, src=spmd.V, dst=spmd.P)
        return torch.add(product, bias.reshape(-1, *[1] * (product.ndim - 2)) if name.startswith("conv") else bias)


class _Untyped:
    """Functions run without type check: local ops issue their own collectives; tests check their rules otherwise."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.call(getattr(self._functions, name), args, kwargs)

    @staticmethod
    def call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with spmd.no_typecheck():
            return function(*args, **kwargs)


def _python_function(path: str) -> Callable[..., Any]:
    _, name, overload = path.split(".")
    for home in (torch, torch.Tensor, nn.functional):
        if hasattr(home, name):
            return getattr(home, name)
    return getattr(getattr(torch.ops.aten, name), overload)
