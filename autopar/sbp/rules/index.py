"""Rules of ops that read or write at the positions in an index tensor.

Proof of the splits: a dim that is neither indexed nor indexing is carried, slice by slice; parts of the index read
parts of the result from the whole source, whose gradient is then a sum over the parts. An indexed dim cannot be split:
the index counts globally. Proof of pending sums: for a fixed index, reading and writing are linear in the values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from autopar.ir.graph import Op, Slot, arguments_of
from autopar.sbp.placement import P, Placement, R, S
from autopar.sbp.rules._dims import Shape, aligned, dim_of, other_dims
from autopar.sbp.signature import Signature

Rule = Callable[[Op], Iterable[Signature]]


def index_select(op: Op) -> Iterator[Signature]:
    """x, index along `dim`."""
    shape = op.inputs[0].shape
    dim = dim_of(arguments_of(op)["dim"], len(shape))
    for other in other_dims(len(shape), dim):
        yield Signature((S(other), R), (S(other),))
    if op.inputs[1].shape and shape:
        yield Signature((R, S(0)), (S(dim),))
    yield Signature((P, R), (P,))


def gather(op: Op) -> Iterator[Signature]:
    """x[..., index, ...] at the index's own position in the other dims:
    these split together if all have equal sizes.
    """
    shape, out = op.inputs[0].shape, op.outputs[0].shape
    dim = dim_of(arguments_of(op)["dim"], len(shape))
    for other in other_dims(len(shape), dim):
        if shape[other] == out[other]:
            yield Signature((S(other), S(other)), (S(other),))
    if out:
        yield Signature((R, S(dim)), (S(dim),))
    yield Signature((P, R), (P,))


def take_along_dim(op: Op) -> Iterator[Signature]:
    """As gather, with the other dims broadcast; without a dim the tensors are flattened."""
    dim, out = arguments_of(op)["dim"], op.outputs[0].shape
    if dim is not None and out:
        dim = dim_of(dim, len(out))
        for other in other_dims(len(out), dim):
            yield Signature(tuple(aligned(value.shape, out, other) for value in op.inputs), (S(other),))
        yield Signature((R, S(dim)), (S(dim),))
    yield Signature((P, R), (P,))


def scatter(op: Op) -> Iterator[Signature]:
    """The other dims of x, index and source split together if all have equal sizes.

    A written scalar is not a term of a sum unless it is 0.
    """
    bound, out = arguments_of(op), op.outputs[0].shape
    for other in other_dims(len(out), bound["dim"]):
        if all(value.shape[other : other + 1] == out[other : other + 1] for value in op.inputs):
            yield Signature((S(other),) * len(op.inputs), (S(other),))
    if bound.get("reduce") is None and (len(op.inputs) == 3 or bound["value"] == 0):
        yield Signature((P, R, P)[: len(op.inputs)], (P,))


def scatter_add(op: Op) -> Iterator[Signature]:
    """As scatter; the contributions of the source's parts add up."""
    yield from scatter(op)
    if op.outputs[0].shape:
        part = S(dim_of(arguments_of(op)["dim"], len(op.outputs[0].shape)))
        yield Signature((P, part, part), (P,))


def index_copy(op: Op) -> Iterator[Signature]:
    """x, index along `dim`, source."""
    ndim = len(op.outputs[0].shape)
    for other in other_dims(ndim, arguments_of(op)["dim"]):
        yield Signature((S(other), R, S(other)), (S(other),))
    yield Signature((P, R, P), (P,))


def index_add(op: Op) -> Iterator[Signature]:
    """As index_copy; the contributions of the source's parts add up."""
    yield from index_copy(op)
    if op.inputs[2].shape and op.inputs[1].shape:
        yield Signature((P, S(0), S(dim_of(arguments_of(op)["dim"], len(op.outputs[0].shape)))), (P,))


def index_fill(op: Op) -> Iterator[Signature]:
    """As index_copy; a written scalar is not a term of a sum unless it is 0."""
    bound = arguments_of(op)
    for other in other_dims(len(op.outputs[0].shape), bound["dim"]):
        yield Signature((S(other), R), (S(other),))
    if bound["value"] == 0:
        yield Signature((P, R), (P,))


