"""Rules of products; every row follows from `_einsum.products`, which has the proof."""

import string
from collections.abc import Iterator, Sequence

import torch

from autopar.ir.graph import Op, Value, arguments_of
from autopar.sbp.placement import P, R, S
from autopar.sbp.rules._by_name import argument_names, optional_tensor, signature, tensor_of
from autopar.sbp.rules._einsum import Term, broadcast_term, place, products
from autopar.sbp.signature import Signature


def _named(
    op: Op, names: Sequence[str], factors: Sequence[Term], output: Term, added: Sequence[Term] = ()
) -> Iterator[Signature]:
    for placements, placed in products(factors, output, added):
        yield from signature(op, dict(zip(names, placements)), placed)


def _batch(rank: int) -> Term:
    """The letters of `rank` leading dims."""
    return tuple(f"b{i}" for i in range(rank))


def linear(op: Op) -> Iterator[Signature]:
    """aten.linear: b..k, nk (+ n) -> b..n; a weight of one dim yields b.. (plus a scalar)."""
    batch = _batch(len(tensor_of(op, "input").shape) - 1)
    out: Term = ("n",) if len(tensor_of(op, "weight").shape) == 2 else ()
    return _named(op, ("input", "weight", "bias"), [batch + ("k",), out + ("k",)], batch + out, [out])


def turned_linear(op: Op) -> Iterator[Signature]:
    """autopar.turned_linear: b..k, kn (+ n) -> b..n."""
    batch = _batch(len(tensor_of(op, "input").shape) - 1)
    return _named(op, ("input", "weight", "bias"), [batch + ("k",), ("k", "n")], batch + ("n",), [("n",)])


def matmul(op: Op) -> Iterator[Signature]:
    """Matrix products of any ranks: b..mk, b..kn -> b..mn with the batch dims broadcast; a vector has no m or n."""
    names = argument_names(op)[:2]
    left, right = (tensor_of(op, name).shape for name in names)
    rows: Term = ("m",) if len(left) > 1 else ()
    columns: Term = ("n",) if len(right) > 1 else ()
    shape = op.outputs[0].shape[: len(op.outputs[0].shape) - len(rows) - len(columns)]
    batch = _batch(len(shape))
    factors = [
        broadcast_term(batch, left[:-2], shape) + rows + ("k",),
        broadcast_term(batch, right[:-2], shape) + ("k",) + columns,
    ]
    return _named(op, names, factors, batch + rows + columns)


def _added_matmul(names: tuple[str, str, str], factors: tuple[str, str], output: str):
    """The rule of beta * self + alpha * (product of two factors), with `self` broadcast to the output."""

    def rule(op: Op) -> Iterator[Signature]:
        term = broadcast_term(tuple(output), tensor_of(op, names[2]).shape, op.outputs[0].shape)
        return _named(op, names, [tuple(factor) for factor in factors], tuple(output), [term])

    return rule


def outer(op: Op) -> Iterator[Signature]:
    """m, n -> mn."""
    return _named(op, ("self", "vec2"), [("m",), ("n",)], ("m", "n"))


def inner(op: Op) -> Iterator[Signature]:
    """a..k, b..k -> a..b.. (a scalar factor scales the other: only whole)."""
    left, right = (tensor_of(op, name).shape for name in ("self", "other"))
    if not left or not right:
        return iter(())
    free = [tuple(f"{side}{i}" for i in range(len(shape) - 1)) for side, shape in (("l", left), ("r", right))]
    return _named(op, ("self", "other"), [free[0] + ("k",), free[1] + ("k",)], free[0] + free[1])


def tensordot(op: Op) -> Iterator[Signature]:
    """aten.tensordot: the given dims are summed over in pairs; the dims left over follow one another."""
    arguments = arguments_of(op)
    factors: list[Term] = []
    for side in ("self", "other"):
        rank = len(tensor_of(op, side).shape)
        summed = {dim % rank: f"k{i}" for i, dim in enumerate(arguments[f"dims_{side}"])}
        factors.append(tuple(summed.get(dim, f"{side}{dim}") for dim in range(rank)))
    output = tuple(letter for term in factors for letter in term if letter and not letter.startswith("k"))
    return _named(op, ("self", "other"), factors, output)


# Kernels that need the row stride, of the last two dims' strides the one that is not 1, to be a multiple of this number
# of bytes (`_meta_grouped_mm_common` and `_check_scaled_mm_sizes` in torch/_meta_registrations.py); a split that leaves
# another stride has no kernel.
ROW_BYTES = {"aten._grouped_mm.default": 16, "autopar.turned_grouped_mm.default": 16, "aten._scaled_mm.default": 16}


def grouped_mm(op: Op) -> Iterator[Signature]:
    """tk, ekn (turned: enk) -> tn, where row t uses the weight of its group; weights of two dims or rows of three only
    whole.

    Columns n and k split as in any product. A slice of the rows needs the groups' bounds within it (role "rows"). A
    slice of the groups computes their rows, zero elsewhere (role "experts"): a term of the output, and of the rows'
    gradient: R.
    """
    names = argument_names(op)[:2]
    x, weight = (tensor_of(op, name) for name in names)
    if (len(x.shape), len(weight.shape)) != (2, 3) or optional_tensor(op, "offs") is None:
        return
    matrix = ("n", "k") if op.target.startswith("autopar.") else ("k", "n")
    for placements, placed in products([(None, "k"), (None, *matrix)], (None, "n")):
        yield from signature(op, dict(zip(names, placements)), placed)
    yield from signature(op, {names[0]: S(0), names[1]: R}, S(0), role="rows")
    yield from signature(op, {names[0]: R, names[1]: S(0)}, P, role="experts")


