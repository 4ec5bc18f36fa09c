"""Signatures whose parts have different sizes, and the strategies in which they fit together."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.ir.graph import Op
from autopar.ir.loops.scan_op import SCAN
from autopar.ir.op_facts import ATTENTION, PERMUTATIONS, RESHAPES, family
from autopar.sbp.local_ops import local_op
from autopar.sbp.op_signatures import SplitDim, extents_of, signatures_of
from autopar.sbp.placement import Placement, S, shared_sizes
from autopar.sbp.rules import cast, pointwise, rule_of
from autopar.sbp.rules.given import per_rules
from autopar.sbp.rules.matmul import ROW_BYTES
from autopar.sbp.signature import Signature
from autopar.sbp.uneven.uneven_extents import PROPORTIONAL, SharedRows, Uneven, proportional

Units = dict[SplitDim, int]
# Ops that are right on a rank that has no part; torch refuses empty tensors, or forgets their shape, in some others.
WITHOUT_ELEMENTS = frozenset(
    (*pointwise.RULES, *cast.RULES, *RESHAPES, *PERMUTATIONS)
    + tuple(
        f"aten.{name}"
        for name in (
            "linear.default",
            "matmul.default",
            "mm.default",
            "bmm.default",
            "layer_norm.default",
            "rms_norm.default",
            "scaled_dot_product_attention.default",
            "softmax.int",
            "embedding.default",
            "expand.default",
            "repeat_interleave.self_int",
            "slice.Tensor",
            "select.int",
            "unbind.int",
            "split.Tensor",
            "split_with_sizes.default",
            "chunk.default",
            "cat.default",
            "stack.default",
            "sum.default",
            "sum.dim_IntList",
        )
    )
)


@per_rules
def uneven_signatures(op: Op, uneven: Uneven, shares: tuple[int, ...] = ()) -> tuple[Signature, ...]:
    """The signatures of `op` in uneven parts, for each of the units that its split dims are offered in; in `shares`, if
    there are any.
    """
    signatures = (found for one in signatures_of(op) for found in _in_units(op, one, uneven, shares))
    return tuple(dict.fromkeys(signatures))


def _in_units(op: Op, signature: Signature, uneven: Uneven, shares: tuple[int, ...]) -> Iterator[Signature]:
    extents = extents_of(op, signature)
    sizes, offered = set(extents.values()), dict(uneven)
    if rule_of(op) is None or op.target == SCAN:  # samples, and sizes within a step, are of equal parts
        return
    if signature.num_units or op.target in ROW_BYTES or (signature.role and signature.role not in _roles(op)):
        return
    if not sizes or not sizes <= set(offered) or (len(sizes) > 1 and op.target not in PROPORTIONAL):
        return
    units_of = dict(proportional(sizes, offered))
    counts = {size // unit for size, units in units_of.items() for unit in units}
    for count in sorted(counts):
        if all(size // count in offered[size] for size in sizes):
            yield with_units(signature, {part: extent // count for part, extent in extents.items()}, shares)


def _roles(op: Op) -> frozenset[str]:
    found = local_op(op.target)
    return frozenset() if found is None else found.uneven_roles


def with_units(signature: Signature, units: Units, shares: tuple[int, ...] = ()) -> Signature:
    """`signature` with every split in the unit of its dim, and in `shares`."""

    def placed(side: str, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        return tuple(
            S(one.dim, units[f"{side}{index}", one.dim], shares) if one.is_split else one
            for index, one in enumerate(placements)
        )

    return replace(signature, inputs=placed("input", signature.inputs), outputs=placed("output", signature.outputs))


def has_units(signature: Signature) -> bool:
    """Whether some split is in units, or in shares."""
    return any(placement.unit > 1 or placement.shares for placement in (*signature.inputs, *signature.outputs))


def are_valid_parts(
    op: Op,
    combination: Sequence[Signature],
    mesh_shape: tuple[int, ...],
    uneven: Uneven,
    shared: SharedRows | None = None,
) -> bool:
    """Whether all that the signatures split, axis by axis, divides evenly, or unevenly in whole units, as many in every
    dim of an op, so that parts belong together. Some ranks may have no part of ops that take it.

    A split is written in units only where units are not divided. What is in shares may be split again, on axes further
    inside.
    """
    allowed, parts_of = set(uneven_signatures(op, uneven)), dict[SplitDim, _PartRange]()
    if shared is not None:
        allowed |= {*uneven_signatures(op, shared.extents, shared.sizes), *uneven_signatures(op, shared.extents)}
    for signature, size in zip(combination, mesh_shape):
        if size == 1:
            continue
        shares = shared.sizes if shared is not None and _is_in_shares(signature) else ()
        counts = set[tuple[int, int]]()
        for part, extent in extents_of(op, signature).items():
            before = parts_of.get(part, _PartRange(extent, extent))
            unit = _unit(signature, part)
            found = before.cut(size, unit) if not shares else before.shared(unit, shares, is_whole=part not in parts_of)
            if found is None or (not found.least and (signature.role or not _takes_none(op))):
                return False
            if found.unit:
                counts.add((before.most // unit, before.least // unit))
            else:
                counts.add((0, 0))
            parts_of[part] = found
        is_uneven = bool(counts - {(0, 0)})
        if is_uneven and family(op.target) == ATTENTION and any(one.role for one in combination):
            return False  # its local ops count queries and heads of equal parts
        if is_uneven and (len(counts) > 1 or signature not in allowed or not _is_alone(signature, combination)):
            return False
    return True


def _is_in_shares(signature: Signature) -> bool:
    return any(placement.shares for placement in (*signature.inputs, *signature.outputs))


def _takes_none(op: Op) -> bool:
    """Whether the op is right on a rank without elements; attention then has no gradient for a mask."""
    trained = [value.needs_grad for value in op.inputs]
    is_plain = op.target != "aten.scaled_dot_product_attention.default" or (
        len(set(trained[:3])) == 1 and not any(trained[3:])
    )
    return op.target in WITHOUT_ELEMENTS and is_plain


def _is_alone(signature: Signature, combination: Sequence[Signature]) -> bool:
    """Whether no other axis takes its role for another dim."""
    dims = [[placement.dim for placement in one.inputs] for one in combination if one.role == signature.role]
    return not signature.role or all(one == dims[0] for one in dims)


def _unit(signature: Signature, part: SplitDim) -> int:
    tensor, _ = part
    if tensor.startswith("input") and tensor[5:].isdigit():
        return signature.inputs[int(tensor[5:])].unit
    if tensor.startswith("output") and tensor[6:].isdigit():
        return signature.outputs[int(tensor[6:])].unit
    return 1  # the indivisible units of a role


class _PartRange:
    """The largest and the smallest part of a dim, and the unit if they differ by axes; else 0."""

    __slots__ = ("least", "most", "unit")

    def __init__(self, most: int, least: int, unit: int = 0) -> None:
        self.most, self.least, self.unit = most, least, unit

    def cut(self, size: int, unit: int) -> "_PartRange | None":
        """The parts cut over one more axis of `size`; None if they are not written so."""
        if not self.unit and unit == 1 and self.most % size == 0:
            return _PartRange(self.most // size, self.least // size)
        if self.most % unit or (self.unit and self.unit != unit):
            return None
        counts = self.most // unit, self.least // unit
        if not self.unit and counts[0] % size == 0:
            return None  # even parts have no unit
        least = min(count - (size - 1) * -(-count // size) for count in counts)
        return _PartRange(-(-counts[0] // size) * unit, max(least, 0) * unit, unit)

    def shared(self, unit: int, shares: tuple[int, ...], *, is_whole: bool) -> "_PartRange | None":
        """The parts of a dim in `shares` of its units; None if there are none, or it is not whole before."""
        if not is_whole or self.most % unit or self.most // unit < len(shares):
            return None
        sizes = shared_sizes(self.most, shares, unit)
        return _PartRange(max(sizes), min(sizes), unit)
