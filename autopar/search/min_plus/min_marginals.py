"""Min-marginals: for each strategy, and each pair of an edge, the optimum among the choices that take it.

They are computed by the downward pass of bucket elimination: the least of all terms outside a bucket's subtree, as a
function of the bucket's neighbours. No message is subtracted from a sum, so that `inf` (forbidden) needs no care.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.search.min_plus.eliminate import Elimination
from autopar.search.min_plus.factors import Factor, contract


@dataclass(frozen=True, eq=False)
class Marginals:
    """The objective of the best choice that contains a strategy, `nodes[v][k]`, or a pair, `pairs[a, b][ka, kb]`."""

    nodes: tuple[np.ndarray, ...]
    pairs: Mapping[tuple[int, int], np.ndarray]


def min_marginals(elimination: Elimination, pairs: frozenset[tuple[int, int]] = frozenset()) -> Marginals:
    """The marginals of every node and of the given edges of the eliminated table."""
    outside = outside_messages(elimination)
    nodes: dict[int, np.ndarray] = {}
    joint: dict[tuple[int, int], np.ndarray] = {}
    for bucket in elimination.buckets:
        terms = (*bucket.factors, outside[bucket.message])
        nodes[bucket.node] = contract(terms, (bucket.node,)).values
        for factor in bucket.factors:
            if factor.scope in pairs and factor not in outside:
                joint[factor.scope] = contract(terms, factor.scope).values
    return Marginals(tuple(nodes[v] for v in range(len(nodes))), joint)


def outside_messages(elimination: Elimination) -> dict[Factor, Factor]:
    """Each bucket's message -> the least sum of all terms that are not part of it, as a function of the same nodes."""
    roots = [bucket.message for bucket in elimination.buckets if not bucket.message.scope]
    messages = {bucket.message for bucket in elimination.buckets}
    # For the last bucket of a connected component, that is the optimum of the other components.
    outside = {
        root: Factor((), np.array(sum(float(other.values) for other in roots if other is not root))) for root in roots
    }
    for bucket in reversed(elimination.buckets):
        terms = (*bucket.factors, outside[bucket.message])
        for factor in bucket.factors:
            if factor in messages:
                outside[factor] = contract([term for term in terms if term is not factor], factor.scope)
    return outside
