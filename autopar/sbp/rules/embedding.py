"""Rules of lookups."""

from collections.abc import Iterator

from autopar.ir.graph import Op, arguments_of
from autopar.ir.lookups.even_bags import EVEN_BAGS
from autopar.sbp.placement import I, P, R, S
from autopar.sbp.rules._by_name import optional_tensor, signature, tensor_of
from autopar.sbp.signature import Signature


def embedding(op: Op) -> Iterator[Signature]:
    """out[i.., c] = weight[ids[i..], c].

    A split of the ids splits the output; every rank adds to the gradient of any row: weight R. A split of the columns
    splits the output's last dim. A split of the rows: each id is in one rank's rows and gives zero on all others: P.
    Linear in the weight: P -> P.
    """
    arguments = arguments_of(op)
    ids = tensor_of(op, "indices")
    # A gradient scaled by the frequency of an id is no sum over the parts, and an all-reduce cannot sum a sparse one.
    if not arguments["scale_grad_by_freq"] and not arguments["sparse"]:
        for dim in range(len(ids.shape)):
            yield from signature(op, {"weight": R, "indices": S(dim)}, S(dim))
        yield from signature(op, {"weight": S(0), "indices": R}, P, role="rows")
    yield from signature(op, {"weight": S(1), "indices": R}, S(len(ids.shape)))
    yield from signature(op, {"weight": P, "indices": R}, P)


def one_hot(op: Op) -> Iterator[Signature]:
    """Each id gives one row; the number of classes must be given, since otherwise it depends on the largest id."""
    if arguments_of(op)["num_classes"] > 0:
        for dim in range(len(op.inputs[0].shape)):
            yield from signature(op, {"self": S(dim)}, S(dim))


def embedding_bag(op: Op) -> Iterator[Signature]:
    """out[bag, c] = sum or mean of weight[id, c] over the ids of a bag, which a list of offsets separates.

    Columns split the output's; a sum is linear in the weight; of rows, ids elsewhere count nothing: P (role "rows").
    """
    arguments = arguments_of(op)
    others = (I,) * (len(op.outputs) - 1)
    if arguments["mode"] == MAX or arguments["sparse"]:
        return
    yield from signature(op, {"weight": S(1)}, (S(1), *others))
    yield from signature(op, {"weight": P}, (P, *others))
    weights = optional_tensor(op, "per_sample_weights")
    if arguments["mode"] == SUM and not arguments["scale_grad_by_freq"] and (weights is None or not weights.needs_grad):
        yield from signature(op, {"weight": S(0)}, (P, *others), role="rows")


def even_bags(op: Op) -> Iterator[Signature]:
    """out[bag, c] = sum, mean or maximum of weight[id, c] over the bag's row of ids: as embedding_bag; bags split, and
    what parts of each bag give to a sum adds up.
    """
    arguments, weights = arguments_of(op), optional_tensor(op, "per_sample_weights")
    mode, is_scaled = arguments["mode"], arguments["scale_grad_by_freq"]
    yield from signature(op, {"weight": S(1)}, S(1))
    if not is_scaled:
        yield from signature(op, {"indices": S(0), "per_sample_weights": S(0)}, S(0))
    if mode != MAX:
        yield from signature(op, {"weight": P}, P)
    if mode == SUM and not is_scaled:
        yield from signature(op, {"indices": S(1), "per_sample_weights": S(1)}, P)
        if weights is None or not weights.needs_grad:
            yield from signature(op, {"weight": S(0)}, P, role="rows")


SUM, MAX = 0, 2  # of mode

RULES = {
    "aten.embedding.default": embedding,
    "aten.one_hot.default": one_hot,
    "aten.embedding_bag.default": embedding_bag,
    "aten.embedding_bag.padding_idx": embedding_bag,
    EVEN_BAGS: even_bags,
}
