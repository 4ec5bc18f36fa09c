"""The pass that gives each operation one spelling.

All views that regroup dims are `reshape`, all that reorder them `permute`, all casts `to.dtype`, all cuts
`split_with_sizes`, `slice` or `select`. Sizes, dims and bounds are resolved, so that no -1 is left.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from autopar.ir.graph import Graph, Op, Slot, arguments_of, resolve
from autopar.ir.op_facts import PERMUTATIONS, RESHAPES, order_of


def canonicalise(graph: Graph) -> Graph:
    """`graph` with each op in its one spelling; values are unchanged."""
    known: dict[Any, tuple[Op, Op]] = {}
    return replace(graph, ops=tuple([_like(op, known) for op in graph.ops]))


def _like(op: Op, known: dict[Any, tuple[Op, Op]]) -> Op:
    """`_canonical(op)`. `known`: an op before and after, by all that the spelling depends on: copies of a block are
    called with the same objects, and have the same ones after.
    """
    if len(set(map(id, op.inputs))) < len(op.inputs):  # that two are one tensor is of this copy alone
        return _canonical(op)
    tensors = [(value.shape, value.dtype) for value in (*op.inputs, *op.outputs)]
    key = op.target, id(op.args), id(op.kwargs), len(op.inputs), tuple(tensors)
    if key not in known:
        known[key] = op, _canonical(op)
        return known[key][1]
    before, after = known[key]
    if after is before:
        return op
    place = {id(value): at for at, value in enumerate(before.inputs)}
    inputs = tuple([op.inputs[place[id(value)]] for value in after.inputs])
    return replace(op, target=after.target, args=after.args, kwargs=after.kwargs, inputs=inputs)


def _canonical(op: Op) -> Op:
    rewrite = _REWRITES.get(op.target)
    return _resolve_dims(rewrite(op) if rewrite else op)


def _unary(op: Op, target: str, *args: object, **kwargs: object) -> Op:
    return replace(op, target=target, args=(Slot(0), *args), kwargs=tuple(kwargs.items()), inputs=op.inputs[:1])


def _reshape(op: Op) -> Op:
    return _unary(op, "aten.reshape.default", op.outputs[0].shape)


def _expand(op: Op) -> Op:
    return _unary(op, "aten.expand.default", op.outputs[0].shape)


def _cast(op: Op) -> Op:
    return _unary(op, "aten.to.dtype", op.outputs[0].dtype)


def _permute(op: Op) -> Op:
    order = order_of(op.target, op.args[1:], len(op.inputs[0].shape), **dict(op.kwargs))
    return _unary(op, "aten.permute.default", order)


def _split(op: Op) -> Op:
    dim = arguments_of(op)["dim"] % len(op.inputs[0].shape)
    return _unary(op, "aten.split_with_sizes.default", tuple(part.shape[dim] for part in op.outputs), dim)


def _slice(op: Op) -> Op:
    named = arguments_of(op)
    dim = named["dim"] % len(op.inputs[0].shape)
    size = op.inputs[0].shape[dim]
    start, end, _ = slice(named["start"], named["end"]).indices(size)
    steps = (named["step"],) if named["step"] != 1 else ()
    return _unary(op, "aten.slice.Tensor", dim, start, max(start, end), *steps)


def _slice_scatter(op: Op) -> Op:
    named = arguments_of(op)
    dim = named["dim"] % len(op.inputs[0].shape)
    start, end, _ = slice(named["start"], named["end"]).indices(op.inputs[0].shape[dim])
    steps = (named["step"],) if named["step"] != 1 else ()
    return replace(op, args=(Slot(0), Slot(1), dim, start, max(start, end), *steps), kwargs=())


def _narrow(op: Op) -> Op:
    named = arguments_of(op)
    dim = named["dim"] % len(op.inputs[0].shape)
    start = named["start"] % max(op.inputs[0].shape[dim], 1)
    return _unary(op, "aten.slice.Tensor", dim, start, start + named["length"])


def _select(op: Op) -> Op:
    named = arguments_of(op)
    dim = named["dim"] % len(op.inputs[0].shape)
    return _unary(op, "aten.select.int", dim, named["index"] % op.inputs[0].shape[dim])


def _softmax(op: Op) -> Op:
    return _unary(op, op.target.replace("._", ".").replace("default", "int"), arguments_of(op)["dim"])


def _convolution(op: Op) -> Op:
    """The convolution by its number of dims, which torch's own backwards do not name."""
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = op.args
    ndim = len(op.inputs[0].shape) - 2
    if transposed:
        target = f"aten.conv_transpose{ndim}d.{'default' if ndim == 1 else 'input'}"
        return replace(op, target=target, args=(x, weight, bias, stride, padding, output_padding, groups, dilation))
    args = (x, weight, bias, stride, padding, dilation, groups)
    return replace(op, target=f"aten.conv{ndim}d.default", args=args)


