"""Rules of ops that move, repeat or drop elements without computing with them.

Proof of the splits: an op that acts on some dims alone maps each slice along another dim to one slice of the output.
Proof of pending sums: every output element is one input element, so the op is linear.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from autopar.ir.graph import Op, arguments_of, resolve
from autopar.sbp.placement import I, P, R, S
from autopar.sbp.rules._dims import Shape, aligned, carry, dim_of, other_dims
from autopar.sbp.signature import Signature

Rule = Callable[[Op], Iterable[Signature]]


def dim_groups(src: Shape, dst: Shape) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dims of `src` and of `dst` with the same number of elements, without dims of size 1.

    >>> dim_groups((2, 6, 4), (12, 1, 2, 2))
    [([0, 1], [0]), ([2], [2, 3])]
    """
    left = [dim for dim, size in enumerate(src) if size != 1]
    right = [dim for dim, size in enumerate(dst) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    while left and right:
        ins, outs = [left.pop(0)], [right.pop(0)]
        while (sizes := (math.prod(src[i] for i in ins), math.prod(dst[j] for j in outs)))[0] != sizes[1]:
            ins, outs = (ins + [left.pop(0)], outs) if sizes[0] < sizes[1] else (ins, outs + [right.pop(0)])
        groups.append((ins, outs))
    return groups


def reshape(op: Op) -> Iterator[Signature]:
    """The leading dim of a group varies slowest, so a part of it is a part of the leading dim on the other side."""
    src, dst = op.inputs[0].shape, op.outputs[0].shape
    groups = [] if 0 in src else dim_groups(src, dst)
    yield from carry(op, [(ins[0], outs[0]) for ins, outs in groups], is_linear=True)


def view_as(op: Op) -> Iterator[Signature]:
    """As reshape; of the second input only the shape matters, so it is split with the output or stays whole."""
    for signature in reshape(op):
        other = I if signature.outputs[0] == P else signature.outputs[0]
        yield Signature((*signature.inputs, other), signature.outputs)


def squeeze(op: Op) -> Iterator[Signature]:
    """A dim in the arguments must not be split to size 1: it would be squeezed on the ranks only."""
    shape, dims = op.inputs[0].shape, arguments_of(op).get("dim", tuple(range(len(op.inputs[0].shape))))
    named = {dim_of(dim, len(shape)) for dim in ((dims,) if isinstance(dims, int) else dims)}
    kept = [dim for dim in range(len(shape)) if not (dim in named and shape[dim] == 1)]
    yield from carry(op, [(dim, out) for out, dim in enumerate(kept) if dim not in named], is_linear=True)


def permute(op: Op) -> Iterator[Signature]:
    """A permutation of dims, read off the op's result on an empty tensor whose sizes all differ."""
    ndim = len(op.inputs[0].shape)
    probe = torch.empty(tuple(range(2, ndim + 2)), device="meta")
    out = resolve(op.target)(probe, *op.args[1:], **dict(op.kwargs))
    yield from carry(op, [(size - 2, dim) for dim, size in enumerate(out.shape)], is_linear=True)


def expand(op: Op) -> Iterator[Signature]:
    """Every output dim; an expanded one needs the whole input, whose gradient is then summed over the parts."""
    out = op.outputs[0].shape
    like = op.inputs[1:]  # expand_as: only its shape matters, so it is split with the output or stays whole
    for dim in range(len(out)):
        yield Signature((aligned(op.inputs[0].shape, out, dim), *(S(dim) for _ in like)), (S(dim),))
    yield Signature((P, *(I for _ in like)), (P,))


def repeat(op: Op) -> Iterator[Signature]:
    """A dim that is repeated as a whole cannot be split, unless its size was 1 (or it is new)."""
    src, out = op.inputs[0].shape, op.outputs[0].shape
    for dim, size in enumerate(out):
        own = dim - (len(out) - len(src))
        if own < 0 or src[own] in (1, size):
            yield Signature((aligned(src, out, dim),), (S(dim),))
    yield Signature((P,), (P,))


def repeat_interleave(op: Op) -> Iterator[Signature]:
    """Each entry becomes a run of equal entries: parts of the input give parts of the output, even along the dim."""
    ndim, dim = len(op.inputs[0].shape), arguments_of(op)["dim"]
    pairs = [(d, d) for d in range(ndim)] if dim is not None else [(0, 0)] * min(ndim, 1)
    yield from carry(op, pairs, is_linear=True)


def along(*names: str) -> Rule:
    """The rule of an op that keeps all dims and acts only on the dims in the arguments called `names`."""

    def rule(op: Op) -> Iterator[Signature]:
        yield from carry(
            op, [(dim, dim) for dim in other_dims(len(op.inputs[0].shape), *_dims(op, names))], is_linear=True
        )

    return rule


def _dims(op: Op, names: tuple[str, ...]) -> list[int]:
    bound = arguments_of(op)
    dims: list[int] = []
    for name in names:
        dims += [bound[name]] if isinstance(bound[name], int) else bound[name]
    return dims


def slice_(op: Op) -> Iterator[Signature]:
    """slice: along every other dim, and along its own dim if it takes all of it."""
    shape, bound = op.inputs[0].shape, arguments_of(op)
    dim = dim_of(bound["dim"], len(shape))
    end = shape[dim] if bound["end"] is None else bound["end"]
    takes_all = not bound["start"] and end >= shape[dim] and bound["step"] == 1
    yield from carry(op, [(d, d) for d in range(len(shape)) if d != dim or takes_all], is_linear=True)


def drop(op: Op) -> Iterator[Signature]:
    """select, unbind: the dim in the arguments is removed."""
    ndim = len(op.inputs[0].shape)
    kept = other_dims(ndim, arguments_of(op)["dim"])
    yield from carry(op, [(dim, out) for out, dim in enumerate(kept)], is_linear=True)


def diagonal(op: Op) -> Iterator[Signature]:
    """diagonal: the two dims become one, which is the last."""
    bound = arguments_of(op)
    kept = other_dims(len(op.inputs[0].shape), bound["dim1"], bound["dim2"])
    yield from carry(op, [(dim, out) for out, dim in enumerate(kept)], is_linear=True)


def roll(op: Op) -> Iterator[Signature]:
    """roll: without dims the tensor is rolled as one flat row, so that nothing can be split."""
    dims = arguments_of(op)["dims"]
    ndim = len(op.inputs[0].shape)
    yield from carry(op, [(dim, dim) for dim in other_dims(ndim, *dims)] if dims else [], is_linear=True)


def leading(num_last: int) -> Rule:
    """The rule of an op on the `num_last` last dims; the leading dims are a batch."""

    def rule(op: Op) -> Iterator[Signature]:
        yield from carry(op, [(dim, dim) for dim in range(len(op.inputs[0].shape) - num_last)], is_linear=True)

    return rule


def pad(op: Op) -> Iterator[Signature]:
    """pad: unpadded dims; a constant fill other than 0 would be added to a pending sum once for each rank."""
    bound = arguments_of(op)
    amounts, ndim = bound["pad"], len(op.inputs[0].shape)
    padded = [ndim - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0]
    is_linear = bound.get("mode", "constant") != "constant" or not bound["value"]
    yield from carry(op, [(dim, dim) for dim in other_dims(ndim, *padded)], is_linear=is_linear)


def cat(op: Op) -> Iterator[Signature]:
    """cat: every dim but the concatenated one; torch skips empty one-dim tensors, which stay whole."""
    out = op.outputs[0].shape
    for dim in other_dims(len(out), arguments_of(op)["dim"]):
        yield Signature(tuple(S(dim) if len(value.shape) == len(out) else R for value in op.inputs), (S(dim),))
    yield Signature((P,) * len(op.inputs), (P,))


def stack(op: Op) -> Iterator[Signature]:
    """stack: the inputs' dims, shifted behind the new one."""
    out = op.outputs[0].shape
    for src, dim in enumerate(other_dims(len(out), arguments_of(op)["dim"])):
        yield Signature((S(src),) * len(op.inputs), (S(dim),))
    yield Signature((P,) * len(op.inputs), (P,))


def slice_scatter(op: Op) -> Iterator[Signature]:
    """slice_scatter: every other dim; jointly linear in both tensors."""
    out = op.outputs[0].shape
    for dim in other_dims(len(out), arguments_of(op)["dim"]):
        yield Signature((S(dim), S(dim)), (S(dim),))
    yield Signature((P, P), (P,))


def select_scatter(op: Op) -> Iterator[Signature]:
    """As slice_scatter; the second tensor lacks the dim."""
    out = op.outputs[0].shape
    for src, dim in enumerate(other_dims(len(out), arguments_of(op)["dim"])):
        yield Signature((S(dim), S(src)), (S(dim),))
    yield Signature((P, P), (P,))


RULES: Mapping[str, Rule] = {
    "aten.reshape.default": reshape,
    "aten.view.default": reshape,
    "aten._unsafe_view.default": reshape,
    "aten.view_as.default": view_as,
    "aten.flatten.using_ints": reshape,
    "aten.unflatten.int": reshape,
    "aten.ravel.default": reshape,
    "aten.unsqueeze.default": reshape,
    "aten.squeeze.default": squeeze,
    "aten.squeeze.dim": squeeze,
    "aten.squeeze.dims": squeeze,
    "aten.transpose.int": permute,
    "aten.permute.default": permute,
    "aten.t.default": permute,
    "aten.mT.default": permute,
    "aten.numpy_T.default": permute,
    "aten.movedim.int": permute,
    "aten.movedim.intlist": permute,
    "aten.moveaxis.int": permute,
    "aten.moveaxis.intlist": permute,
    "aten.swapaxes.default": permute,
    "aten.swapdims.default": permute,
    "aten.expand.default": expand,
    "aten.expand_as.default": expand,
    "aten.broadcast_to.default": expand,
    "aten.repeat.default": repeat,
    "aten.repeat_interleave.self_int": repeat_interleave,
    "aten.slice.Tensor": slice_,
    "aten.narrow.default": along("dim"),
    "aten.split.Tensor": along("dim"),
    "aten.split.sizes": along("dim"),
    "aten.split_with_sizes.default": along("dim"),
    "aten.chunk.default": along("dim"),
    "aten.tensor_split.sections": along("dim"),
    "aten.tensor_split.indices": along("dim"),
    "aten.flip.default": along("dims"),
    "aten.unfold.default": along("dimension"),
    "aten.roll.default": roll,
    "aten.select.int": drop,
    "aten.unbind.int": drop,
    "aten.diagonal.default": diagonal,
    "aten.tril.default": leading(2),
    "aten.triu.default": leading(2),
    "aten.diag_embed.default": leading(1),
    "aten.view_as_real.default": leading(0),
    "aten.view_as_complex.default": leading(1),
    "aten.pixel_shuffle.default": leading(3),
    "aten.pixel_unshuffle.default": leading(3),
    "aten.pad.default": pad,
    "aten.constant_pad_nd.default": pad,
    "aten.cat.default": cat,
    "aten.concat.default": cat,
    "aten.concatenate.default": cat,
    "aten.mH.default": permute,
    "aten.matrix_H.default": permute,
    "aten.stack.default": stack,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select_scatter.default": select_scatter,
}
