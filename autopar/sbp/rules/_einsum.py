"""Placements of products, by letters as in einsum.

Let y = sum over the letters the output lacks of x1 * x2 * ... (+ b). It is linear in each factor, so its gradient is
linear in the incoming gradient and in every other factor. Splitting one letter l on a mesh axis:
  l in the output: each rank computes its slice of y; a factor with l is sliced and so is its gradient; a factor without
      l is used by every slice, so its gradient is the sum over ranks: R.
  l summed over: each rank computes a term of y: P. The incoming gradient is whole, so a factor with l gets its slice of
      the gradient, and one without l a term of it: R. An added tensor must be a term as well: P, whose gradient is
      whole.
Splitting none: a pending factor gives a pending output, (a + b) * c = a * c + b * c; each rank sees the whole incoming
gradient and one term of that factor, so the other factors' gradients are terms: R.
"""

from collections.abc import Iterator, Sequence

from autopar.sbp.placement import P, Placement, R, S

Term = tuple[str | None, ...]  # a letter for each dim; None: a dim of size 1 that is broadcast
Row = tuple[tuple[Placement, ...], Placement]  # placements of the factors, then of the added terms; of the output


def products(factors: Sequence[Term], output: Term, added: Sequence[Term] = ()) -> Iterator[Row]:
    """All splitting and pending-sum rows of one product."""
    for letter in dict.fromkeys(letter for term in factors for letter in term if letter):
        if all(term.count(letter) <= 1 for term in factors):
            yield _split(letter, factors, output, added)
    for index in range(len(factors)):
        yield tuple(P if i == index else R for i in range(len(factors))) + (P,) * len(added), P


def _split(letter: str, factors: Sequence[Term], output: Term, added: Sequence[Term]) -> Row:
    placed = tuple(place(letter, term) for term in factors)
    if letter not in output:
        return placed + (P,) * len(added), P
    return placed + tuple(place(letter, term) for term in added), S(output.index(letter))


def place(letter: str, term: Term) -> Placement:
    """The placement of `term` for a split of `letter`: split at its dim, R if the term lacks it."""
    return S(term.index(letter)) if letter in term else R


def broadcast_term(output: Term, shape: Sequence[int], output_shape: Sequence[int]) -> Term:
    """The letters of a tensor that is broadcast to the output, aligned at the last dim; None where it is repeated."""
    offset = len(output) - len(shape)
    return tuple(output[offset + d] if size == output_shape[offset + d] else None for d, size in enumerate(shape))
