"""Rules of losses: a term for each token or element, and then no reduction, their sum or their mean.

Terms are independent, so a split of the tokens splits the terms; their sum is then pending: P, whose gradient is whole
and reaches each rank's slice of the inputs. A mean divides by a global number: a role.
"""

from collections.abc import Iterator

from autopar.ir.graph import Op, arguments_of
from autopar.ir.guards.kept_losses import CTC
from autopar.sbp.placement import I, P, R, S
from autopar.sbp.rules._by_name import optional_tensor, signature, tensor_of
from autopar.sbp.rules._einsum import broadcast_term, place
from autopar.sbp.signature import Signature

NONE, MEAN, SUM = 0, 1, 2  # ATen's Reduction


def _tokens(op: Op) -> Iterator[Signature]:
    """Splits of the token dims of input [C], [N, C, ...] against target (the same without C, or probabilities)."""
    reduction = arguments_of(op)["reduction"]
    rank = len(tensor_of(op, "self").shape)
    has_classes = len(tensor_of(op, "target").shape) == rank
    for dim in (d for d in range(rank) if d != 1 and rank > 1):
        without_class = dim if dim < 1 else dim - 1
        placed = {"self": S(dim), "target": S(dim if has_classes else without_class)}
        output = S(without_class) if reduction == NONE else P
        yield from signature(op, placed, output, role="tokens" if reduction == MEAN else "")


def cross_entropy(op: Op) -> Iterator[Signature]:
    """The splits of tokens, and a split of the classes (role "vocab").

    The latter needs each token's maximum, sum of exponentials and target logit from all ranks. After that all ranks
    hold the whole loss: I, whose gradient is whole and gives each rank its slice of the logits' gradient.
    """
    yield from _tokens(op)
    logits, target = tensor_of(op, "self"), tensor_of(op, "target")
    if len(target.shape) < len(logits.shape):
        class_dim = min(1, len(logits.shape) - 1)
        yield from signature(op, {"self": S(class_dim), "target": I, "weight": I}, I, role="vocab")


def nll_loss(op: Op) -> Iterator[Signature]:
    """Linear in the log-probabilities: P -> P."""
    yield from _tokens(op)
    yield from signature(op, {"self": P, "target": R}, P)


def elementwise_loss(op: Op) -> Iterator[Signature]:
    """A term for each element of the broadcast inputs; an input that is repeated is used by all slices: R."""
    reduction = arguments_of(op)["reduction"]
    names = [
        name
        for name in ("self", "input", "input1", "input2", "target", "weight", "pos_weight")
        if name in arguments_of(op) and optional_tensor(op, name) is not None
    ]
    shapes = [tensor_of(op, name).shape for name in names]
    rank = max(len(shape) for shape in shapes)
    whole = tuple(max((s[d] for s in shapes if len(s) >= -d), default=1) for d in range(-rank, 0))
    letters = tuple(f"d{i}" for i in range(rank))
    terms = {name: broadcast_term(letters, shape, whole) for name, shape in zip(names, shapes)}
    for dim, letter in enumerate(letters):
        placed = {name: place(letter, term) for name, term in terms.items()}
        yield from signature(
            op, placed, S(dim) if reduction == NONE else P, role="elements" if reduction == MEAN else ""
        )


def row_loss(op: Op) -> Iterator[Signature]:
    """A term for each row of the inputs, one sample a row; the weights of classes are used by all rows: R."""
    names = [name for name in _ROWS if name in arguments_of(op)]
    ranks = [len(tensor_of(op, name).shape) for name in names]
    if max(ranks) < 2:  # a single sample
        return
    reduction = arguments_of(op)["reduction"]
    output = S(0) if reduction == NONE else P
    yield from signature(op, dict.fromkeys(names, S(0)), output, role="elements" if reduction == MEAN else "")


def ctc_loss(op: Op) -> Iterator[Signature]:
    """autopar.ctc_loss: a term for each sample, whose targets are a row."""
    if len(tensor_of(op, "targets").shape) == 2:
        samples = dict.fromkeys(("targets", "input_lengths", "target_lengths"), S(0))
        yield from signature(op, {"log_probs": S(1), **samples}, S(0))


_ROWS = ("self", "input1", "input2", "anchor", "positive", "negative", "target")

RULES = {
    CTC: ctc_loss,
    "aten.cross_entropy_loss.default": cross_entropy,
    "aten.nll_loss_nd.default": nll_loss,
    "aten.mse_loss.default": elementwise_loss,
    "aten.l1_loss.default": elementwise_loss,
    "aten.smooth_l1_loss.default": elementwise_loss,
    "aten.huber_loss.default": elementwise_loss,
    "aten.soft_margin_loss.default": elementwise_loss,
    "aten.kl_div.default": elementwise_loss,
    "aten.margin_ranking_loss.default": elementwise_loss,
    "aten.hinge_embedding_loss.default": elementwise_loss,
    "aten.poisson_nll_loss.default": elementwise_loss,
    "aten.cosine_embedding_loss.default": row_loss,
    "aten.multi_margin_loss.default": row_loss,
    "aten.multilabel_margin_loss.default": row_loss,
    "aten.triplet_margin_loss.default": row_loss,
    "aten.binary_cross_entropy.default": elementwise_loss,
    "aten.binary_cross_entropy_with_logits.default": elementwise_loss,
}
