"""Rules of attention."""

from collections.abc import Iterator

from autopar.ir.graph import Op, arguments_of
from autopar.sbp.placement import P, R, S
from autopar.sbp.rules._by_name import optional_tensor, signature, tensor_of
from autopar.sbp.rules._einsum import Term, broadcast_term, place
from autopar.sbp.signature import Signature


def attention(op: Op) -> Iterator[Signature]:
    """aten.scaled_dot_product_attention: q [.., h, l, e], k [.., h, s, e], v [.., h, s, f], mask to [.., h, l, s] ->
    [.., h, l, f].

    Batch, heads and queries are independent of one another: split, with k, v (and a broadcast mask) used by every
    slice: R. With grouped heads, slices of the query heads need just the same slices of the key heads, or the only one.
    Split causal queries need their offset (role "queries"). out is linear in v, feature by feature: v's features split,
    v P -> P; the gradients of q, k and mask, linear in out's gradient and v, are then terms: R.
    """
    arguments = arguments_of(op)
    query, key, value = (tensor_of(op, name) for name in ("query", "key", "value"))
    mask = optional_tensor(op, "attn_mask")
    shape = op.outputs[0].shape
    lead = tuple(f"b{i}" for i in range(len(shape) - 2))
    leads = [_leading(lead, tensor.shape, shape, arguments["enable_gqa"]) for tensor in (query, key, value)]
    terms: dict[str, Term] = {
        "query": leads[0] + ("l", "e"),
        "key": leads[1] + ("s", "e"),
        "value": leads[2] + ("s", "f"),
    }
    if mask is not None:
        terms["attn_mask"] = broadcast_term(lead + ("l", "s"), mask.shape, (*shape[:-1], key.shape[-2]))
    output = lead + ("l", "f")
    # the random numbers that drop a score must be the same for all features
    letters = output if arguments["dropout_p"] == 0 else output[:-1]
    for letter in letters:
        placed = {name: place(letter, term) for name, term in terms.items()}
        role = "queries" if letter == "l" and arguments["is_causal"] else ""
        yield from signature(op, placed, S(output.index(letter)), role=role)
    yield from signature(op, {"query": R, "key": R, "value": P}, P)


def _leading(lead: Term, shape: tuple[int, ...], output: tuple[int, ...], is_grouped: bool) -> Term:
    """Letters of the leading dims; grouped key heads are fewer than the query heads but split with them."""
    term = broadcast_term(lead, shape[:-2], output)
    if is_grouped and shape[-3] > 1:
        return term[:-1] + (lead[-1],)
    return term


RULES = {"aten.scaled_dot_product_attention.default": attention}
