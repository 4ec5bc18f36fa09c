"""`SizeRange`: the sizes of arguments for which an exported program with symbolic sizes holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.torch_compat import FakeTensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SizeRange:
    """The sizes under which every decision that the model made by them while it was traced is made again.

    `shapes`: of each tensor argument, numbers or expressions of symbols; `symbols`: for each of these sizes its own
    symbol, or a number. `conditions`: expressions that are true of the traced sizes, one for each decision. `ranges`:
    of each symbol.
    """

    shapes: tuple[tuple[Any, ...], ...]
    symbols: tuple[Any, ...]
    conditions: tuple[Any, ...]
    ranges: Mapping[Any, Any]

    @classmethod
    def of(cls, program: ExportedProgram) -> "SizeRange":
        placeholders = (node for node in program.graph.nodes if node.op == "placeholder")
        specs = zip(placeholders, program.graph_signature.input_specs)
        values = (node.meta["val"] for node, spec in specs if spec.kind is InputKind.USER_INPUT)
        tensors = [value for value in values if isinstance(value, FakeTensor)]
        conditions, ranges = conditions_on_sizes(tensors[0]) if tensors else ([], {})
        shapes = tuple(tuple(map(_expression, x.shape)) for x in tensors)
        symbols = tuple(n.node._expr if isinstance(n, torch.SymInt) else n for x in tensors for n in x.shape)
        return cls(shapes, symbols, tuple(conditions), ranges)

    @property
    def is_point(self) -> bool:
        """Whether each size has one possible value."""
        return all(isinstance(size, int) for shape in self.shapes for size in shape)

    def values(self, shapes: Sequence[Shape]) -> dict[Any, Any] | None:
        """Symbol -> its value for tensor arguments of these `shapes`; None if the program does not hold for them."""
        if [len(shape) for shape in shapes] != [len(shape) for shape in self.shapes]:
            return None
        pairs = [pair for known, shape in zip(self.shapes, shapes) for pair in zip(known, shape)]
        sizes = [size for _, size in pairs]
        values = {
            symbol: symbol.subs(symbol, size)
            for symbol, size in zip(self.symbols, sizes)
            if getattr(symbol, "is_Symbol", False)
        }
        if any(value_of(known, values) != size for known, size in pairs):
            return None
        if any(value not in self.ranges[symbol] for symbol, value in values.items()):
            return None
        return values if all(value_of(condition, values) is True for condition in self.conditions) else None


def value_of(expression: Any, symbols: Mapping[Any, Any]) -> Any:
    """The number or truth value of an expression, or of a symbolic size; None if it depends on more than `symbols`."""
    value = _expression(expression)
    if isinstance(value, (int, float)):
        return value
    value = value.xreplace(symbols)
    if value.free_symbols:
        return None
    if getattr(value, "is_Boolean", False):
        return bool(value)
    is_float = isinstance(expression, torch.SymFloat) or not value.is_integer
    return float(value) if is_float else int(value)


def conditions_on_sizes(tensor: FakeTensor) -> tuple[list[Any], dict[Any, Any]]:
    """(conditions, symbol -> range) on sizes of arguments under which the export that made `tensor` holds.

    The exported program itself only has the ranges.
    """
    env: Any = tensor.fake_mode.shape_env
    return [guard.expr for guard in env.guards], dict(env.var_to_range)


def is_quadratic(size: Any) -> bool:
    """Whether a size, if it is symbolic, is a polynomial of degree two at most with integers as coefficients."""
    if isinstance(size, (torch.SymFloat, torch.SymBool)):
        return False
    if not isinstance(size, torch.SymInt):
        return True
    polynomial = size.node.expr.as_poly()
    is_number = size.node.expr.is_Integer
    return is_number or (polynomial is not None and polynomial.total_degree() <= 2 and polynomial.domain.is_ZZ)


def _expression(size: Any) -> Any:
    """A size as a number if it is one, else as an expression."""
    expression = size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size
    if getattr(expression, "is_Integer", False):
        return int(expression)
    return expression