# What is scaled by blocks along a dim splits where the blocks do: each part has as many scales as blocks. A sum of
# products with one scale each is the scaled sum, so that terms are products of their own parts.
def scaled_mm(op: Op) -> Iterator[Signature]:
    """aten._scaled_mm: mk, kn -> mn of float8, times the scale of a (one, [m or 1, blocks of k or 1]) and of b (one,
    [blocks of k or 1, n, blocks of it or 1]); terms of a sum are not rounded to float8.

    Scales in another order, those of one dim or of 8 bits, are whole, and what they scale.
    """
    (m, k), n = tensor_of(op, "self").shape, tensor_of(op, "mat2").shape[1]
    scales = [_scale_term(tensor_of(op, f"scale_{side}"), pair) for side, pair in (("a", (m, k)), ("b", (k, n)))]
    if None in scales:
        return
    of_a, of_b = (
        tuple(letter if used else None for letter, used in zip(pair, term or ()))
        for pair, term in zip(("mk", "kn"), scales)
    )
    has_sum = optional_tensor(op, "bias") is None and op.outputs[0].dtype.itemsize > 1
    for letter in "mnk" if has_sum else "mn":
        placed = {"self": place(letter, tuple("mk")), "mat2": place(letter, tuple("kn"))}
        placed |= {"scale_a": place(letter, of_a), "scale_b": place(letter, of_b), "bias": place(letter, ("n",))}
        yield from signature(op, placed, P if letter == "k" else S("mn".index(letter)))


def _scale_term(scale: Value, extents: tuple[int, int]) -> tuple[bool, ...] | None:
    """Whether the scale has blocks along each dim of the matrix; None if its order is another."""
    if scale.dtype != torch.float32:
        return None
    if all(size == 1 for size in scale.shape):
        return (False,) * len(scale.shape)
    if len(scale.shape) != 2 or any(extent % size for extent, size in zip(extents, scale.shape)):
        return None
    return tuple(size > 1 for size in scale.shape)


def einsum(op: Op) -> Iterator[Signature]:
    """aten.einsum with its equation; an ellipsis is spelled out, dims of size 1 against larger ones are broadcast."""
    arguments = arguments_of(op)
    shapes = [op.inputs[slot.index].shape for slot in arguments["tensors"]]
    terms, output = parse_equation(arguments["equation"], [len(shape) for shape in shapes])
    sizes: dict[str | None, int] = {}
    for term, shape in zip(terms, shapes):
        sizes |= {letter: max(size, sizes.get(letter, 1)) for letter, size in zip(term, shape)}
    factors = [
        tuple(letter if size == sizes[letter] else None for letter, size in zip(*pair)) for pair in zip(terms, shapes)
    ]
    for placements, placed in products(factors, output):
        yield from signature(op, {"tensors": placements}, placed)


def parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[Term], Term]:
    """Letters of each operand and of the output; ellipsis dims become numbered letters.

    >>> parse_equation("...k,kn", [3, 2])
    ([('.0', '.1', 'k'), ('k', 'n')], ('.0', '.1', 'n'))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    num_hidden = [rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(operands, ranks)]
    widest = max(num_hidden)
    if not arrow:
        letters = [letter for letter in string.ascii_letters if left.count(letter) == 1]
        right = ("..." if widest else "") + "".join(sorted(letters))
    terms = [_spell(term, hidden, widest) for term, hidden in zip(operands, num_hidden)]
    return terms, _spell(right, widest, widest)


def _spell(term: str, num_hidden: int, widest: int) -> Term:
    before, _, after = term.partition("...")
    hidden = tuple(f".{i}" for i in range(widest - num_hidden, widest)) if "..." in term else ()
    return tuple(before) + hidden + tuple(after)


RULES = {
    "aten.linear.default": linear,
    "autopar.turned_linear.default": turned_linear,
    "aten.matmul.default": matmul,
    "aten.mm.default": matmul,
    "aten.bmm.default": matmul,
    "aten.mv.default": matmul,
    "aten.dot.default": matmul,
    "aten.addmm.default": _added_matmul(("mat1", "mat2", "self"), ("mk", "kn"), "mn"),
    "aten.addmv.default": _added_matmul(("mat", "vec", "self"), ("mk", "k"), "m"),
    "aten.baddbmm.default": _added_matmul(("batch1", "batch2", "self"), ("bmk", "bkn"), "bmn"),
    "aten.outer.default": outer,
    "aten.inner.default": inner,
    "aten.tensordot.default": tensordot,
    "aten.einsum.default": einsum,
    "aten._scaled_mm.default": scaled_mm,
    "aten._grouped_mm.default": grouped_mm,
    "transformers.grouped_mm_fallback.default": grouped_mm,
    "autopar.turned_grouped_mm.default": grouped_mm,
    "autopar.turned_grouped_mm_fallback.default": grouped_mm,
    "autopar.grouped_linear.default": grouped_mm,
}