def _fill_new(op: Op) -> Op:
    """`x.new_zeros(...)` without x: only its dtype matters, and that is known."""
    value = {"aten.new_zeros.default": 0, "aten.new_ones.default": 1}.get(op.target, arguments_of(op).get("fill_value"))
    output = op.outputs[0]
    return replace(
        op, target="aten.full.default", args=(output.shape, value), kwargs=(("dtype", output.dtype),), inputs=()
    )


def _cat(op: Op) -> Op:
    """`cat` without its empty tensors, such as a cache before its first token."""
    parts = tuple(value for value in op.inputs if 0 not in value.shape) or op.inputs[:1]
    dim = arguments_of(op)["dim"] % len(parts[0].shape)
    return replace(op, args=(tuple(Slot(i) for i in range(len(parts))), dim), kwargs=(), inputs=parts)


def _dense(op: Op) -> Op:
    """A lookup whose weight gets a gradient of all its rows: the same numbers, which ranks can sum."""
    names = [arg.name for arg in resolve(op.target)._schema.arguments]
    args = tuple(False if name == "sparse" else arg for name, arg in zip(names, op.args))
    return replace(op, args=args, kwargs=tuple((name, arg) for name, arg in op.kwargs if name != "sparse"))


def _resolve_dims(op: Op) -> Op:
    """The op with dims counted from the front, of the result of broadcasting if it reads several tensors."""
    if not op.inputs or op.target in _COUNTED_OTHERWISE:
        return op
    names = _names_with_dim(op.target)
    if not names:
        return op
    ndim = max(len(value.shape) for value in op.inputs)
    args = tuple(_front(arg, ndim) if name == "dim" else arg for name, arg in zip(names, op.args))
    return replace(
        op, args=args, kwargs=tuple((name, _front(arg, ndim) if name == "dim" else arg) for name, arg in op.kwargs)
    )


@lru_cache(maxsize=1024)
def _names_with_dim(target: str) -> tuple[str, ...]:
    """The names of the op's arguments; () if none of them is a dim."""
    names = tuple(arg.name for arg in resolve(target)._schema.arguments)
    return names if "dim" in names else ()


# `stack` adds a dim; of weight norms -1 stands for the norm of all dims.
_COUNTED_OTHERWISE = frozenset(("aten.stack.default", "aten._weight_norm.default", "aten.norm_except_dim.default"))


def _front(dim: object, ndim: int) -> object:
    if isinstance(dim, tuple):
        return tuple(_front(item, ndim) for item in dim)
    return dim + ndim if isinstance(dim, int) and dim < 0 < ndim else dim


def _rows(rewrite: Callable[[Op], Op], *names: str) -> Mapping[str, Callable[[Op], Op]]:
    return {f"aten.{name}": rewrite for name in names}


_REWRITES: Mapping[str, Callable[[Op], Op]] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(PERMUTATIONS, _permute),
    **_rows(_expand, "expand.default", "expand_as.default", "broadcast_to.default"),
    **_rows(_cast, "to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy.default", "type_as.default"),
    **_rows(
        _split, "chunk.default", "split.Tensor", "split.sizes", "split_with_sizes.default", "tensor_split.sections"
    ),
    **_rows(_split, "tensor_split.indices", "unsafe_split.Tensor", "unsafe_chunk.default"),
    **_rows(_slice, "slice.Tensor"),
    **_rows(_slice_scatter, "slice_scatter.default"),
    **_rows(_narrow, "narrow.default"),
    **_rows(_select, "select.int"),
    **_rows(_softmax, "_softmax.default", "_log_softmax.default"),
    **_rows(_convolution, "convolution.default"),
    **_rows(_fill_new, "new_zeros.default", "new_ones.default", "new_full.default"),
    **_rows(_dense, "embedding.default", "embedding_bag.default", "embedding_bag.padding_idx"),
    **_rows(_cat, "cat.default", "concat.default", "concatenate.default"),
}
