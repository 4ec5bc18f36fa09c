"""An independent check of generated code: `spmd_types`' checker infers every variable's placement and compares it with the layout claimed.

The checker knows S only as V (varying). It cannot know that a product contracted over a split dim is a pending sum, so a
claim "P" turns an inferred V into P; every other disagreement is an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import spmd_types as spmd
import spmd_types.checker
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.codegen.emit import emit
from autopar.codegen.load import axes_of, compile_source, namespace
from autopar.codegen.program import Program
from autopar.sbp.collectives import Axis
from autopar.sbp.placement import Layout, Placement, local_shape

_KINDS = {"S": spmd.V, "P": spmd.P, "I": spmd.I, "R": spmd.R}
# Linear ops the checker has no entry for: our own rule, checked against the real op, stands for them.
_TRUSTED = {"aten.to.dtype", "aten.dropout.default", "aten.embedding.default"}


def check(program: Program, mesh: DeviceMesh) -> None:
    """Run the program once on random data under the checker's strict mode; SpmdTypeError on the first disagreement.

    Needs a process group, which may be the fake one: no numbers are compared.
    """
    referee = _Referee(program, mesh)
    names = namespace() | {
        "aten": _Ops(torch.ops.aten, "aten", referee), "declare": referee.declare, "convert": referee.convert, "move": referee.convert,
        "local": _Untyped(namespace()["local"]), "seeded": lambda *_: torch.enable_grad(),
    }  # fmt: skip
    forward = compile_source(emit(program, is_typed=True), names)
    arguments = [referee.tensor(item.value, layout) for item, layout in program.inputs if item.kind == "argument"]
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck(strict_mode="strict"):
        for argument, (_, layout) in zip(arguments, (pair for pair in program.inputs if pair[0].kind == "argument")):
            referee.declare(argument, *layout)
        forward(referee, *arguments)


class _Referee:
    """`self` of the generated function."""

    def __init__(self, program: Program, mesh: DeviceMesh) -> None:
        self.axes: tuple[Axis, ...] = axes_of(mesh)
        self.program = program
        self.inputs = {item.fqn: (item.value, layout) for item, layout in program.inputs}
        self.constants = {item.value.name: self.tensor(item.value, layout) for item, layout in program.inputs if item.kind == "constant"}

    def draw_seed(self) -> int:
        return 0

    def tensor(self, value: Any, layout: Layout) -> torch.Tensor:
        shape = local_shape(value.shape, layout, self.program.mesh.shape)
        return torch.zeros(shape, dtype=value.dtype, requires_grad=value.needs_grad)

    def local(self, fqn: str) -> torch.Tensor:
        with spmd.no_typecheck():
            tensor = self.tensor(*self.inputs[fqn])
        return nn.Parameter(tensor) if tensor.requires_grad else tensor

    def write_back(self, fqn: str, value: torch.Tensor) -> None:
        """Numbers are not compared."""

    def declare(self, x: torch.Tensor, *layout: Placement) -> torch.Tensor:
        """`x`, inferred to lie as `layout` says; a value not typed yet is given that type."""
        types = {axis.group: _KINDS[p.kind] for axis, p in zip(self.axes, layout) if axis.size > 1}
        known = spmd.get_local_type(x) if spmd.has_local_type(x) else {}
        if not known:
            return spmd.assert_type(x, types)
        for group, wanted in types.items():
            found = spmd.get_axis_local_type(x, group)
            if wanted is spmd.P and found is spmd.V:
                x = spmd.reinterpret(x, group, src=spmd.V, dst=spmd.P)
            elif wanted is not found and not ({wanted, found} == {spmd.R, spmd.I} and not x.requires_grad):
                raise spmd.SpmdTypeError(f"claimed {wanted}, inferred {found}")
        return x

    def convert(self, x: torch.Tensor, axis: Axis, src: Placement, dst: Placement) -> torch.Tensor:
        """The checker's own conversion of the same name."""
        if axis.size == 1:
            return x
        function, options = _conversion(src.kind, dst.kind)
        return function(x.contiguous(), axis.group, src=_spmd(src), dst=_spmd(dst), **options)


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
    """`aten` for generated code: the Python function the checker knows in place of the op, where there is one."""

    def __init__(self, found: Any, path: str, referee: _Referee) -> None:
        self._found, self._path, self._referee = found, path, referee

    def __getattr__(self, name: str) -> Any:
        return _Ops(getattr(self._found, name), f"{self._path}.{name}", self._referee)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._path in _TRUSTED:
            return _Untyped.call(self._found, args, kwargs)
        return _python_function(self._path)(*args, **kwargs)


class _Untyped:
    """Local implementations issue collectives of their own; their rules are checked against the real op instead."""

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
