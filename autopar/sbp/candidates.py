"""The candidates: the valid strategies of each op on a mesh, and the possible layouts of each input and output."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from operator import ne

from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph, Input, Op, Value
from autopar.ir.op_facts import ATTENTION, FLEX_ATTENTION, family
from autopar.mesh import Mesh
from autopar.sbp.analysis.flat_losses import BY_SAMPLE_AND_TOKEN, own_order_signatures
from autopar.sbp.op_signatures import SplitDim, extents_of, signatures_of
from autopar.sbp.placement import I, Layout, S, is_convertible, is_even
from autopar.sbp.rules import rule_of
from autopar.sbp.signature import EXCHANGES, KEY_HEADS, QUERIES, RING, Candidates, Signature, Strategy

Signatures = tuple[Signature, ...]


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
    routed = own_order_signatures(graph)
    is_stage = graph.argument_spec is None  # the gradient of a received value is sent back in the value's layout
    return Candidates(
        strategies={op.name: _strategies(op, mesh.shape, near, num_changed, routed.get(op.name, ())) for op in ops},
        layouts={item.value.name: _input_layouts(item, mesh.shape, is_stage) for item in graph.inputs},
        outputs={value.name: even_layouts(value.shape, mesh.shape) for value in outputs},
        without_rule=tuple(op.name for op in ops if rule_of(op) is None),
        not_divided=tuple(_not_divided(graph, ops, mesh.shape)),
    )


def _strategies(
    op: Op, mesh_shape: tuple[int, ...], near: Mapping[str, Strategy] | None, num_changed: int, routed: Signatures
) -> tuple[Strategy, ...]:
    if near is None:
        return strategies_of(op.nameless, mesh_shape, routed)
    return neighbours_of(op.nameless, mesh_shape, near[op.name], num_changed, routed) if op.name in near else ()


@lru_cache(maxsize=4096)
def strategies_of(op: Op, mesh_shape: tuple[int, ...], routed: Signatures = ()) -> tuple[Strategy, ...]:
    """All strategies of `op`, one signature for each axis, in which everything divides evenly; all I comes first.

    On axes of size 1 it is the only one. `routed`: the further signatures of an op that routes tokens.
    """
    return tuple(_even(op, itertools.product(*(_on_axis(op, size, routed) for size in mesh_shape)), mesh_shape))


@lru_cache(maxsize=4096)
def neighbours_of(
    op: Op, mesh_shape: tuple[int, ...], near: Strategy, num_changed: int, routed: Signatures = ()
) -> tuple[Strategy, ...]:
    """The strategies of `op` that differ from `near` on at most `num_changed` axes; () if `near` is invalid."""
    known = set(near.signatures)
    per_axis = [_on_axis(op, size, routed, None if num_changed else known) for size in mesh_shape]
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
def nearest_strategy(
    op: Op, mesh_shape: tuple[int, ...], layouts: tuple[Layout, ...], routed: Signatures = ()
) -> Strategy:
    """The strategy of `op` that reads most of its inputs in these `layouts`, chosen one axis after the other; the first
    of several. All inputs can be converted to how it reads them.
    """
    chosen: list[Signature] = []
    rest = [signatures_of(op)[0]] * len(mesh_shape)  # all I, which divides on any axis
    for axis, size in enumerate(mesh_shape):

        def differing(signature: Signature, axis: int = axis) -> tuple[bool, int]:
            given = tuple(layout[axis] for layout in layouts)
            return not is_convertible(given, signature.inputs), sum(map(ne, signature.inputs, given))

        nearest = sorted(_on_axis(op, size, routed), key=differing)
        several = ((*chosen, signature, *rest[axis + 1 :]) for signature in nearest)
        chosen.append(next(_even(op, several, mesh_shape)).signatures[axis])
    return Strategy(tuple(chosen))


def _even(op: Op, combinations: Iterable[tuple[Signature, ...]], mesh_shape: tuple[int, ...]) -> Iterator[Strategy]:
    """The `combinations` of one signature for each axis in which everything divides evenly, and no value is split along
    one dim in each rank's own order and in that of all: own orders have no parts of a global order between them.
    """
    known: dict[Signature, dict[SplitDim, int]] = {}
    alone = _ALONE.get(family(op.target), ())
    own: set[Signature] = set()  # those with tokens of each rank's own
    for combination in combinations:
        num_parts: dict[SplitDim, int] = {}
        extents = {}
        for sig, size in zip(combination, mesh_shape):
            split = known.get(sig)
            if split is None:
                split = known[sig] = extents_of(op, sig)
                own |= {sig} if any(placement.is_own for placement in sig.inputs + sig.outputs) else set()
            extents |= split
            for part in split:
                num_parts[part] = num_parts.get(part, 1) * size
        is_even = all(extents[part] % count == 0 for part, count in num_parts.items())
        is_mixed = own and (_mixes_orders(op, combination) or _mixes_exchanges(combination))
        if is_even and not is_mixed and not (alone and _is_split_again(alone, combination)):
            yield Strategy(combination)


def _mixes_orders(op: Op, combination: tuple[Signature, ...]) -> bool:
    """Whether some value is S(dim) on one axis and L(dim) or E(dim) on another, where the order of its rows matters."""
    if op.target in BY_SAMPLE_AND_TOKEN:
        return False
    for layout in zip(*((*one.inputs, *one.outputs) for one in combination)):
        own, all_tokens = ({p.dim for p in layout if p.is_split and p.is_own == is_own} for is_own in (True, False))
        if own & all_tokens:
            return True
    return False


def _mixes_exchanges(combination: tuple[Signature, ...]) -> bool:
    """Whether rows are exchanged by expert on one axis while another axis takes another role."""
    roles = {signature.role for signature in combination} - {""}
    return len(roles) > 1 and bool(roles & EXCHANGES)


# Roles in which attention splits queries, or their heads, along one axis: it does not know its place among several.
_ALONE = {ATTENTION: (QUERIES, RING, KEY_HEADS), FLEX_ATTENTION: (RING, KEY_HEADS)}


def _is_split_again(alone: Collection[str], combination: tuple[Signature, ...]) -> bool:
    """Whether another axis splits the dim of the queries that one splits in a role of `alone`, or heads that are read
    by some ranks only, so that their number may differ, would go around a ring.
    """
    split = [one.inputs[0] for one in combination]
    roles = {one.role for one in combination}
    return roles >= {RING, KEY_HEADS} or any(
        one.role in alone and split.count(one.inputs[0]) > 1 for one in combination
    )


def _on_axis(op: Op, size: int, routed: Signatures, known: Collection[Signature] | None = None) -> list[Signature]:
    """The signatures of `op` that divide evenly over one axis of `size`; of the `known` ones only, if there are any."""
    signatures = (*signatures_of(op), *routed)[: 1 if size == 1 else None]
    signatures = signatures if known is None else tuple(sig for sig in signatures if sig in known)
    return [sig for sig in signatures if not any(_is_uneven(extent, size) for extent in extents_of(op, sig).values())]


def _is_uneven(extent: int, size: int) -> bool:
    return extent == 0 or extent % size != 0


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
        next((dim for (_, dim), extent in extents_of(op, sig).items() if _is_uneven(extent, size)), -1)
        for sig in signatures_of(op)
    )
    return tuple(dict.fromkeys(dim for dim in parts if dim >= 0))
