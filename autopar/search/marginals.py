"""Min-marginals: for each strategy, and each pair of an edge, the optimum among the choices that take it.

The downward pass of bucket elimination: what lies outside a bucket's subtree, as a function of the bucket's neighbours. No message is
subtracted from a sum that holds it, so `inf` (forbidden) needs no care.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.search.eliminate import Bucket, Elimination
from autopar.search.factors import Factor, contract


@dataclass(frozen=True, eq=False)
class Marginals:
    """`nodes[v][k]` and `pairs[a, b][ka, kb]`: the objective of the best choice that contains the strategy or the pair."""

    nodes: tuple[np.ndarray, ...]
    pairs: Mapping[tuple[int, int], np.ndarray]


def min_marginals(elimination: Elimination, pairs: frozenset[tuple[int, int]] = frozenset()) -> Marginals:
    """The marginals of every node and of the given edges of the eliminated table."""
    outside: dict[Factor, Factor] = {}
    nodes: dict[int, np.ndarray] = {}
    joint: dict[tuple[int, int], np.ndarray] = {}
    roots = [bucket.message for bucket in elimination.buckets if not bucket.message.scope]
    messages = {bucket.message for bucket in elimination.buckets}
    for bucket in reversed(elimination.buckets):
        terms = (*bucket.factors, _outside_of(bucket, outside, roots))
        nodes[bucket.node] = contract(terms, (bucket.node,)).values
        for factor in bucket.factors:
            if factor in messages:
                outside[factor] = contract([term for term in terms if term is not factor], factor.scope)
            elif factor.scope in pairs:
                joint[factor.scope] = contract(terms, factor.scope).values
    return Marginals(tuple(nodes[v] for v in range(len(nodes))), joint)


def _outside_of(bucket: Bucket, outside: Mapping[Factor, Factor], roots: list[Factor]) -> Factor:
    """For the last bucket of a connected component: the optimum of the other components."""
    if bucket.message.scope:
        return outside[bucket.message]
    return Factor((), np.array(sum(float(root.values) for root in roots if root is not bucket.message)))
