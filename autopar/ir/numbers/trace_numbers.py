"""`graph_with_numbers`: the graph of a model in which the numbers of its call stay arguments."""

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.ir.autocast import autocast_on, without_autocast
from autopar.ir.export.run_export import export
from autopar.ir.graph import Graph
from autopar.ir.numbers.free_number import FreeFloat, FreeInt, FreeNumber, free_number
from autopar.ir.numbers.unread_number import NumberReads, types_unread, unread
from autopar.ir.outline.export_once import Outline
from autopar.ir.trace import outline_to_graph
from autopar.torch_compat import pytree

# Ops whose second argument scales or shifts a tensor: no shape, dtype, layout or choice of kernel follows from it.
_TAKING = frozenset(
    f"aten.{name}"
    for name in ("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar", "add.Tensor", "add.Scalar", "sub.Tensor")
    + ("sub.Scalar", "rsub.Scalar")
)


def graph_with_numbers(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], free: Collection[int]) -> Graph:
    """The graph of `model`, before any pass, with the ints and floats at the positions `free` of the flat call as
    `FreeNumber`s.

    While the model is traced each is a symbol of which nothing is known, so that the graph is the same for all values.
    TraceError if the model reads one: if it decides by it, computes with it in Python, or hands it to anything but ops
    that scale or shift a tensor.
    """
    kwargs = dict(sorted(kwargs.items()))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    numbers = {i: free_number(leaf, i) for i, leaf in enumerate(leaves) if i in free}
    stand_ins = [_stand_in(leaf) if i in numbers else leaf for i, leaf in enumerate(leaves)]
    given, named = pytree.tree_unflatten(stand_ins, spec)
    with _numbers_unread(model, numbers) as symbols:
        program = export(model, given, named, decides=False)
    if symbols.reads.any:
        raise TraceError("a number of the call is read by the model")
    autocast = autocast_on()
    with without_autocast():
        graph = outline_to_graph(Outline(program), model, args, kwargs, autocast, symbols.number_of)
    _check_uses(graph)
    return graph


@dataclass
class _Symbols:
    """The numbers that symbols of a trace stand for."""

    numbers: dict[Any, FreeNumber] = field(default_factory=dict)
    reads: NumberReads = field(default_factory=NumberReads)

    def number_of(self, symbolic: Any) -> FreeNumber:
        """The number; TraceError if it is computed from numbers."""
        number = self.numbers.get(symbolic.node.expr)
        if number is None:
            raise TraceError("the model computes with a number of the call")
        return number


@contextmanager
def _numbers_unread(model: nn.Module, numbers: Mapping[int, FreeNumber]) -> Iterator[_Symbols]:
    """A context in which the forward is given, for the tensors at these positions of the call, what they contain."""
    forward, own, symbols = model.forward, model.__dict__.get("forward"), _Symbols()

    def called(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
        for position, number in numbers.items():
            symbol = leaves[position].item()
            symbols.numbers[symbol.node.expr] = number
            leaves[position] = unread(symbol, symbols.reads)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with types_unread(symbols.reads):
            return forward(*args, **kwargs)

    vars(called)["__signature__"] = inspect.signature(forward)
    model.__dict__["forward"] = called
    try:
        yield symbols
    finally:
        del model.__dict__["forward"]
        if own is not None:
            model.__dict__["forward"] = own


def _stand_in(number: float) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64 if isinstance(number, int) else torch.float64, device="meta")


def _check_uses(graph: Graph) -> None:
    """TraceError unless all free numbers are second arguments of ops that take them."""
    for op in (*graph.ops, *graph.constant_ops):
        others = (*op.args[:1], *op.args[2:], *op.kwargs) if op.target in _TAKING else (*op.args, *op.kwargs)
        shapes = tuple(value.shape for value in op.outputs)
        if any(isinstance(leaf, (FreeFloat, FreeInt)) for leaf in pytree.tree_leaves((others, shapes))):
            raise TraceError(f"{op.target} takes a number of the call")
    if any(isinstance(output, (FreeFloat, FreeInt)) for output in graph.outputs):
        raise TraceError("a number of the call is an output")
