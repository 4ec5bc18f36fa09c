"""The candidates: the valid strategies of each op on a mesh, and the possible layouts of each input and output."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import ne

from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph, Input, Op, Value
from autopar.ir.inference.carried import carried_values
from autopar.ir.op_facts import ATTENTION, FLEX_ATTENTION, family
from autopar.mesh import Mesh
from autopar.sbp.analysis.extra_signatures import extra_signatures
from autopar.sbp.analysis.flat_losses import BY_SAMPLE_AND_TOKEN
from autopar.sbp.functions.function_signatures import function_signatures
from autopar.sbp.op_signatures import SplitDim, discovery_of, extents_of, signatures_of
from autopar.sbp.placement import I, KeyTuple, Layout, Placement, S, is_convertible, is_even, num_parts
from autopar.sbp.rules import rule_of
from autopar.sbp.rules.given import per_rules
from autopar.sbp.signature import EXCHANGES, KEY_HEADS, QUERIES, RING, Candidates, Signature, Strategy
from autopar.sbp.uneven.uneven_extents import SharedRows, Uneven, shared_extents, uneven_extents
from autopar.sbp.uneven.uneven_signatures import are_valid_parts, has_units, uneven_signatures

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
    ops = _representatives(graph, folded)
    uneven, shared = uneven_extents(graph, ops, mesh.shape), shared_extents(graph, ops, mesh)
    kept = graph.once(carried_values)
    has_extra = near is None or num_changed or any(map(_is_extra, near.values()))
    routed = extra_signatures(graph) if has_extra else {}
    is_stage = graph.argument_spec is None  # the gradient of a received value is sent back in the value's layout
    unknown = {op.name: discovery_of(op) for op in ops if rule_of(op) is None and not function_signatures(op)}
    return Candidates(
        strategies={
            op.name: _strategies(op, mesh.shape, near, num_changed, Extra.of(op, routed, uneven, shared)) for op in ops
        },
        layouts={
            item.value.name: _carried_layouts(item, kept[item.value.name], mesh.shape)
            if item.value.name in kept
            else _input_layouts(item, mesh.shape, is_stage, uneven, shared)
            for item in graph.inputs
        },
        outputs={
            value.name: _output_layouts(value.shape, mesh.shape, () if is_stage else uneven, shared)
            for value in graph.placed_outputs
        },
        without_rule=tuple(unknown),
        discovered={name: found for name, found in unknown.items() if found is not None},
    )


def _is_extra(strategy: Strategy) -> bool:
    """Whether some signature is none of the op alone: in each rank's own order, or in sections."""
    return any(one.is_own or one.sections for sig in strategy.signatures for one in (*sig.inputs, *sig.outputs))


@dataclass(frozen=True, slots=True)
class Extra:
    """Signatures that an op has in a graph beyond its own: `routed`, those that route tokens and those in sections, and
    those in uneven parts; on the axis of shares an op with dims that are `shared` is split in shares or not at all.
    """

    routed: Signatures = ()
    uneven: Uneven = ()
    shared: SharedRows | None = None

    @classmethod
    def of(cls, op: Op, routed: Mapping[str, Signatures], uneven: Uneven, shared: SharedRows | None = None) -> "Extra":
        """Of a graph with these `uneven` and `shared` extents, those of the op."""
        if not uneven and shared is None:
            return cls(routed.get(op.name, ()))
        own = _extents(op)
        if shared is not None:
            shared = replace(shared, extents=tuple(each for each in shared.extents if each[0] in own))
        return cls(routed.get(op.name, ()), tuple(each for each in uneven if each[0] in own), shared)


def _strategies(
    op: Op, mesh_shape: tuple[int, ...], near: Mapping[str, Strategy] | None, num_changed: int, extra: Extra
) -> tuple[Strategy, ...]:
    if near is None:
        return strategies_of(op.nameless, mesh_shape, extra)
    return neighbours_of(op.nameless, mesh_shape, near[op.name], num_changed, extra) if op.name in near else ()


@per_rules
def strategies_of(op: Op, mesh_shape: tuple[int, ...], extra: Extra = Extra()) -> tuple[Strategy, ...]:
    """All strategies of `op`, one signature for each axis, in which everything divides evenly or may be uneven; all I
    comes first.

    On axes of size 1 it is the only one.
    """
    per_axis = (_on_axis(op, axis, size, extra) for axis, size in enumerate(mesh_shape))
    return KeyTuple(_valid(op, itertools.product(*per_axis), mesh_shape, extra))


