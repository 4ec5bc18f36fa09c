"""Signatures written by argument name; they come out in the order of `Op.inputs`."""

from collections.abc import Iterator, Mapping, Sequence

from autopar.ir.graph import Op, Slot, Value, arguments_of, resolve
from autopar.sbp.placement import Placement, R
from autopar.sbp.signature import Signature

Placed = Placement | Sequence[Placement]  # a sequence for an argument that is a list of tensors


def argument_names(op: Op) -> tuple[str, ...]:
    """The names of an op's arguments, in the order of its schema."""
    return tuple(argument.name for argument in resolve(op.target)._schema.arguments)


def tensor_of(op: Op, name: str) -> Value:
    """The tensor passed as argument `name`, which every call has."""
    tensor = optional_tensor(op, name)
    assert tensor is not None, f"{op.name}: {op.target} was called without {name}"
    return tensor


def optional_tensor(op: Op, name: str) -> Value | None:
    """The tensor passed as argument `name`; None if the call lacks it."""
    slot = arguments_of(op)[name]
    return op.inputs[slot.index] if isinstance(slot, Slot) else None


def signature(
    op: Op,
    placements: Mapping[str, Placed],
    outputs: Placement | tuple[Placement, ...],
    role: str = "",
    num_units: int = 0,
) -> Iterator[Signature]:
    """The signature that gives the named tensor arguments these `placements`, and all other tensor arguments R.

    Names of arguments that the call lacks are ignored. Yields nothing if one tensor is passed as two arguments with
    different placements.
    """
    by_position: dict[int, Placement] = {}
    for name, placed in placements.items():
        slots = arguments_of(op)[name]
        pairs = zip(slots, placed) if isinstance(placed, Sequence) else [(slots, placed)]
        for slot, placement in pairs:
            if isinstance(slot, Slot) and by_position.setdefault(slot.index, placement) != placement:
                return
    inputs = tuple(by_position.get(index, R) for index in range(len(op.inputs)))
    yield Signature(inputs, outputs if isinstance(outputs, tuple) else (outputs,), role, num_units)
