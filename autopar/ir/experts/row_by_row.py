"""`row_dim`: the dim that has the rows in the result of an op that treats each row by itself.

Each family with its proof: then the rows of the result are those of the same op on each row alone.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.ir.graph import Op, arguments_of, resolve
from autopar.ir.op_facts import PERMUTATIONS, RESHAPES, order_of

# Elementwise without torch's tag for it.
_ELEMENTWISE = frozenset(
    ("aten.dropout.default", "aten.to.dtype", "aten.clone.default", "aten.contiguous.default")
    + ("aten.detach.default", "aten.alias.default", "aten.expand_as.default", "aten.type_as.default")
    + ("aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default")
    + ("aten.broadcast_tensors.default",)
)
# A term for each element, if nothing is summed.
ELEMENTWISE_LOSSES = frozenset(
    f"aten.{name}.default"
    for name in (
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"),
        *("binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss"),
    )
)
# Of a tensor or a list, along `dim` or dims: rows stay apart if no row dim is among them, and have their place unless
# dims in front of them vanish.
_ALONG = frozenset(
    ("aten.softmax.int", "aten.log_softmax.int", "aten.cumsum.default", "aten.glu.default", "aten.cat.default")
    + ("aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default", "aten.slice.Tensor")
    + ("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default", "aten.select.int")
    + ("aten.narrow.default", "aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.prod.dim_int")
    + ("aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default", "aten.logsumexp.default")
    + ("aten.var.correction", "aten.std.correction", "aten.var.dim", "aten.std.dim", "aten.cumprod.default")
    + ("aten.topk.default", "aten.sort.default", "aten.gather.default", "aten.cosine_similarity.default")
)
# Of those, the ones that read the same rows of several tensors.
_OF_SEVERAL = frozenset(("aten.cat.default", "aten.gather.default", "aten.cosine_similarity.default"))
# A part of each row is replaced by one that each row has.
PARTS_WRITTEN = frozenset(("aten.select_scatter.default", "aten.slice_scatter.default"))
# Dims are added behind those of the indices, each of which is looked up by itself.
_LOOKUPS = {"aten.embedding.default": 1, "aten.one_hot.default": 0}


def row_dim(op: Op, dims: Sequence[int | None]) -> int | None:
    """`dims`: of each input the dim that has its rows, None if it has none. None if rows may depend on one another."""
    first = next(dim for dim in dims if dim is not None)
    shapes = [value.shape for value in op.inputs]
    if _is_elementwise(op):
        return _elementwise(op, dims, shapes)
    if op.target in _LOOKUPS:
        return first if [i for i, dim in enumerate(dims) if dim is not None] == [_LOOKUPS[op.target]] else None
    if dims[0] is None:
        return None
    if op.target in PARTS_WRITTEN:
        return first if dims[1] == row_of_part(op, first) else None
    if op.target in _OF_SEVERAL or len([dim for dim in dims if dim is not None]) == 1:
        if op.target in _ALONG:
            return _along(op, dims, shapes)
        if op.target in RESHAPES:  # rows that follow one another do so whatever the dims of a row are
            shape, ones = op.outputs[0].shape, math.prod(shapes[0][:first])
            at = next((i for i, size in enumerate(shape) if size != 1), -1)
            return at if ones == 1 and at >= 0 and shape[at] == shapes[0][first] else None
        if op.target in ("aten.index.Tensor", "aten.index_select.default"):
            return _looked_up(op, first)
        if op.target == "aten.expand.default":  # equal copies of each row, if the rows are not copied themselves
            at = first + len(op.outputs[0].shape) - len(shapes[0])
            return at if op.outputs[0].shape[at] == shapes[0][first] else None
        if op.target in PERMUTATIONS:
            return order_of(op.target, op.args[1:], len(shapes[0]), **dict(op.kwargs)).index(first)
        return _of_last_dims(op, first, shapes)
    return None


def row_of_part(op: Op, row: int) -> int | None:
    """The dim of the part that one of `PARTS_WRITTEN` writes in which it has the rows that lie in dim `row`."""
    dim = arguments_of(op)["dim"] % len(op.inputs[0].shape)
    return None if dim == row else row - (dim < row and op.target == "aten.select_scatter.default")


def _of_last_dims(op: Op, first: int, shapes: Sequence[tuple[int, ...]]) -> int | None:
    """Ops that compute or add numbers along the last dims."""
    last = len(shapes[0]) - 1
    if op.target == "aten.pad.default":  # pairs of a dim each, from the last one
        return first if not any(op.args[1][2 * (last - first) : 2 * (last - first) + 2]) else None
    if op.target in ("aten.linear.default", "aten.matmul.default", "aten.mm.default"):  # a sum over the last dim
        is_matrix = op.target == "aten.linear.default" or len(shapes[1]) == 2
        return first if first < last and is_matrix else None
    if op.target in ("aten.layer_norm.default", "aten.rms_norm.default"):
        return first if first <= last - len(op.args[1]) else None
    return None


def _is_elementwise(op: Op) -> bool:
    if op.target in ELEMENTWISE_LOSSES:
        return arguments_of(op)["reduction"] == 0
    return op.target in _ELEMENTWISE or torch.Tag.pointwise in resolve(op.target).tags


def _elementwise(op: Op, dims: Sequence[int | None], shapes: Sequence[tuple[int, ...]]) -> int | None:
    """Broadcast, all rows lie in the same dim from the end, in which other inputs are the same for each row."""
    ends = {dim - len(shape) for dim, shape in zip(dims, shapes) if dim is not None}
    if len(ends) != 1:
        return None
    (end,) = ends
    is_same = all(len(shape) < -end or shape[end] == 1 for dim, shape in zip(dims, shapes) if dim is None)
    return len(op.outputs[0].shape) + end if is_same else None


def _along(op: Op, dims: Sequence[int | None], shapes: Sequence[tuple[int, ...]]) -> int | None:
    arguments, ndim = arguments_of(op), len(shapes[0])
    given = arguments["dim"]
    if given is None or len(set(dims)) != 1 or None in dims:
        return None
    along = {dim % ndim for dim in ((given,) if isinstance(given, int) else given)}
    (row,) = {dim for dim in dims if dim is not None}
    if op.target == "aten.slice.Tensor" and _is_of_all(arguments):
        return row
    vanish = along if len(op.outputs[0].shape) < ndim else set()
    return None if row in along or not along else row - sum(dim < row for dim in vanish)


def _looked_up(op: Op, row: int) -> int | None:
    """The same elements of each row, by an index of one other dim that is the same for all rows."""
    if op.target == "aten.index_select.default":
        return row if op.args[1] % len(op.inputs[0].shape) != row else None
    at = [dim for dim, index in enumerate(op.args[1]) if index is not None]
    if len(at) != 1 or at[0] == row or op.inputs[1].dtype in (torch.bool, torch.uint8):
        return None
    return row if row < at[0] else row + len(op.inputs[1].shape) - 1


def _is_of_all(arguments: Mapping[str, Any]) -> bool:
    """Whether a slice has all of its dim, however many there are."""
    return (arguments["start"] or 0, arguments["step"]) == (0, 1) and arguments["end"] in (None, sys.maxsize)
