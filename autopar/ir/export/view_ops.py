"""View ops: taking a view again, and writing through it into its base tensor."""

from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.call_args import fill
from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.graph import Slot, Value
from autopar.ir.op_facts import PERMUTATIONS, RESHAPES, order_of


@dataclass(frozen=True, slots=True)
class ViewStep:
    """One view op; `Slot(0)` in `args` is its base tensor."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def take(self, builder: OpBuilder, base: Value, at: Origin) -> Value:
        """The view of `base`."""
        named = {name: fill(value, (base,)) for name, value in self.kwargs}
        return builder.emit(self.target, fill(self.args, (base,)), named, at=at)[0]

    def put(self, builder: OpBuilder, base: Value, part: Value, at: Origin) -> Value | None:
        """`base` with the part that this view selects replaced by `part`.

        None if the view cannot be written through.
        """
        if self.target in RESHAPES:
            return builder.emit("aten.reshape.default", (part, base.shape), at=at)[0]
        if self.target == "aten.detach.default":
            return part
        rest = self.args[1:]
        if base.dtype.is_complex and self.target in _BY_DIM:
            return self._put_complex(builder, base, part, at)
        if self.target in PERMUTATIONS:
            order = order_of(self.target, rest, len(base.shape), **dict(self.kwargs))
            back = tuple(order.index(dim) for dim in range(len(order)))
            return builder.emit("aten.permute.default", (part, back), at=at)[0]
        if self.target == "aten.narrow.default":
            dim, start, length = rest
            start += base.shape[dim] * (start < 0)
            return builder.emit("aten.slice_scatter.default", (base, part, dim, start, start + length), at=at)[0]
        if self.target == "aten.diagonal.default":
            return builder.emit("aten.diagonal_scatter.default", (base, part, *rest), at=at)[0]
        if self.target == "aten.slice.Tensor":
            return builder.emit("aten.slice_scatter.default", (base, part, *rest), at=at)[0]
        if self.target == "aten.select.int":
            return builder.emit("aten.select_scatter.default", (base, part, *rest), at=at)[0]
        return None

    def _put_complex(self, builder: OpBuilder, base: Value, part: Value, at: Origin) -> Value | None:
        """As `put`, in real numbers: torch's scatters have no derivative for complex ones."""
        dim = self.args[1] if len(self.args) > 1 else 0
        whole, own = (builder.emit("aten.view_as_real.default", (x,), at=at)[0] for x in (base, part))
        step = replace(self, args=(self.args[0], dim % len(base.shape), *self.args[2:]))
        written = step.put(builder, whole, own, at)
        return None if written is None else builder.emit("aten.view_as_complex.default", (written,), at=at)[0]


_BY_DIM = frozenset(("aten.narrow.default", "aten.slice.Tensor", "aten.select.int"))


def step_of(target: str, args: tuple[Any, ...], base: Value, output: Value) -> ViewStep:
    """The step of a view op called with `base` as its first argument."""
    if target in RESHAPES:
        return ViewStep("aten.reshape.default", (Slot(0), output.shape))
    if target in ("aten.expand.default", "aten.expand_as.default"):
        return ViewStep("aten.expand.default", (Slot(0), output.shape))
    return ViewStep(target, (Slot(0), *args[1:]))


def part_steps(target: str, args: tuple[Any, ...], parts: tuple[Value, ...]) -> tuple[ViewStep, ...]:
    """A step for each output of a chunk, split or unbind of `Slot(0)`, whose value is `args[0]`."""
    dim = _dim_of(target, args, len(args[0].shape))
    if target.startswith("aten.unbind."):
        return tuple(ViewStep("aten.select.int", (Slot(0), dim, i)) for i in range(len(parts)))
    steps, start = [], 0
    for part in parts:
        size = part.shape[dim]
        steps.append(ViewStep("aten.slice.Tensor", (Slot(0), dim, start, start + size)))
        start += size
    return tuple(steps)


def _dim_of(target: str, args: tuple[Any, ...], ndim: int) -> int:
    if target.startswith(("aten.hsplit.", "aten.vsplit.", "aten.dsplit.")):
        return {"h": min(1, ndim - 1), "v": 0, "d": 2}[target.removeprefix("aten.")[0]]
    position = 1 if target.startswith("aten.unbind.") else 2
    return args[position] if len(args) > position else 0
