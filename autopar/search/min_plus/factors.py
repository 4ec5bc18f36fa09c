"""Min-plus algebra on factors, functions of a few nodes' strategies:
their sum, and the minimum over nodes of the sum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Entries of a partial sum in memory at a time: two such float64 arrays stay in a core's cache.
_BLOCK_ENTRIES = 1 << 16


@dataclass(frozen=True, eq=False)
class Factor:
    """One term of the objective, `values[k0, k1, ...]`, indexed by the
    strategies of the nodes in `scope` (ascending).
    """

    scope: tuple[int, ...]
    values: np.ndarray  # f64, a dim for each node of the scope


def contract(factors: Sequence[Factor], keep: tuple[int, ...]) -> Factor:
    """The sum of the factors, minimised over every node not in `keep`, which is ascending and within their scopes."""
    remaining = list(factors)
    while gone := {node for factor in remaining for node in factor.scope} - set(keep):
        node = min(gone, key=lambda v: (_joint_size(remaining, v), v))
        touching = [factor for factor in remaining if node in factor.scope]
        remaining = [factor for factor in remaining if node not in factor.scope] + [minimise_out(touching, node)]
    return _total(remaining, keep)


def minimise_out(factors: Sequence[Factor], node: int) -> Factor:
    """The sum of factors that all contain `node`, minimised over the strategies of `node`."""
    merged = _absorb(factors)
    scope = tuple(sorted({v for factor in merged for v in factor.scope} - {node}))
    arrays = [_aligned(factor, (node, *scope)) for factor in merged]
    shape = tuple(map(max, zip(*(array.shape for array in arrays))))  # np.broadcast_shapes allows 32 dims at most
    block = max(1, _BLOCK_ENTRIES // max(1, math.prod(shape[1:])))
    best = np.full(shape[1:], np.inf)
    for start in range(0, shape[0], block):
        part = arrays[0][start : start + block]
        for array in arrays[1:]:
            part = part + array[start : start + block]
        np.minimum(best, part.min(axis=0) if len(part) > 1 else part[0], out=best)
    return Factor(scope, best)


def _absorb(factors: Sequence[Factor]) -> list[Factor]:
    """The factors, each added to one whose scope contains its own if
    there is one, so that large sums have few terms.
    """
    merged: list[Factor] = []
    for factor in sorted(factors, key=lambda f: -len(f.scope)):
        for i, host in enumerate(merged):
            if set(factor.scope) <= set(host.scope):
                merged[i] = Factor(host.scope, host.values + _aligned(factor, host.scope))
                break
        else:
            merged.append(factor)
    return merged


def _aligned(factor: Factor, scope: tuple[int, ...]) -> np.ndarray:
    """The values with a dim for each node of `scope`, of size 1 if the factor does not depend on the node."""
    present = [factor.scope.index(node) for node in scope if node in factor.scope]
    values = np.ascontiguousarray(factor.values.transpose(present))
    sizes = iter(values.shape)
    return values.reshape([next(sizes) if node in factor.scope else 1 for node in scope])


def _total(factors: Sequence[Factor], scope: tuple[int, ...]) -> Factor:
    total = np.zeros(())
    for factor in factors:
        total = total + _aligned(factor, scope)
    return Factor(scope, total)


def _joint_size(factors: Sequence[Factor], node: int) -> int:
    sizes: dict[int, int] = {}
    for factor in factors:
        if node in factor.scope:
            sizes.update(zip(factor.scope, factor.values.shape))
    return math.prod(sizes.values())
