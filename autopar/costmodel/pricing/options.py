"""The layouts that a list of options can give one value, found without looking at each option by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.sbp.placement import Layout, format_layout
from autopar.sbp.signature import Strategy


@dataclass(frozen=True, slots=True)
class Stored:
    """An option of an input. is_regathered: converted again for the backward of its reader
    (`Assignment.regathered`).
    """

    layout: Layout
    is_regathered: bool = False

    def __str__(self) -> str:
        return format_layout(self.layout) + (" regathered" if self.is_regathered else "")


Options = tuple[Strategy, ...] | tuple[Stored, ...] | tuple[Layout, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Offered:
    """layouts: in the order of the first option that gives each. index: i64[options], which of them an option gives.
    again: for each, whether what gives it is regathered (of `Stored`) or would have it so (of ops: those run without a
    role); a layout that is given with and without occurs twice.

    Equal ones are one object, so that what is computed from them is found again by identity.
    """

    layouts: tuple[Layout, ...]
    index: np.ndarray
    again: tuple[bool, ...]


def offered(options: Options, port: str, slot: int) -> Offered:
    """What `options` give the value at an entity's `port` and `slot` (`entities.End`)."""
    if port == "layout":
        return _known(options, np.arange(len(options)).tobytes(), (False,) * len(options))
    if port == "stored":
        layouts, again = zip(*((option.layout, option.is_regathered) for option in options))
        return _known(layouts, np.arange(len(options)).tobytes(), again)
    numbers, signatures = _numbers(options)
    codes: dict = {}
    code = [codes.setdefault((s.inputs if port == "in" else s.outputs)[slot], len(codes)) for s in signatures]
    packed = np.array(code, dtype=np.int64)[numbers] @ len(codes) ** np.arange(numbers.shape[1])
    again = np.array([port == "in" and not s.role for s in signatures])[numbers].all(axis=1)
    first, index = distinct(2 * packed + again)
    layouts = (options[k].input_layout(slot) if port == "in" else options[k].output_layout(slot) for k in first)
    return _known(tuple(layouts), index.tobytes(), tuple(again[first].tolist()))


@lru_cache(maxsize=4096)
def _known(layouts: tuple[Layout, ...], index: bytes, again: tuple[bool, ...]) -> Offered:
    return Offered(layouts, np.frombuffer(index, dtype=np.int64), again)


def _numbers(strategies: Sequence[Strategy]) -> tuple[np.ndarray, list]:
    """i64[strategies, axes] positions in a list of signatures; equal ones that are several objects occur there several
    times.
    """
    found = {id(signature): signature for strategy in strategies for signature in strategy.signatures}
    number = {key: position for position, key in enumerate(found)}
    rows = [[number[id(signature)] for signature in strategy.signatures] for strategy in strategies]
    return np.array(rows, dtype=np.int64), list(found.values())


def distinct(keys: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Positions of the first of each of equal `keys` (rows, if two-dimensional), and for each key which of these it
    equals.
    """
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order].tolist(), rank[inverse.reshape(-1)]
