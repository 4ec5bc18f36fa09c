"""The fold of a graph: its repeated blocks (layers), recognised by structure alone, never by names.

A block of ops repeats if consecutive copies call the same ops on the same shapes (some scalars may differ, see
`_SCALED`), and each input of copy k is one of: a value of copy k at the same position in every copy; a value of copy
k-1 at the same position (for copy 0: one value from before the region in its place); one value that all copies read; or
an input of the graph that only copy k reads.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.call_args import map_leaves
from autopar.ir.folding.match_blocks import Wiring, match_blocks, wire
from autopar.ir.folding.periods import PeriodicRun, find_runs
from autopar.ir.graph import Graph, Op

# A block with fewer products could not alternate column and row split, as the plan of two equal linear layers must.
_MIN_PRODUCTS = 2


# Ops whose scalars may differ between the copies of a block (1 / sqrt(layer), a dropout rate): neither the valid
# strategies nor the cost depend on the scalar, only on whether it is zero. Each copy runs with its own scalar.
_PRODUCTS = frozenset(("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"))
_SCALED = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor",
        "sub.Tensor",
        "dropout.default",
        "feature_dropout.default",
        "bernoulli.p",
        "layer_norm.default",
        "rms_norm.default",
        "scaled_dot_product_attention.default",
        "group_norm.default",
        "batch_norm.default",
        "_native_batch_norm_legit_functional.default",
    )
)


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` consecutive copies of a block; `ops` are the names of the first copy's ops."""

    ops: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Folded:
    """The classes of repeated ops and inputs of a graph, and the repeats that they come from.

    `representative`: name of each op and each input value -> name of the member of its class in the first copy; itself
    if it does not repeat.
    """

    representative: Mapping[str, str]
    repeats: tuple[Repeat, ...]


@dataclass(frozen=True, slots=True)
class _RepeatedOps:
    """A repeat by positions: `count` copies of `block` ops from op `first` on, with the classes of ops and inputs."""

    first: int
    block: int
    count: int
    classes: Mapping[str, str]

    @property
    def num_folded(self) -> int:
        return self.block * (self.count - 1)


def fold(graph: Graph, labels: Mapping[str, str] | None = None) -> Folded:
    """The fold of `graph`: the repeat that saves most ops first, then those of the ops before and behind it.

    `labels`: name of an input value -> text; ops that read differently labelled inputs are not of one class.
    """
    return _folded(graph, labels) if labels else graph.once(_unlabelled)


def _unlabelled(graph: Graph) -> Folded:
    return _folded(graph, {})


def _folded(graph: Graph, labels: Mapping[str, str]) -> Folded:
    names = [op.name for op in graph.ops] + [item.value.name for item in graph.inputs]
    representative = {name: name for name in names}
    repeats: dict[int, Repeat] = {}
    wiring = graph.once(wire)
    signatures = _signatures(graph, labels)
    pending = [(0, len(graph.ops))]
    while pending:
        start, stop = pending.pop()
        region = _best_region(graph, wiring, signatures, start, stop, representative)
        if region is None:
            continue
        representative.update(region.classes)
        first, end = region.first, region.first + region.block * region.count
        repeats[first] = Repeat(tuple(op.name for op in graph.ops[first : first + region.block]), region.count)
        pending += [(start, first), (end, stop)]
    return Folded(representative, tuple(repeats[first] for first in sorted(repeats)))


def value_classes(graph: Graph, folded: Folded) -> dict[str, str]:
    """Name of every op output and input value -> name of the value that represents its class."""
    known = vars(folded).get("_value_classes")
    if known is None or known[0] is not graph:
        known = vars(folded)["_value_classes"] = graph, _value_classes(graph, folded.representative)
    return known[1]


def _value_classes(graph: Graph, same: Mapping[str, str]) -> dict[str, str]:
    classes = {item.value.name: same[item.value.name] for item in graph.inputs}
    made = {op.name: op.outputs for op in graph.ops if same[op.name] == op.name}
    for op in graph.ops:
        for value, alike in zip(op.outputs, made[same[op.name]]):
            classes[value.name] = alike.name
    return classes


def _signatures(graph: Graph, labels: Mapping[str, str]) -> np.ndarray:
    """i64[ops]: a number for each op, equal for ops that differ only in the producers of their inputs."""
    known: dict[Any, int] = {}
    arguments: dict[Any, str] = {}  # of calls with the same objects, as copies of a block mostly are
    for op in graph.ops:
        key = op.target, id(op.args), id(op.kwargs)
        if key not in arguments:
            arguments[key] = _arguments(op)
    signatures = (_signature(op, arguments[op.target, id(op.args), id(op.kwargs)], labels) for op in graph.ops)
    return np.array([known.setdefault(one, len(known)) for one in signatures], dtype=np.int64)


def _arguments(op: Op) -> str:
    """A text of what the op is called with but for tensors: it tells 1, 1.0 and True apart, which hashing does not."""
    return repr(map_leaves((op.args, op.kwargs), lambda leaf: _kind_of(op.target, leaf)))


def _signature(op: Op, arguments: str, labels: Mapping[str, str]) -> Any:
    values = tuple(
        [(value.shape, value.dtype, value.needs_grad, labels.get(value.name)) for value in (*op.inputs, *op.outputs)]
    )
    return (op.target, arguments, op.is_no_grad, op.is_tuple, len(op.inputs), values)


def _kind_of(target: str, leaf: Any) -> Any:
    """The argument itself; of a scalar that may differ between copies (see `_SCALED`) its type and sign."""
    is_scaled = (type(leaf) is float and target in _SCALED) or (type(leaf) in (int, float) and target in _PRODUCTS)
    return leaf if not is_scaled or leaf == 0 or not math.isfinite(leaf) else (type(leaf).__name__, leaf > 0)


def _best_region(
    graph: Graph, wiring: Wiring, signatures: np.ndarray, start: int, stop: int, representative: Mapping[str, str]
) -> _RepeatedOps | None:
    """The repeat within [start, stop) that saves the most ops, None if there is none."""
    best: _RepeatedOps | None = None
    for run in find_runs(signatures[start:stop]):
        if best is not None and best.num_folded >= run.stop - run.start - run.period:
            continue
        region = _fit(graph, wiring, PeriodicRun(run.start + start, run.stop + start, run.period), representative)
        if region is not None and (best is None or region.num_folded > best.num_folded):
            best = region
    return best


def _fit(graph: Graph, wiring: Wiring, run: PeriodicRun, representative: Mapping[str, str]) -> _RepeatedOps | None:
    products = sum(wiring.is_product[run.start : run.start + run.period])
    block = run.period if products >= _MIN_PRODUCTS else run.period * _MIN_PRODUCTS
    best: _RepeatedOps | None = None
    for start, copies in _phases(wiring, run, block):
        match = match_blocks(graph, wiring, start, block, copies)
        if match is None:
            continue
        first, count, classes = match
        is_better = best is None or count > best.count
        if is_better and all(representative[name] in (name, same) for name, same in classes.items()):
            best = _RepeatedOps(first, block, count, classes)
        if best is not None and best.count == copies:
            return best
    return best


def _phases(wiring: Wiring, run: PeriodicRun, block: int) -> Iterator[tuple[int, int]]:
    """(first op, copies) for where a block may begin: most copies first, then fewest values alive from copy to copy."""
    length = run.stop - run.start
    starts = range(run.start, run.start + min(block, length - 2 * block + 1))
    for first in sorted(
        starts, key=lambda first: (-((run.stop - first) // block), wiring.num_alive[first + block], first)
    )[:8]:
        yield first, (run.stop - first) // block
