"""The collectives of conversions of parts of different sizes, for many pairs of layouts at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

import numpy as np

from autopar.ir.graph import Value
from autopar.sbp.placement import OWN, OWN_DIM, PENDING, UNIT, USED, WHOLE, Codes, Layout, codes_of, is_even
from autopar.sbp.redistribute import CollectiveKind, Move, collectives_of_value, moves, step_of

Layouts = tuple[Layout, ...]
# The codes without a dim, where their negative numbers find them behind those of a pair.
_WITHOUT_DIM = (OWN, USED, WHOLE, PENDING)


@dataclass(frozen=True, eq=False)
class UnevenRecipe:
    """The collectives of the conversions of parts of different sizes, or in units, where `pairs` is true.

    They are `sent[k] for k in rows[pair]`, each with its bytes; -1 pads a row.
    """

    pairs: np.ndarray  # bool[sources, targets]
    sent: tuple[tuple[CollectiveKind, int], ...]
    rows: np.ndarray


def uneven_recipe(value: Value, sources: Layouts, targets: Layouts, mesh_shape: tuple[int, ...]) -> UnevenRecipe | None:
    """None if all parts are equal, and none is in units."""
    has_units = _with_units(sources).any() or _with_units(targets).any()
    if not has_units and all(extent % math.prod(mesh_shape) == 0 for extent in value.shape):
        return None
    return _find(replace(value, name="", needs_grad=True), sources, targets, mesh_shape)


@lru_cache(maxsize=256)
def forbidden(sources: Layouts, targets: Layouts) -> np.ndarray | None:
    """bool[sources, targets]: whether there is no conversion; None if there is one of every pair."""
    ndim = len(sources[0]) if sources else 0
    codes = [np.array([*map(codes_of, layouts)], dtype=np.int64).reshape(-1, ndim) for layouts in (sources, targets)]
    src, dst = codes[0][:, None], codes[1][None]
    src_own, dst_own = ((one == OWN) | (one % UNIT >= OWN_DIM) & (one >= 0) for one in (src, dst))
    if not src_own.any() and not dst_own.any():
        return None
    return ((src != dst) & (src_own | dst_own)).any(axis=-1)


@lru_cache(maxsize=512)
def _find(value: Value, sources: Layouts, targets: Layouts, mesh_shape: tuple[int, ...]) -> UnevenRecipe | None:
    uneven = [_where_uneven(value.shape, own, mesh_shape) | _with_units(own) for own in (sources, targets)]
    if not any(map(np.any, uneven)):
        return None
    pairs = np.logical_or.outer(*uneven)
    if (never := forbidden(sources, targets)) is not None:
        pairs &= ~never
    at, ndim = np.nonzero(pairs), len(mesh_shape)
    codes = [np.array([*map(codes_of, layouts)], dtype=np.int64).reshape(-1, ndim) for layouts in (sources, targets)]
    numbers: dict[tuple[CollectiveKind, int], int] = {}
    known: dict[tuple[tuple[int, ...], Codes], list[int]] = {}  # a step -> the numbers of its own
    rows = []
    for pair, pattern in _with_patterns(np.concatenate([own[where] for own, where in zip(codes, at)], axis=-1)):
        row: list[int] = []
        for axes, found in _moves(pattern):
            key = axes, found(pair)
            if key not in known:
                have, want, *before = key[1]
                each = _collectives((axes, have, want, tuple(before)), value, mesh_shape)
                known[key] = [numbers.setdefault(one, len(numbers)) for one in each]
            row += known[key]
        rows.append(row)
    width = max(map(len, rows), default=0)
    padded = np.array([row + [-1] * (width - len(row)) for row in rows], dtype=np.int64).reshape(len(rows), width)
    return UnevenRecipe(pairs, tuple(numbers), padded)


def _with_patterns(pairs: np.ndarray) -> list[tuple[Codes, Codes]]:
    """Each pair of layouts, its codes one after the other and `_WITHOUT_DIM` behind, and its pattern: the same with
    dims and units renamed to where each is first. `pairs`: i64[pairs, codes].
    """
    first = [(own[:, :, None] == own[:, None, :]).argmax(axis=-1) for own in (pairs % UNIT, pairs)]
    patterns = np.where(pairs >= 0, first[0] + UNIT * (1 + first[1]), pairs)
    return [((*pair, *_WITHOUT_DIM), tuple(own)) for pair, own in zip(pairs.tolist(), patterns.tolist())]


@lru_cache(maxsize=2**16)
def _moves(pattern: Codes) -> tuple[tuple[tuple[int, ...], Callable[[Codes], Codes]], ...]:
    """The moves of the pairs of a pattern: of each its axes, and what takes its codes from those of a pair, as
    `_with_patterns` gives them: before and after it on these axes, and of all axes before.
    """
    half = len(pattern) // 2
    places = [
        (axes, [code if code < 0 else code // UNIT - 1 for code in (have, want, *before)])
        for axes, have, want, before in moves(pattern[:half], pattern[half:])
    ]
    return tuple((axes, itemgetter(*own)) for axes, own in places)


@lru_cache(maxsize=256)
def _with_units(layouts: Layouts) -> np.ndarray:
    """bool[layouts]: whether a split is in units, of which an axis may not divide the number although it divides the
    extent, in shares or in sections. From these to another split of the dim a value goes by way of the whole.
    """
    has_units = (
        any(one.is_split and (one.unit > 1 or bool(one.shares or one.sections)) for one in layout) for layout in layouts
    )
    return np.array([*has_units], dtype=bool)


@lru_cache(maxsize=2**12)
def _where_uneven(shape: tuple[int, ...], layouts: Layouts, mesh_shape: tuple[int, ...]) -> np.ndarray:
    """bool[layouts]: whether parts differ."""
    return np.array([not is_even(shape, layout, mesh_shape) for layout in layouts], dtype=bool)


@lru_cache(maxsize=2**16)
def _collectives(move: Move, value: Value, mesh_shape: tuple[int, ...]) -> tuple[tuple[CollectiveKind, int], ...]:
    """The collectives of a step of a conversion, each with its bytes."""
    found = collectives_of_value(step_of(move), value, mesh_shape)
    return tuple((CollectiveKind(c.kind, c.axes, 1, c.phase), c.num_bytes) for c in found)
