"""Rules of reductions, scans and sorts along some dims.

Proof of the splits: the op treats each slice along a dim that it does not act on by itself. Proof of pending sums: a
sum is linear, and the sum over a split dim is the sum of the parts' sums; the gradient of each element needs only the
whole gradient of the sum. A mean is that sum over the global count.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from autopar.ir.graph import Op, arguments_of
from autopar.sbp.placement import P, S
from autopar.sbp.rules._by_name import signature, tensor_of
from autopar.sbp.rules._dims import carry, dim_of, keeps_sums, other_dims
from autopar.sbp.rules._einsum import broadcast_term, place
from autopar.sbp.signature import Signature

Rule = Callable[[Op], Iterable[Signature]]


def reduced_dims(op: Op) -> set[int]:
    """The dims that the op reduces; no dims in its arguments means all of them."""
    ndim, dims = len(op.inputs[0].shape), arguments_of(op).get("dim")
    given = (dims,) if isinstance(dims, int) else dims
    return {dim_of(dim, ndim) for dim in given} if given else set(range(ndim))


def kept(op: Op) -> Iterator[Signature]:
    """Splits along the dims that are not reduced."""
    reduced, keepdim = reduced_dims(op), arguments_of(op).get("keepdim", False)
    left = [dim for dim in range(len(op.inputs[0].shape)) if dim not in reduced]
    yield from carry(op, [(dim, dim if keepdim else out) for out, dim in enumerate(left)], is_linear=False)


def total(op: Op) -> Iterator[Signature]:
    """sum: a split reduced dim leaves a pending sum."""
    yield from kept(op)
    for dim in sorted(reduced_dims(op)) if op.inputs[0].shape else ():
        yield Signature((S(dim),), (P,))
    if keeps_sums(op):
        yield Signature((P,), (P,))


def count(op: Op) -> Iterator[Signature]:
    """count_nonzero, nansum: those of parts add up, but they are not linear, as a term's NaN is one of the sum."""
    yield from (signature for signature in total(op) if signature.inputs[0] != P)


def histogram(op: Op) -> Iterator[Signature]:
    """histc: the counts of parts add up if the bins are given; otherwise the bins depend on all elements."""
    bound = arguments_of(op)
    if bound["min"] < bound["max"]:
        yield from count(op)


def mean(op: Op) -> Iterator[Signature]:
    """mean: as sum, with a role on a split reduced dim, since the local mean divides by too few elements."""
    for split in total(op):
        is_divided = split.inputs[0].is_split and split.outputs[0] == P
        yield Signature(split.inputs, split.outputs, "mean" if is_divided else "")


def along_dim(op: Op) -> Iterator[Signature]:
    """Scans and sorts along one dim; every output keeps the input's dims."""
    ndim = len(op.inputs[0].shape)
    yield from carry(op, [(dim, dim) for dim in other_dims(ndim, arguments_of(op)["dim"])], is_linear=False)


def running_sum(op: Op) -> Iterator[Signature]:
    """cumsum: as `along_dim`, and linear."""
    ndim = len(op.inputs[0].shape)
    yield from carry(op, [(dim, dim) for dim in other_dims(ndim, arguments_of(op)["dim"])], is_linear=True)


# A pair of vectors along one dim gives one number, and sees no other pair; a vector that is repeated is used by all: R.
def pair_reduced(op: Op) -> Iterator[Signature]:
    """cosine_similarity and pairwise_distance: splits along the other dims of the inputs, broadcast to one another."""
    arguments, shapes = arguments_of(op), [tensor_of(op, name).shape for name in ("x1", "x2")]
    whole = torch.broadcast_shapes(*shapes)
    letters, reduced = tuple(f"d{dim}" for dim in range(len(whole))), dim_of(arguments.get("dim", -1), len(whole))
    terms = [broadcast_term(letters, shape, whole) for shape in shapes]
    for dim in other_dims(len(whole), reduced):
        placed = {name: place(letters[dim], term) for name, term in zip(("x1", "x2"), terms)}
        yield from signature(op, placed, S(dim - (dim > reduced and not arguments.get("keepdim", False))))


KEPT = (
    *(
        f"aten.{name}.default"
        for name in ("max", "min", "prod", "std", "var", "any", "all", "median", "amax", "amin", "argmax", "argmin")
    ),
    *(f"aten.{name}.dim" for name in ("max", "min", "std", "var", "any", "all", "median")),
    *(f"aten.{name}.correction" for name in ("std", "var", "std_mean", "var_mean")),
    "aten.prod.dim_int",
    "aten.any.dims",
    "aten.all.dims",
    "aten.aminmax.default",
    "aten.nanmean.default",
    "aten.kthvalue.default",
    "aten.linalg_vector_norm.default",
    "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dim",
)

_ALONG = (
    *(f"aten.{name}.default" for name in ("topk", "sort", "argsort", "cumprod", "cummax", "cummin", "logcumsumexp")),
    "aten.sort.stable",
    "aten.argsort.stable",
)

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(KEPT, kept),
    **dict.fromkeys(_ALONG, along_dim),
    "aten.cumsum.default": running_sum,
    "aten.cosine_similarity.default": pair_reduced,
    "aten.pairwise_distance.default": pair_reduced,
    "aten.sum.default": total,
    "aten.sum.dim_IntList": total,
    "aten.count_nonzero.default": count,
    "aten.count_nonzero.dim_IntList": count,
    "aten.nansum.default": count,
    "aten.histc.default": histogram,
    "aten.mean.default": mean,
    "aten.mean.dim": mean,
}
