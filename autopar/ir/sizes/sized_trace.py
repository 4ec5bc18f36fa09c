"""`SizedTrace`: a model that is exported once, and its graph for each size of its arguments."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autopar.ir.autocast import Autocast, autocast_on, without_autocast
from autopar.ir.export.placeholders import flat_arguments
from autopar.ir.export.run_export import DynamicDims, export
from autopar.ir.graph import Graph
from autopar.ir.outline.export_once import Outline
from autopar.ir.sizes.size_range import SizeRange, is_quadratic, value_of
from autopar.ir.trace import outline_to_graph


@dataclass(frozen=True)
class SizedTrace:
    """An exported model whose dims of some arguments are symbols. `finish`: the passes over its graphs; `given`: what
    it is called with, of the arguments of a call.
    """

    model: nn.Module
    outline: Outline
    range: SizeRange
    autocast: Autocast | None
    finish: Callable[[Graph], Graph]
    given: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] = lambda args, kwargs: (
        args,
        kwargs,
    )

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic: DynamicDims,
        finish: Callable[[Graph], Graph],
    ) -> "SizedTrace":
        """The trace of `model` for inputs such as `args` and `kwargs`, of any size in the `dynamic` dims that the model
        allows. Errors as `export`.
        """
        program = export(model, args, dict(sorted(kwargs.items())), dynamic)
        return cls(model, Outline(program), SizeRange.of(program), autocast_on(), finish)

    @cached_property
    def is_quadratic(self) -> bool:
        """Whether all sizes of tensors are polynomials of the symbols, of degree two at most, and no other number
        follows from them.
        """
        modules = [self.outline.program.graph_module, *self.outline.program.graph_module.modules()]
        nodes = (node for module in modules if isinstance(module, GraphModule) for node in module.graph.nodes)
        return all(is_quadratic(size) for node in nodes for size in _sizes(node.meta.get("val")))

    def graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph | None:
        """The graph for inputs of the sizes of `args` and `kwargs`; None if the model decides otherwise for them."""
        args, kwargs = self.given(args, kwargs)
        leaves = flat_arguments(self.outline.program.call_spec.in_spec, args, dict(sorted(kwargs.items())))
        symbols = self.range.values([tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)])
        if symbols is None:
            return None
        number_of = partial(value_of, symbols=symbols)
        with without_autocast():
            return self.finish(outline_to_graph(self.outline, self.model, args, kwargs, self.autocast, number_of))


def _sizes(value: Any) -> Iterator[Any]:
    """The sizes of what a node gives: of each tensor, or itself if it is one."""
    for item in value if isinstance(value, (tuple, list)) else (value,):
        yield from item.shape if isinstance(item, torch.Tensor) else (item,)
