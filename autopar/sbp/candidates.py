"""The candidates: the valid strategies of each op on a mesh, and the possible layouts of each input and output."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph, Input, Op, Value
from autopar.mesh import Mesh
from autopar.sbp.placement import I, Layout, P, R, S, is_even
from autopar.sbp.rules import may_sum_gradients, rule_of
from autopar.sbp.rules.matmul import ROW_BYTES
from autopar.sbp.signature import Candidates, Signature, Strategy

SplitDim = tuple[str, int]  # a tensor of the op ("input0") and its dim; or a role and -1 for its indivisible units


def annotate(
    graph: Graph,
    mesh: Mesh,
    folded: Folded | None = None,
    *,
    near: Mapping[str, Strategy] | None = None,
    num_changed: int = 0,
) -> Candidates:
    """The candidates of `graph` on `mesh`; with `folded`, strategies of the representative ops only, layouts of all
    inputs.

    `near`: op name -> strategy. If given, only strategies that differ from it on at most `num_changed` axes are listed,
    a neighbourhood in a space too large to list; an op that it lacks gets none.
    """
    ops = [op for op in graph.ops if folded is None or folded.representative[op.name] == op.name]
    outputs = [value for value in graph.outputs if isinstance(value, Value)]
    is_stage = graph.argument_spec is None  # the gradient of a received value is sent back in the value's layout
    return Candidates(
        strategies={op.name: _strategies(op, mesh.shape, near, num_changed) for op in ops},
        layouts={item.value.name: _input_layouts(item, mesh.shape, is_stage) for item in graph.inputs},
        outputs={value.name: even_layouts(value.shape, mesh.shape) for value in outputs},
        without_rule=tuple(op.name for op in ops if rule_of(op) is None),
        not_divided=tuple(_not_divided(graph, ops, mesh.shape)),
    )


def _strategies(
    op: Op, mesh_shape: tuple[int, ...], near: Mapping[str, Strategy] | None, num_changed: int
) -> tuple[Strategy, ...]:
    if near is None:
        return strategies_of(op.nameless, mesh_shape)
    return neighbours_of(op.nameless, mesh_shape, near[op.name], num_changed) if op.name in near else ()


def signatures_of_call(op: Op) -> tuple[Signature, ...]:
    """`signatures_of(op)`, computed once for equal calls."""
    return signatures_of(op.nameless)


@lru_cache(maxsize=4096)
def signatures_of(op: Op) -> tuple[Signature, ...]:
    """The distinct signatures of `op` on one mesh axis: all I, all R (where gradients may be pending sums), then those
    of its rule that split no dim of size 1.
    """
    kinds = (I, R) if may_sum_gradients(op) else (I,)
    whole = [Signature((kind,) * len(op.inputs), (kind,) * len(op.outputs)) for kind in kinds]
    rule = rule_of(op)
    signatures = (_without_gradient(op, signature) for signature in (*whole, *(rule(op) if rule else ())))
    return tuple(
        dict.fromkeys(
            signature
            for signature in signatures
            if _can_sum(op, signature) and 1 not in _extents(op, signature).values()
        )
    )


def _without_gradient(op: Op, signature: Signature) -> Signature:
    """`signature` with I for R on values without gradient, and on all inputs if no output has a gradient."""
    assert len(signature.inputs) == len(op.inputs) and len(signature.outputs) == len(op.outputs), (
        f"{op.target}: {signature} does not fit"
    )
    flows = any(value.needs_grad for value in op.outputs)
    inputs = (p if p != R or (flows and value.needs_grad) else I for p, value in zip(signature.inputs, op.inputs))
    outputs = (p if p != R or value.needs_grad else I for p, value in zip(signature.outputs, op.outputs))
    return replace(signature, inputs=tuple(inputs), outputs=tuple(outputs))


def _can_sum(op: Op, signature: Signature) -> bool:
    """Whether all pending values of `signature` can be summed: booleans cannot."""
    placed = zip(signature.inputs + signature.outputs, op.inputs + op.outputs)
    return not any(placement == P and value.dtype == torch.bool for placement, value in placed)


@lru_cache(maxsize=4096)
def strategies_of(op: Op, mesh_shape: tuple[int, ...]) -> tuple[Strategy, ...]:
    """All strategies of `op`, one signature for each axis, in which everything divides evenly; all I comes first.

    On axes of size 1 it is the only one.
    """
    return tuple(_even(op, itertools.product(*(_on_axis(op, size) for size in mesh_shape)), mesh_shape))


@lru_cache(maxsize=4096)
def neighbours_of(op: Op, mesh_shape: tuple[int, ...], near: Strategy, num_changed: int) -> tuple[Strategy, ...]:
    """The strategies of `op` that differ from `near` on at most `num_changed` axes; () if `near` is invalid."""
    known = set(near.signatures)
    per_axis = [_on_axis(op, size, None if num_changed else known) for size in mesh_shape]
    if len(near.signatures) != len(per_axis) or not all(
        sig in on_axis for sig, on_axis in zip(near.signatures, per_axis)
    ):
        return ()
    # `near` may have been read from text, which lacks `num_units`.
    near = Strategy(tuple(on_axis[on_axis.index(sig)] for sig, on_axis in zip(near.signatures, per_axis)))
    changes = itertools.combinations(range(len(mesh_shape)), num_changed)
    offered = ([per_axis[a] if a in axes else [near.signatures[a]] for a in range(len(mesh_shape))] for axes in changes)
    combinations = dict.fromkeys(changed for choices in offered for changed in itertools.product(*choices))
    return tuple(_even(op, combinations, mesh_shape))


@lru_cache(maxsize=4096)
def nearest_strategy(op: Op, mesh_shape: tuple[int, ...], layouts: tuple[Layout, ...]) -> Strategy:
    """The strategy of `op` that reads most of its inputs in these `layouts`, chosen one axis after the other; the first
    of several.
    """
    chosen: list[Signature] = []
    rest = [signatures_of(op)[0]] * len(mesh_shape)  # all I, which divides on any axis
    for axis, size in enumerate(mesh_shape):

        def differing(signature: Signature, axis: int = axis) -> int:
            return sum(placement != layout[axis] for placement, layout in zip(signature.inputs, layouts))

        nearest = sorted(_on_axis(op, size), key=differing)
        several = ((*chosen, signature, *rest[axis + 1 :]) for signature in nearest)
        chosen.append(next(_even(op, several, mesh_shape)).signatures[axis])
    return Strategy(tuple(chosen))


def _even(op: Op, combinations: Iterable[tuple[Signature, ...]], mesh_shape: tuple[int, ...]) -> Iterator[Strategy]:
    """The `combinations` of one signature for each axis in which everything divides evenly."""
    extents_of: dict[Signature, dict[SplitDim, int]] = {}
    for combination in combinations:
        num_parts: dict[SplitDim, int] = {}
        extents = {}
        for sig, size in zip(combination, mesh_shape):
            split = extents_of.get(sig)
            if split is None:
                split = extents_of[sig] = _extents(op, sig)
            extents |= split
            for part in split:
                num_parts[part] = num_parts.get(part, 1) * size
        if all(extents[part] % count == 0 for part, count in num_parts.items()):
            yield Strategy(combination)


def _on_axis(op: Op, size: int, known: Collection[Signature] | None = None) -> list[Signature]:
    """The signatures of `op` that divide evenly over one axis of `size`; of the `known` ones only, if there are any."""
    signatures = signatures_of(op)[: 1 if size == 1 else None]
    signatures = signatures if known is None else tuple(sig for sig in signatures if sig in known)
    return [sig for sig in signatures if not any(_is_uneven(extent, size) for extent in _extents(op, sig).values())]


def _is_uneven(extent: int, size: int) -> bool:
    return extent == 0 or extent % size != 0


def _extents(op: Op, signature: Signature) -> dict[SplitDim, int]:
    """The size of every dim and unit that the signature splits, outputs first."""
    tensors = (("output", op.outputs, signature.outputs), ("input", op.inputs, signature.inputs))
    parts: dict[SplitDim, int] = {
        (f"{side}{index}", placement.dim): _num_units(op, values[index], placement.dim)
        for side, values, placements in tensors
        for index, placement in enumerate(placements)
        if placement.is_split
    }
    return parts | {(signature.role, -1): signature.num_units} if signature.num_units else parts


def _num_units(op: Op, value: Value, dim: int) -> int:
    """The number of parts that a dim can be cut into; 0 if it is no multiple of the unit that the op's kernel needs."""
    size, unit_bytes = value.shape[dim], ROW_BYTES.get(op.target, 0)
    unit = max(1, unit_bytes // value.dtype.itemsize) if dim and dim >= len(value.shape) - 2 else 1
    return size // unit if size % unit == 0 else 0


@lru_cache(maxsize=4096)
def even_layouts(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[Layout, ...]:
    """All even layouts of I and S(d) for a tensor of global `shape`, all I first."""
    placements = (I, *(S(dim) for dim, size in enumerate(shape) if size > 1))
    choices = [placements if size > 1 else (I,) for size in mesh_shape]
    return tuple(layout for layout in itertools.product(*choices) if is_even(shape, layout, mesh_shape))


def _input_layouts(item: Input, mesh_shape: tuple[int, ...], is_stage: bool) -> tuple[Layout, ...]:
    """The layouts that an input may be stored in.

    A constant is computed whole and the gradient of a caller's argument must be whole, so that these are stored whole;
    a slice of a whole value costs nothing. The search takes the first of layouts of equal cost: for an argument the one
    that splits its first dim the most, so that a data loader can give each rank its part.
    """
    is_whole = item.kind == "constant" or (item.kind == "argument" and item.value.needs_grad and not is_stage)
    layouts = ((I,) * len(mesh_shape),) if is_whole else even_layouts(item.value.shape, mesh_shape)
    return tuple(sorted(layouts, key=lambda layout: -layout.count(S(0)))) if item.kind == "argument" else layouts


def _not_divided(graph: Graph, ops: Iterable[Op], mesh_shape: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    for axis, size in enumerate(mesh_shape):
        for item in graph.of_kind("parameter"):
            extents = {dim: extent for dim, extent in enumerate(item.value.shape) if extent > 1}
            if all(extent % size for extent in extents.values()):  # otherwise it can be stored split
                yield from ((item.value.name, dim, axis) for dim in extents)
        for op in ops:
            yield from ((op.name, dim, axis) for dim in _undivided_dims(op.nameless, size))


@lru_cache(maxsize=4096)
def _undivided_dims(op: Op, size: int) -> tuple[int, ...]:
    """The dims, of the output or of an input if only that is split,
    whose signatures do not divide over `size` ranks.
    """
    parts = (
        next((dim for (_, dim), extent in _extents(op, sig).items() if _is_uneven(extent, size)), -1)
        for sig in signatures_of(op)
    )
    return tuple(dict.fromkeys(dim for dim in parts if dim >= 0))
