"""Stacks of weights: products that take each part of an activation by a weight of its own, as experts of fixed capacity
are written (GShard, arXiv:2006.16668).

Where ranks split the batch, tokens go to the ranks of their experts by an all-to-all before such a product, and back
after the last one.
"""

import math
from collections.abc import Mapping

from autopar.ir.graph import Graph, Op
from autopar.sbp.analysis.expert_routing import num_exchanged
from autopar.sbp.analysis.megatron_pairs import base_name, values_from_parameters
from autopar.sbp.op_signatures import signatures_of_call
from autopar.sbp.placement import S
from autopar.sbp.signature import Signature

# Products of stacks of matrices; a convolution of each channel by itself is none.
_PRODUCTS = ("baddbmm", "bmm", "einsum", "matmul")


def stacked_products(graph: Graph) -> Mapping[str, tuple[int, Signature]]:
    """Product with a stack of weights -> the number of weights, and the signature that splits them."""
    from_parameters = values_from_parameters(graph)
    found = ((op, _by_stack(op, from_parameters)) for op in graph.ops)
    return {op.name: one for op, one in found if one is not None}


def num_experts(graph: Graph) -> int:
    """The number of experts between which tokens can be exchanged, their greatest common divisor; 0: there are none."""
    return num_exchanged(graph) or math.gcd(*(size for size, _ in graph.once(stacked_products).values()))


def _by_stack(op: Op, from_parameters: frozenset[str]) -> tuple[int, Signature] | None:
    weights = [slot for slot, x in enumerate(op.inputs) if x.name in from_parameters and len(x.shape) >= 3]
    if base_name(op) not in _PRODUCTS or len(weights) != 1:
        return None
    (weight,) = weights
    size = op.inputs[weight].shape[0]
    activations = [slot for slot, x in enumerate(op.inputs) if x.name not in from_parameters]
    split = (
        (size, one)
        for one in signatures_of_call(op)
        if one.inputs[weight] == S(0)
        and one.outputs[0].is_split
        and any(one.inputs[slot].is_split for slot in activations)
    )
    return next(split, None)
