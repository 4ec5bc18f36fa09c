"""The numbers of rows that masks select, as sizes of a graph: those of all rows."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.errors import TraceError
from autopar.ir.experts.keep_rows import ROWS
from autopar.ir.export.source_lines import quote_stack
from autopar.ir.masks.picked_rows import PICKED
from autopar.torch_compat import OpOverload

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Ops to which a number of rows is a size of what they give, or that only check it.
_TAKES_SIZES = ("view", "reshape", "_unsafe_view", "expand", "unflatten", "_assert_scalar", "sym_constrain_range")


def row_numbers(module: Any, otherwise: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """The values of symbolic sizes in the graph of an exported `module`: a number of selected rows is that of all
    elements of the mask; other symbols have the values that `otherwise` gives.

    TraceError for an op that computes with a number of rows.
    """
    rows = (
        [node for node in module.graph.nodes if str(node.target) in (ROWS, PICKED)]
        if isinstance(module, GraphModule)
        else []
    )
    symbols: dict[Any, int] = {}

    def number_of(size: Any) -> Any:
        if not isinstance(size, _SIZES):
            return size
        value = size.node.expr.subs(symbols)
        if value.free_symbols:
            return None if otherwise is None else otherwise(size)
        return bool(value) if isinstance(size, torch.SymBool) else int(value)

    for node in rows:  # of which some may be of the rows that one before selects
        size, mask = node.meta["val"][0].shape[0], node.args[0].meta["val"]
        if isinstance(size, torch.SymInt):
            numbers = [number_of(each) for each in mask.shape]
            symbols[size.node.expr] = math.prod(
                each if number is None else number for each, number in zip(mask.shape, numbers)
            )
    if not symbols:
        return otherwise
    for node in module.graph.nodes:
        _check(node, symbols)
    return number_of


def _check(node: Node, symbols: dict[Any, int]) -> None:
    name = str(node.target).split(".")[1] if isinstance(node.target, OpOverload) else ""
    if not name or name.startswith(("sym_size", "sym_numel")) or name.startswith(_TAKES_SIZES):
        return
    for given in node.all_input_nodes:
        size = given.meta.get("val")
        if isinstance(size, _SIZES) and size.node.expr.free_symbols & symbols.keys():
            raise TraceError(
                f"{quote_stack(node.meta.get('stack_trace') or '') or node.name}: {node.target} computes with the"
                " number of rows that a mask selects, which depends on the values of tensors; a plan needs one fixed"
                " program: sum the mask instead"
            )
