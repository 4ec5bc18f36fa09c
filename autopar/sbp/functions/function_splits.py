"""Splits of custom `torch.autograd.Function`s that are known as ops: they split as these do.

Placements of the inputs give those of all that forward computes, op by op, by the rules of the ops; those of the
results' gradients, duals of the results', give those of all that backward computes. The split is one if each input's
gradient comes out in the dual of the input's placement. The maximum of a split dim is that of the parts' maxima, and a
pending sum that no op takes is added up: these are all-reduces within the function, of the largest magnitude in a
quantised product among others.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.ir.functions.function_body import FunctionBody, body_of
from autopar.ir.functions.function_passes import MAX, MIN, SUM
from autopar.ir.graph import Op, Value
from autopar.sbp.placement import I, P, Placement, R, S
from autopar.sbp.rules import signatures_within
from autopar.sbp.rules.reduce import reduced_dims
from autopar.sbp.signature import Signature

_EXTREMA = {f"aten.{name}.default": kind for kind in (MAX, MIN) for name in (kind, f"a{kind}")}
_MOST = 512  # ways to place the inputs
_DUAL = {P: I, I: I, R: P}


@dataclass(frozen=True)
class FunctionSplit:
    """A `signature` of a function, that of each op of its body, by name, and the values that are reduced, by how."""

    signature: Signature
    of_ops: Mapping[str, Signature]
    reductions: Mapping[str, str]


@lru_cache(maxsize=1024)
def function_splits(op: Op) -> tuple[FunctionSplit, ...]:
    """The ways to split the custom function `op`, without names; () if it is not known as ops."""
    body = body_of(op)
    if body is None:
        return ()
    found: dict[Signature, FunctionSplit] = {}
    for inputs in itertools.islice(_placed_inputs(op), _MOST):
        for split in _splits(body, inputs):
            found.setdefault(split.signature, split)
    return tuple(found.values())


def split_of(op: Op, signature: Signature) -> FunctionSplit | None:
    """The split of the custom function `op` whose placements `signature` has; None if nothing is split."""
    plain = replace(signature, role="")
    return next((split for split in function_splits(op.nameless) if split.signature == plain), None)


def _placed_inputs(op: Op) -> Iterator[tuple[Placement, ...]]:
    """The ways to place the inputs, with the fewest that are split last."""
    ways = [
        (*(S(dim) for dim, size in enumerate(value.shape) if size > 1), *((P,) if _can_sum(value) else ()), I)
        for value in op.inputs
    ]
    yield from itertools.product(*ways)


def _can_sum(value: Value) -> bool:
    return value.dtype.is_floating_point and value.dtype.itemsize > 1


def _splits(body: FunctionBody, inputs: tuple[Placement, ...]) -> Iterator[FunctionSplit]:
    """The splits with these placements of the inputs; whole results may get whole gradients or terms of them."""
    forward = _placed(body.forward, dict(zip(_names(body.inputs), inputs)))
    if forward is None:
        return
    outputs = tuple(forward.of_values[value.name] for value in body.outputs)
    kinds = [(P, I) if p == I and g is not None else (p,) for p, g in zip(outputs, body.output_gradients)]
    for chosen in itertools.product(*kinds):
        given = {
            gradient.name: P if whole == P and placed == I else _DUAL.get(placed, placed)
            for gradient, placed, whole in zip(body.output_gradients, outputs, chosen)
            if gradient is not None
        }
        backward = _placed(body.backward, forward.of_values | given)
        placed = None if backward is None else _with_gradients(body, inputs, backward)
        if backward is None or placed is None:
            continue
        reductions = forward.reductions | backward.reductions
        if SUM in reductions.values() and P in (*inputs, *chosen) and P not in outputs:
            continue  # a sum that is handed in is added up before
        results = tuple(R if p == I and whole == P else p for p, whole in zip(outputs, chosen))
        if any(p != I for p in placed):
            signature = Signature(placed, results)
            yield FunctionSplit(signature, forward.of_ops | backward.of_ops, reductions)


def _with_gradients(
    body: FunctionBody, inputs: tuple[Placement, ...], backward: "_PlacedOps"
) -> tuple[Placement, ...] | None:
    """The placements of the inputs with R where the gradient is a pending sum; None if a gradient is no dual."""
    placed = []
    for placement, gradient in zip(inputs, body.input_gradients):
        found = None if gradient is None else backward.of_values[gradient.name]
        if placement == I and found == P:
            placement = R
        elif found is not None and found != _DUAL.get(placement, placement):
            return None
        placed.append(placement)
    return tuple(placed)


@dataclass(frozen=True)
class _PlacedOps:
    of_values: dict[str, Placement]
    of_ops: dict[str, Signature]
    reductions: dict[str, str]


def _placed(ops: tuple[Op, ...], given: Mapping[str, Placement]) -> _PlacedOps | None:
    """The placements that follow from those `given`; None if an op takes none such."""
    summed: set[str] = set()
    while True:
        found = _PlacedOps(dict(given), {}, {})
        for op in ops:
            inputs = tuple(found.of_values[value.name] for value in op.inputs)
            fitting = _fitting(op, inputs)
            if fitting is None:
                pending = {v.name for v, p in zip(op.inputs, inputs) if p == P} - set(given)
                if not pending:
                    return None
                summed |= pending
                break
            signature, kind = fitting
            found.of_ops[op.name] = signature
            for value, placement in zip(op.outputs, signature.outputs):
                is_summed = placement == P and value.name in summed
                found.of_values[value.name] = I if is_summed else placement
                if kind or is_summed:
                    found.reductions[value.name] = kind or SUM
        else:
            return found


def _fitting(op: Op, inputs: tuple[Placement, ...]) -> tuple[Signature, str] | None:
    """The signature of `op` with these placements of its inputs, and how its result is to be reduced."""
    for signature in signatures_within(op):
        if not signature.role and signature.inputs == inputs:
            return signature, ""
    if op.target in _EXTREMA and inputs[0].is_split and inputs[0].dim in reduced_dims(op):
        return Signature(inputs, (I,)), _EXTREMA[op.target]
    return None


def _names(values: tuple[Value, ...]) -> list[str]:
    return [value.name for value in values]
