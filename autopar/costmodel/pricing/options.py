"""`Offered`: the layouts of one value under a list of options, computed without a loop over the options."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from autopar.sbp.placement import KeyTuple, Layout, format_layout
from autopar.sbp.signature import Strategy


@dataclass(frozen=True, slots=True)
class Stored:
    """An option of an input. is_regathered: converted again for the
    backward of its reader (`Assignment.regathered`).
    """

    layout: Layout
    is_regathered: bool = False

    def __str__(self) -> str:
        return format_layout(self.layout) + (" regathered" if self.is_regathered else "")


Options = tuple[Strategy, ...] | tuple[Stored, ...] | tuple[Layout, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Offered:
    """The distinct layouts of a value under a list of options.

    `layouts`: in the order of the first option with each. `index`: i64[options], position in `layouts` of each option's
    layout. `again`: for each layout, whether its `Stored` option is regathered or, for an op, whether it can read a
    regathered value (`Signature.saves_as_op`). A layout that occurs with both is listed twice.

    Equal values are one object, so that results can be cached by identity.
    """

    layouts: tuple[Layout, ...]
    index: np.ndarray
    again: tuple[bool, ...]


@lru_cache(maxsize=4096)
def offered(options: tuple[Any, ...], port: str, slot: int) -> Offered:
    """The layouts of the value at `port` and `slot` of an entity (`flows.End`) under its `options`: `Layout`s at port
    "layout", `Stored` at "stored", else strategies.
    """
    if port == "layout":
        return _known(tuple(options), np.arange(len(options)).tobytes(), (False,) * len(options))
    if port == "stored":
        layouts = tuple(option.layout for option in options)
        return _known(layouts, np.arange(len(options)).tobytes(), tuple(option.is_regathered for option in options))
    numbers, signatures = _numbers(options)
    codes: dict = {}
    code = [codes.setdefault((s.inputs if port == "in" else s.outputs)[slot], len(codes)) for s in signatures]
    packed = np.array(code, dtype=np.int64)[numbers] @ len(codes) ** np.arange(numbers.shape[1])
    again = np.asarray(np.array([port == "in" and s.saves_as_op for s in signatures])[numbers].all(axis=1))
    first, index = distinct(2 * packed + again)
    layouts = tuple(options[k].input_layout(slot) if port == "in" else options[k].output_layout(slot) for k in first)
    return _known(layouts, index.tobytes(), tuple(again[first].tolist()))


@lru_cache(maxsize=4096)
def _known(layouts: tuple[Layout, ...], index: bytes, again: tuple[bool, ...]) -> Offered:
    return Offered(KeyTuple(layouts), np.frombuffer(index, dtype=np.int64), again)


def _numbers(strategies: Sequence[Strategy]) -> tuple[np.ndarray, list]:
    """(i64[strategies, axes] positions in a list of signatures, the list).

    Equal signatures that are different objects are listed separately.
    """
    distinct = {id(signature): signature for strategy in strategies for signature in strategy.signatures}
    number = {key: position for position, key in enumerate(distinct)}
    rows = [[number[id(signature)] for signature in strategy.signatures] for strategy in strategies]
    return np.array(rows, dtype=np.int64), list(distinct.values())


def distinct(keys: np.ndarray) -> tuple[list[int], np.ndarray]:
    """(positions of the first of equal `keys`, for each key the number of that first); keys are rows if 2-d."""
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order].tolist(), rank[inverse.reshape(-1)]
