"""Rules of attention."""

from collections.abc import Iterator

from autopar.ir.attention.flex_op import BLOCKS_OF_QUERIES, FLEX
from autopar.ir.attention.index_functions import INDICES, dims_read
from autopar.ir.graph import Op, Value, arguments_of
from autopar.sbp.placement import P, Placement, R, S
from autopar.sbp.rules._by_name import optional_tensor, signature, tensor_of
from autopar.sbp.rules._einsum import Term, broadcast_term, place
from autopar.sbp.signature import KEY_HEADS, QUERIES, RING, Signature


def attention(op: Op) -> Iterator[Signature]:
    """aten.scaled_dot_product_attention: q [.., h, l, e], k [.., h, s, e], v [.., h, s, f], mask to [.., h, l, s] ->
    [.., h, l, f].

    Batch, heads and queries are independent of one another: split, with k, v (and a broadcast mask) used by every
    slice: R. With grouped heads, slices of the query heads need just the same slices of the key heads, or the only one.
    Split causal queries need their offset (role "queries"). out is linear in v, feature by feature: v's features split,
    v P -> P; the gradients of q, k and mask, linear in out's gradient and v, are then terms: R. Where an axis does not
    divide grouped key heads, each rank has all and reads some: their gradients are terms (role "key_heads"). A softmax
    is a sum of parts by keys over their common denominator: parts of keys go around a ring of ranks with parts of
    queries (role "ring"; arXiv:2310.01889), and so do their gradients.
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
        role = QUERIES if letter == "l" and arguments["is_causal"] else ""
        yield from signature(op, placed, S(output.index(letter)), role=role)
    yield from signature(op, {"query": R, "key": R, "value": P}, P)
    if lead and 1 < key.shape[-3] < query.shape[-3]:
        by_heads = {name: place(lead[-1], term) for name, term in terms.items()}
        yield from signature(op, by_heads | {"key": R, "value": R}, S(len(lead) - 1), role=KEY_HEADS)
    if arguments["dropout_p"] == 0 and not (mask is not None and mask.needs_grad):
        by_tokens = {name: place("l", term) for name, term in terms.items()}
        sequence = {"key": S(len(key.shape) - 2), "value": S(len(value.shape) - 2)}
        yield from signature(op, by_tokens | sequence, S(output.index("l")), role=RING)


def _leading(lead: Term, shape: tuple[int, ...], output: tuple[int, ...], is_grouped: bool) -> Term:
    """Letters of the leading dims; grouped key heads are fewer than the query heads but split with them."""
    term = broadcast_term(lead, shape[:-2], output)
    if is_grouped and shape[-3] > 1:
        return term[:-1] + (lead[-1],)
    return term


def flex_attention(op: Op) -> Iterator[Signature]:
    """autopar.flex_attention: as `attention`, with functions of the indices of sample, head, query and key.

    Where the functions only read captured tensors at an index, these are split along with it. Where they compute with
    it, a part's first index is added to its own (role "batch", "heads" or "queries"). A mask's blocks of queries are
    split with the queries; those by keys follow from them. The functions' gradients are linear in that of the output.
    Roles "key_heads" and "ring" are those of `attention`; parts of the keys in a ring are whole blocks.
    """
    arguments = arguments_of(op)
    query, key, _ = (tensor_of(op, name) for name in ("query", "key", "value"))
    blocks = [op.inputs[slot.index] if slot is not None else None for slot in arguments["block_mask"]]
    for dim, role in enumerate(("batch", "heads", "queries")):
        read = dims_read(arguments["functions"], INDICES[dim])
        is_split = dim < 2 and key.shape[dim] > 1
        placed = {
            "query": S(dim),
            **dict.fromkeys(("key", "value"), S(dim) if is_split else R),
            "block_mask": _of_all(blocks, dim),
            "captured": [R if at is None else S(at) for at in read or ()],
        }
        tables = [op.inputs[slot.index].shape for slot in arguments["captured"]]
        if all(at is None or shape[at] == query.shape[dim] for shape, at in zip(tables, read or ())):
            yield from signature(op, placed, (S(dim), S(dim)), role="" if read is not None else role)
    if 1 < key.shape[1] < query.shape[1]:
        yield from signature(op, {"query": S(1), "block_mask": _of_all(blocks, 1)}, (S(1), S(1)), role=KEY_HEADS)
    num_keys, (_, size) = key.shape[2], arguments["block_size"]
    if not blocks or num_keys % size == 0:
        placed = {**dict.fromkeys(("query", "key", "value"), S(2)), "block_mask": _of_all(blocks, 2)}
        yield from signature(op, placed, (S(2), S(2)), role=RING, num_units=num_keys // size if blocks else 0)


def _of_all(blocks: list[Value | None], dim: int) -> list[Placement]:
    """The placements of the tensors of a BlockMask where a dim of the queries is split."""
    return [_of_blocks(value, dim, place < len(BLOCKS_OF_QUERIES)) for place, value in enumerate(blocks)]


def _of_blocks(value: Value | None, dim: int, by_queries: bool) -> Placement:
    is_split = value is not None and value.shape[dim] > 1 and (dim < 2 or by_queries)
    return S(dim) if is_split else R


RULES = {"aten.scaled_dot_product_attention.default": attention, FLEX: flex_attention}