def index(op: Op) -> Iterator[Signature]:
    """x[i, :, j]: carried dims of x, and dims of the indices broadcast together."""
    slots = _indices(op)
    if slots is None:
        return
    carried, block, joint = _index_dims(op, slots)
    for own, out in carried.items():
        yield Signature((S(own), *(R for _ in op.inputs[1:])), (S(out),))
    for dim in range(len(joint)):
        yield Signature((R, *_index_parts(op, slots, joint, dim)), (S(block + dim),))
    yield Signature((P, *(R for _ in op.inputs[1:])), (P,))


def index_put(op: Op) -> Iterator[Signature]:
    """x[i, :, j] = values: as `index`, with `values` broadcast to the shape of x[i, :, j]; accumulated parts add up."""
    slots = _indices(op)
    if slots is None:
        return
    carried, block, joint = _index_dims(op, slots)
    read = _read_shape(op, carried, block, joint)
    values = op.inputs[-1].shape
    whole = [R] * (len(op.inputs) - 2)
    for own, out in carried.items():
        yield Signature((S(own), *whole, aligned(values, read, out)), (S(own),))
    yield Signature((P, *whole, P), (P,))
    if arguments_of(op)["accumulate"]:
        for dim in range(len(joint)):
            yield Signature((P, *_index_parts(op, slots, joint, dim), aligned(values, read, block + dim)), (P,))


def _indices(op: Op) -> list[int | None] | None:
    """For each leading dim of x the input that indexes it; None if one is a mask, whose number of hits is not known."""
    slots = [item.index if isinstance(item, Slot) else None for item in arguments_of(op)["indices"]]
    is_mask = any(slot is not None and op.inputs[slot].dtype in (torch.bool, torch.uint8) for slot in slots)
    return None if is_mask else slots


def _index_dims(op: Op, slots: list[int | None]) -> tuple[dict[int, int], int, Shape]:
    """(carried dim of x -> its dim in the result, first dim of the indices in the result, common shape of the indices).

    The indices' dims replace the indexed dims if those are neighbours, else they come first (numpy's advanced
    indexing).
    """
    ndim = len(op.inputs[0].shape)
    indexed = [dim for dim, slot in enumerate(slots) if slot is not None]
    joint = torch.broadcast_shapes(*(op.inputs[slot].shape for slot in slots if slot is not None))
    are_neighbours = indexed[-1] - indexed[0] == len(indexed) - 1
    block = indexed[0] if are_neighbours else 0
    free = [dim for dim in range(ndim) if dim not in indexed]
    return {dim: at if at < block else at + len(joint) for at, dim in enumerate(free)}, block, tuple(joint)


def _read_shape(op: Op, carried: dict[int, int], block: int, joint: Shape) -> Shape:
    sizes = {out: op.inputs[0].shape[own] for own, out in carried.items()} | {
        block + dim: size for dim, size in enumerate(joint)
    }
    return tuple(sizes[dim] for dim in sorted(sizes))


def _index_parts(op: Op, slots: list[int | None], joint: Shape, dim: int) -> list[Placement]:
    """The placements of the index tensors if dim `dim` of their common shape is split."""
    return [aligned(op.inputs[slot].shape, joint, dim) for slot in slots if slot is not None]


RULES: Mapping[str, Rule] = {
    "aten.index_select.default": index_select,
    "aten.gather.default": gather,
    "aten.take_along_dim.default": take_along_dim,
    "aten.scatter.src": scatter,
    "aten.scatter.value": scatter,
    "aten.scatter.reduce": scatter,
    "aten.scatter_reduce.two": scatter,
    "aten.scatter_add.default": scatter_add,
    "aten.index_copy.default": index_copy,
    "aten.index_add.default": index_add,
    "aten.index_fill.int_Scalar": index_fill,
    "aten.index.Tensor": index,
    "aten.index_put.default": index_put,
}