@per_rules
def neighbours_of(
    op: Op, mesh_shape: tuple[int, ...], near: Strategy, num_changed: int, extra: Extra = Extra()
) -> tuple[Strategy, ...]:
    """The strategies of `op` that differ from `near` on at most `num_changed` axes; () if `near` is invalid."""
    known = set(near.signatures)
    own = None if num_changed else known
    per_axis = [_on_axis(op, axis, size, extra, own) for axis, size in enumerate(mesh_shape)]
    if len(near.signatures) != len(per_axis) or not all(
        sig in on_axis for sig, on_axis in zip(near.signatures, per_axis)
    ):
        return ()
    # `near` may have been read from text, which lacks `num_units`.
    near = Strategy(tuple(on_axis[on_axis.index(sig)] for sig, on_axis in zip(near.signatures, per_axis)))
    changes = itertools.combinations(range(len(mesh_shape)), num_changed)
    offered = ([per_axis[a] if a in axes else [near.signatures[a]] for a in range(len(mesh_shape))] for axes in changes)
    combinations = dict.fromkeys(changed for choices in offered for changed in itertools.product(*choices))
    return KeyTuple(_valid(op, combinations, mesh_shape, extra))


@per_rules
def nearest_strategy(
    op: Op, mesh_shape: tuple[int, ...], layouts: tuple[Layout, ...], extra: Extra = Extra()
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

        nearest = sorted(_on_axis(op, axis, size, extra), key=differing)
        several = ((*chosen, signature, *rest[axis + 1 :]) for signature in nearest)
        chosen.append(next(_valid(op, several, mesh_shape, extra)).signatures[axis])
    return Strategy(tuple(chosen))


def _valid(
    op: Op, combinations: Iterable[tuple[Signature, ...]], mesh_shape: tuple[int, ...], extra: Extra
) -> Iterator[Strategy]:
    """The `combinations` of one signature for each axis in which everything divides evenly or may be uneven, and no
    value is split along one dim in each rank's own order and in that of all: own orders have no parts of a global order
    between them.
    """
    known: dict[int, tuple[dict[SplitDim, int], bool, bool]] = {}  # by identity: few objects in many combinations
    alone = _ALONE.get(family(op.target), ())
    own: set[Signature] = set()  # those with tokens of each rank's own
    is_uneven = bool(extra.uneven or extra.shared)
    for combination in combinations:
        num_parts: dict[SplitDim, int] = {}
        extents: dict[SplitDim, int] = {}
        in_units = in_sections = False
        for sig, size in zip(combination, mesh_shape):
            facts = known.get(id(sig))
            if facts is None:
                facts = known[id(sig)] = extents_of(op, sig), has_units(sig), _in_sections(sig.inputs)
                own |= {sig} if any(placement.is_own for placement in sig.inputs + sig.outputs) else set()
            split, has_unit, has_section = facts
            in_units, in_sections = in_units or has_unit, in_sections or has_section
            extents |= split
            for part in split:
                num_parts[part] = num_parts.get(part, 1) * size
        is_even = all(extents[part] % count == 0 for part, count in num_parts.items())
        if is_uneven and (in_units or not is_even):
            is_even = are_valid_parts(op, combination, mesh_shape, extra.uneven, extra.shared)
        if in_sections:
            is_even = is_even and _have_sections(op, combination, mesh_shape)
        is_mixed = own and (_mixes_orders(op, combination) or _mixes_exchanges(combination))
        if is_even and not is_mixed and not (alone and _is_split_again(alone, combination)):
            yield Strategy(combination)


def _have_sections(op: Op, combination: tuple[Signature, ...], mesh_shape: tuple[int, ...]) -> bool:
    """Whether the sections of every value divide evenly, and no axis splits their dim otherwise."""
    strategy = Strategy(combination)
    layouts = [
        *((value, strategy.input_layout(index)) for index, value in enumerate(op.inputs)),
        *((value, strategy.output_layout(index)) for index, value in enumerate(op.outputs)),
    ]
    return all(is_even(value.shape, layout, mesh_shape) for value, layout in layouts if _in_sections(layout))


def _in_sections(placements: Iterable[Placement]) -> bool:
    return any(placement.sections for placement in placements)


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


def _on_axis(op: Op, axis: int, size: int, extra: Extra, known: Collection[Signature] | None = None) -> list[Signature]:
    """The signatures of `op` that divide evenly over mesh axis `axis`, of `size`, or may be uneven; of the `known` ones
    only, if there are any.
    """
    signatures = (*signatures_of(op), *extra.routed)[: 1 if size == 1 else None]
    if known is not None and not extra.uneven and extra.shared is None:
        signatures = [sig for sig in signatures if sig in known]
    found = [sig for sig in signatures if not any(_is_uneven(extent, size) for extent in extents_of(op, sig).values())]
    if extra.uneven and size > 1:
        found = list(dict.fromkeys((*found, *uneven_signatures(op, extra.uneven))))
    if (shared := extra.shared) is not None and shared.axis == axis:
        # who gets fewer rows is slower, and would be waited for where another dim is split evenly
        others = [sig for sig in found if not (shared.extents and extents_of(op, sig)) and not _is_own(sig)]
        found = [*others, *uneven_signatures(op, shared.extents, shared.sizes)]
    elif shared is not None and shared.axis < axis and size > 1:
        found = list(dict.fromkeys((*found, *uneven_signatures(op, shared.extents))))
    return found if known is None else [sig for sig in found if sig in known]


def _is_own(signature: Signature) -> bool:
    """Whether ranks have rows in orders of their own, of which each would have as many."""
    return any(placement.is_own for placement in (*signature.inputs, *signature.outputs))


def _is_uneven(extent: int, size: int) -> bool:
    return extent == 0 or extent % size != 0


@lru_cache(maxsize=4096)
def even_layouts(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[Layout, ...]:
    """All even layouts of I and S(d) for a tensor of global `shape`, all I first."""
    placements = (I, *(S(dim) for dim, size in enumerate(shape) if size > 1))
    choices = [placements if size > 1 else (I,) for size in mesh_shape]
    return tuple(layout for layout in itertools.product(*choices) if is_even(shape, layout, mesh_shape))


@lru_cache(maxsize=4096)
def _layouts(shape: tuple[int, ...], mesh_shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[Layout, ...]:
    """As `even_layouts`, and those whose uneven parts are of these `dims` only and of which each rank of an axis may
    have one.
    """
    if not dims:
        return even_layouts(shape, mesh_shape)
    found = list(even_layouts(shape, mesh_shape))
    placements = (I, *(S(dim) for dim, size in enumerate(shape) if size > 1))
    for layout in itertools.product(*(placements if size > 1 else (I,) for size in mesh_shape)):
        counts = {placed.dim: num_parts(layout, mesh_shape, placed.dim) for placed in layout if placed.is_split}
        if all(shape[dim] % count == 0 or (dim in dims and shape[dim] >= count) for dim, count in counts.items()):
            found.append(layout)
    return tuple(dict.fromkeys(found))


def _uneven_dims(shape: tuple[int, ...], uneven: Uneven) -> tuple[int, ...]:
    """The dims of a tensor of global `shape` that may be split in parts of any number of elements."""
    offered = {extent for extent, units in uneven if 1 in units}
    return tuple(dim for dim, extent in enumerate(shape) if extent in offered)


def _input_layouts(
    item: Input, mesh_shape: tuple[int, ...], is_stage: bool, uneven: Uneven, shared: SharedRows | None
) -> tuple[Layout, ...]:
    """The layouts that an input may be stored in.

    A constant is computed whole and the gradient of a caller's argument must be whole, so that these are stored whole;
    a slice of a whole value costs nothing. The search takes the first of layouts of equal cost: for an argument the one
    that splits its first dim the most, so that a data loader can give each rank its part.
    """
    is_whole = item.kind == "constant" or (item.kind == "argument" and item.value.needs_grad and not is_stage)
    is_received = item.kind == "argument" and is_stage
    dims = () if is_received else _uneven_dims(item.value.shape, uneven)
    layouts = ((I,) * len(mesh_shape),) if is_whole else _layouts(item.value.shape, mesh_shape, dims)
    if item.kind == "parameter" and not item.value.needs_grad:  # so that a part that is read alone is stored alone
        return tuple(sorted(layouts, key=lambda layout: -sum(placement.is_split for placement in layout)))
    if item.kind != "argument":
        return layouts
    if shared is not None and not is_whole:
        layouts = tuple(_in_shares(layouts, item.value.shape, shared))
    return tuple(sorted(layouts, key=lambda layout: -sum(placement.dim == 0 for placement in layout)))


def _carried_layouts(item: Input, output: Value, mesh_shape: tuple[int, ...]) -> tuple[Layout, ...]:
    """The layouts of an argument in whose place the next call is given `output`: a dim that differs, as the tokens of a
    key-value cache that grows, is whole, and parts are equal, so that all stays where it is.
    """
    before, after = item.value.shape, output.shape
    grown = {dim for dim, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}
    layouts = _layouts(before, mesh_shape, ())
    return tuple(one for one in layouts if not any(placement.is_split and placement.dim in grown for placement in one))


def boundary_layouts(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], shared: SharedRows | None
) -> tuple[Layout, ...]:
    """The layouts in which a tensor may cross from one stage to another: even ones, and those in shares."""
    return _output_layouts(shape, mesh_shape, (), shared)


def _output_layouts(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], uneven: Uneven, shared: SharedRows | None
) -> tuple[Layout, ...]:
    layouts = _layouts(shape, mesh_shape, _uneven_dims(shape, uneven))
    return layouts if shared is None else tuple(_in_shares(layouts, shape, shared))


def _in_shares(layouts: Iterable[Layout], shape: tuple[int, ...], shared: SharedRows) -> Iterator[Layout]:
    """`layouts` of a tensor of `shape` without those that split what is in shares, and with its shares for whole."""
    axis, units = shared.axis, dict(shared.extents)
    for layout in layouts:
        if not layout[axis].is_split or not shared.has(shape[layout[axis].dim]):
            yield layout
        for dim, extent in enumerate(shape) if layout[axis] == I else ():
            if all(placement.dim != dim for placement in layout):
                offered = (S(dim, unit, shared.sizes) for unit in units.get(extent, ()))
                yield from ((*layout[:axis], one, *layout[axis + 1 :]) for one in offered)


def not_divided(graph: Graph, mesh: Mesh, folded: Folded | None = None) -> tuple[tuple[str, int, int], ...]:
    """(op or input name, dim, mesh axis) that is never split because the axis does not divide the dim; with `folded`,
    of the representative ops only.
    """
    ops = _representatives(graph, folded)
    uneven, shared = uneven_extents(graph, ops, mesh.shape), shared_extents(graph, ops, mesh)
    offered = {extent for extent, units in uneven if 1 in units}
    found: list[tuple[str, int, int]] = []
    for axis, size in enumerate(mesh.shape):
        for item in graph.of_kind("parameter"):
            extents = {dim: extent for dim, extent in enumerate(item.value.shape) if extent > 1}
            # otherwise it can be stored split
            if all(extent % size and not (extent in offered and extent >= size) for extent in extents.values()):
                found += [(item.value.name, dim, axis) for dim in extents]
        for op in ops:
            if shared is None or shared.axis != axis or not any(map(shared.has, _extents(op))):
                dims = _undivided_dims(op.nameless, size, Extra.of(op, {}, uneven).uneven)
                found += [(op.name, dim, axis) for dim in dims]
    return tuple(found)


def _representatives(graph: Graph, folded: Folded | None) -> list[Op]:
    return [op for op in graph.ops if folded is None or folded.representative[op.name] == op.name]


def _extents(op: Op) -> set[int]:
    return {extent for value in (*op.inputs, *op.outputs) for extent in value.shape}


@per_rules
def _undivided_dims(op: Op, size: int, uneven: Uneven) -> tuple[int, ...]:
    """The dims, of the output or of an input if only that is split,
    whose signatures do not divide over `size` ranks.
    """
    parts = (
        next(((where, dim) for (where, dim), extent in extents_of(op, sig).items() if _is_uneven(extent, size)), None)
        for sig in signatures_of(op)
    )
    others = uneven_signatures(op, uneven) if uneven else ()
    offered = {part for one in others if are_valid_parts(op, (one,), (size,), uneven) for part in extents_of(op, one)}
    return tuple(dict.fromkeys(part[1] for part in parts if part is not None and part[1] >= 0 and part not in offered))
