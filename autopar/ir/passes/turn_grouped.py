"""The pass that rewrites grouped products with a transposed parameter as products that read it as it is stored.

A permutation saves nothing for backward, so that a parameter which only it reads cannot be gathered again for backward
(`regatherable` in costmodel/activations/autograd_footprint.py), though transformers stores all experts' weights so.
"""

from dataclasses import replace

import torch

from autopar.ir.graph import Graph, Op, Slot, Value, resolve

TURNED = {
    "aten._grouped_mm.default": "autopar.turned_grouped_mm.default",
    "transformers.grouped_mm_fallback.default": "autopar.turned_grouped_mm_fallback.default",
}

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("turned_grouped_mm(Tensor self, Tensor mat2, Tensor offs) -> Tensor")
_LIBRARY.define("turned_grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor")


def _turned_grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """`_grouped_mm` with the weight as (groups, outputs, inputs)."""
    return resolve("aten._grouped_mm.default")(x, weight.mT, offs)


def _turned_grouped_mm_fallback(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The same of transformers' product for devices and dtypes that have no kernel."""
    return resolve("transformers.grouped_mm_fallback.default")(x, weight.mT, offs)


_LIBRARY.impl("turned_grouped_mm", _turned_grouped_mm, "CompositeImplicitAutograd")
_LIBRARY.impl("turned_grouped_mm_fallback", _turned_grouped_mm_fallback, "CompositeImplicitAutograd")


def turn_grouped_weights(graph: Graph) -> Graph:
    """`graph` with each such product rewritten; a later pass removes the permutations, which are dead code."""
    parameters = {item.value.name for item in graph.of_kind("parameter")}
    turned = {
        op.outputs[0].name: op.inputs[0]
        for op in graph.ops
        if op.target == "aten.permute.default" and op.args[1] == (0, 2, 1) and op.inputs[0].name in parameters
    }
    return replace(graph, ops=tuple(_rewritten(op, turned) for op in graph.ops)) if turned else graph


def _rewritten(op: Op, turned: dict[str, Value]) -> Op:
    given = *op.args, *(value for name, value in op.kwargs if name == "offs")
    if op.target not in TURNED or given != (Slot(0), Slot(1), Slot(2)) or len(op.args) + len(op.kwargs) > 3:
        return op
    if op.inputs[1].name not in turned:
        return op
    inputs = (op.inputs[0], turned[op.inputs[1].name], op.inputs[2])
    return replace(op, target=TURNED[op.target], args=(Slot(0), Slot(1), Slot(2)), kwargs=(), inputs=inputs)
