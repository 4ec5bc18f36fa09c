"""The pass that computes all rows where a mask picks some, and leaves the others out of sums, means and losses.

`x[mask]` has as many rows as the mask has True, which differs from batch to batch, and a plan has fixed shapes. While
each row is computed by itself (`row_by_row.py`), what the rows that were not picked hold changes nothing of the
others. Where the rows end, they are left out: terms of a sum are 0, targets of a cross-entropy are ignored, a mean is
divided by the number of True, and what is written back to `y[mask]` is written where the mask is True.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.ir.call_args import fill
from autopar.ir.experts.row_by_row import ELEMENTWISE_LOSSES, PARTS_WRITTEN, row_dim, row_of_part
from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.graph import Graph, Op, Slot, Value, arguments_of, resolve
from autopar.ir.masks.picked_rows import PICKED
from autopar.ir.passes.common_subexpressions import merge_duplicates

# What takes the place of the rows that were not picked: it is in the domain of the usual functions, so that their
# gradients, times zero, are zero. Integers are indices.
_FLOAT, _INTEGER = 0.5, 0
_NONE, _MEAN = 0, 1  # ATen's Reduction
# Ops over all of a tensor, or over some dims: what a row that is left out contributes to them.
_NEUTRAL: Mapping[str, float] = {
    **dict.fromkeys(("aten.sum.default", "aten.sum.dim_IntList"), 0),
    **dict.fromkeys(("aten.mean.default", "aten.mean.dim"), 0),
    **dict.fromkeys(("aten.amax.default", "aten.max.default", "aten.logsumexp.default"), -math.inf),
    **dict.fromkeys(("aten.amin.default", "aten.min.default"), math.inf),
}
_MEANS = ("aten.mean.default", "aten.mean.dim")
_TOKEN_LOSSES = ("aten.cross_entropy_loss.default", "aten.nll_loss.default", "aten.nll_loss_nd.default")
_SAME_FLAGS = ("aten.unsqueeze.default", "aten.expand.default", "aten.expand_as.default")
_OPPOSITE_FLAGS = ("aten.bitwise_not.default", "aten.logical_not.default")
_ADDING = ("aten.index_add.default", "aten.scatter_add.default")


class NotByRow(Exception):
    """Rows that a mask picks are used otherwise than row by row, by the op that is named."""


def reduce_rows(graph: Graph) -> Graph:
    """`graph` with all rows of what masks pick, none of which is read where it was not picked. NotByRow if rows depend
    on one another, or are an output.
    """
    if not any(op.target == PICKED for op in graph.ops):
        return graph
    graph = merge_duplicates(graph)
    names = {op.name for op in graph.ops} | {value.name for op in graph.ops for value in op.outputs}
    names |= {item.value.name for item in graph.inputs}
    walk = _Reduction(OpBuilder(used_names=names))
    for op in graph.ops:
        walk.take(op)
    return replace(
        graph,
        ops=tuple(walk.builder.ops),
        outputs=tuple(walk.result(item) if isinstance(item, Value) else item for item in graph.outputs),
        mutations=tuple((fqn, walk.result(value)) for fqn, value in graph.mutations),
    )


@dataclass(frozen=True, slots=True)
class _PickedRows:
    """The values of the rows that the op called `picked` gives, in dim `dim`."""

    picked: str
    dim: int


@dataclass
class _Reduction:
    """`now`: name of a value -> what it is in the new graph. `places`: name -> (op, dim) whose coordinates it is.
    `within`: op that picks rows -> that of whose rows it picks some. `flags`: name of a mask with more dims -> the mask
    itself, and whether it is its opposite. `copied`: name -> the dims in which it is the same for each index.
    """

    builder: OpBuilder
    now: dict[str, Value] = field(default_factory=dict)
    rows: dict[str, _PickedRows] = field(default_factory=dict)
    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    masks: dict[str, Value] = field(default_factory=dict)
    within: dict[str, str] = field(default_factory=dict)
    flags: dict[str, tuple[str, bool]] = field(default_factory=dict)
    copied: dict[str, set[int]] = field(default_factory=dict)

    def result(self, value: Value) -> Value:
        """The value that is given out as `value`."""
        if value.name in self.rows or value.name in self.places:
            raise NotByRow("an output")
        return self.now.get(value.name, value)

    def take(self, op: Op) -> None:
        """Append `op`, or what takes its place."""
        if op.target == PICKED:
            self._pick(op)
        elif any(value.name in self.places for value in op.inputs):
            self._read_or_write(op)
        elif any(value.name in self.rows for value in op.inputs):
            self._compute(op)
        else:
            self._keep(op)
            if op.target == "aten.expand.default":
                shape, given = op.outputs[0].shape, op.inputs[0].shape
                filled = (1,) * (len(shape) - len(given)) + given
                self.copied[op.outputs[0].name] = {dim for dim, size in enumerate(filled) if size == 1}
            if op.target in _SAME_FLAGS or op.target in _OPPOSITE_FLAGS:
                name, is_opposite = self._flags(self._given(op)[0])
                self.flags[op.outputs[0].name] = name, is_opposite != (op.target in _OPPOSITE_FLAGS)

    def _pick(self, op: Op) -> None:
        (mask,), rows = self._given(op), self.rows.get(op.inputs[0].name)
        if rows is not None:  # of rows that another mask picks
            if len(mask.shape) != 1:
                raise NotByRow(op.target)
            self.within[op.name] = rows.picked
            mask = self._without(op, mask, rows, False)
        self.places.update((value.name, (op.name, dim)) for dim, value in enumerate(op.outputs))
        self.masks[op.name] = mask

    def _flags(self, mask: Value) -> tuple[str, bool]:
        return self.flags.get(mask.name, (mask.name, False))

    def _given(self, op: Op) -> tuple[Value, ...]:
        return tuple(self.now.get(value.name, value) for value in op.inputs)

    def _keep(self, op: Op) -> None:
        given = self._given(op)
        self.builder.ops.append(op if given == op.inputs else replace(op, inputs=given))

    def _emit(self, op: Op, target: str, *args: Any, **kwargs: Any) -> Value:
        at = Origin(op.outputs[0].name, op.module, op.line, op.is_no_grad)
        return self.builder.emit(target, args, kwargs, at=at)[0]

    def _mask(self, op: Op, rows: _PickedRows, num_dims: int) -> Value:
        """The mask of a value of `num_dims` dims with these rows."""
        mask = self.masks[rows.picked]
        shape = (math.prod(mask.shape), *(1,) * (num_dims - rows.dim - 1))
        return mask if mask.shape == shape else self._emit(op, "aten.reshape.default", mask, shape)

    def _without(self, op: Op, x: Value, rows: _PickedRows, number: float) -> Value:
        """`x` with `number` in the rows that were not picked."""
        return self._emit(op, "aten.where.ScalarOther", self._mask(op, rows, len(x.shape)), x, number)

    def _read_or_write(self, op: Op) -> None:
        is_read = op.target == "aten.index.Tensor"
        if not is_read and op.target != "aten.index_put.default":
            raise NotByRow(op.target)
        indices = arguments_of(op)["indices"]
        slots = [index for index in indices if isinstance(index, Slot)]
        first = len(indices) - len(slots)
        places = [self.places.get(op.inputs[slot.index].name, ("", -1)) for slot in slots]
        picked = places[0][0]
        of_values = {value.name for value in (op.inputs[0], op.inputs[-1])} if not is_read else {op.inputs[0].name}
        is_whole = picked and places == [(picked, dim) for dim in range(len(self.masks[picked].shape))]
        own, within = self.rows.get(op.inputs[0].name), self.within.get(picked)
        is_of_mask = own is None if within is None else is_read and own == _PickedRows(within, first)
        if not is_whole or any(i is not None for i in indices[:first]) or not is_of_mask:
            raise NotByRow(op.target)
        if any(name in self.places for name in of_values):
            raise NotByRow(op.target)
        x, mask = self.now.get(op.inputs[0].name, op.inputs[0]), self.masks[picked]
        if x.shape[first : first + len(places)] != mask.shape:
            raise NotByRow(op.target)
        rows = _PickedRows(picked, first)
        flat_shape = (*x.shape[:first], math.prod(mask.shape), *x.shape[first + len(places) :])
        flat = x if x.shape == flat_shape else self._emit(op, "aten.reshape.default", x, flat_shape)
        if is_read:
            number = _FLOAT if x.dtype.is_floating_point or x.dtype.is_complex else _INTEGER
            self.now[op.outputs[0].name] = self._without(op, flat, rows, number)
            self.rows[op.outputs[0].name] = rows
        else:
            self._write(op, flat, rows)

    def _write(self, op: Op, flat: Value, rows: _PickedRows) -> None:
        """x[mask] = values, or += values."""
        values, of_values = self._given(op)[-1], self.rows.get(op.inputs[-1].name)
        end = rows.dim - len(flat.shape)
        if of_values is None and len(values.shape) >= -end and values.shape[end] != 1:
            raise NotByRow(op.target)
        if of_values is not None and (of_values.picked != rows.picked or of_values.dim - len(values.shape) != end):
            raise NotByRow(op.target)
        mask = self._mask(op, rows, len(flat.shape))
        if arguments_of(op)["accumulate"]:
            values = self._emit(op, "aten.add.Tensor", flat, values)
        written = self._emit(op, "aten.where.self", mask, values, flat)
        shape = op.outputs[0].shape
        self.now[op.outputs[0].name] = (
            written if written.shape == shape else self._emit(op, "aten.reshape.default", written, shape)
        )

    def _scatter(self, op: Op, rows: _PickedRows) -> None:
        """x.masked_scatter(mask, rows) of the rows that this mask picks."""
        x, mask, values = self._given(op)
        picked = self.masks[rows.picked]
        of_rows = picked.shape
        ones = (1,) * (len(x.shape) - len(of_rows))
        is_leading = x.shape[: len(of_rows)] == mask.shape[: len(of_rows)] == of_rows
        is_whole = is_leading and math.prod(x.shape) == math.prod(values.shape)
        if rows.dim or self._flags(mask) != self._flags(picked) or not is_whole:
            raise NotByRow(op.target)
        whole = values if values.shape == x.shape else self._emit(op, "aten.reshape.default", values, x.shape)
        flags = picked if not ones else self._emit(op, "aten.reshape.default", picked, (*picked.shape, *ones))
        self.now[op.outputs[0].name] = self._emit(op, "aten.where.self", flags, whole, x)

    def _compute(self, op: Op) -> None:
        rows = [self.rows.get(value.name) for value in op.inputs]
        if len({each.picked for each in rows if each is not None}) > 1:
            raise NotByRow(op.target)
        picked = next(each.picked for each in rows if each is not None)
        dims = [None if each is None else each.dim for each in rows]
        if op.target in PARTS_WRITTEN and rows[0] is not None and rows[1] is None:
            at = row_of_part(op, rows[0].dim)
            dims[1] = at if at in self.copied.get(op.inputs[1].name, ()) else None
        dim = row_dim(op, dims)
        if dim is not None:
            self._keep(op)
            self.rows.update((value.name, _PickedRows(picked, dim)) for value in op.outputs)
            if any(value.needs_grad and each is None for value, each in zip(op.inputs, rows)):
                self._end_gradients(op)
        elif op.target in _NEUTRAL and rows[0] is not None:
            self._reduce(op, rows[0])
        elif op.target in ELEMENTWISE_LOSSES:
            self._elementwise_loss(op, [None if each is None else each.dim for each in rows], picked)
        elif op.target in _TOKEN_LOSSES:
            self._token_loss(op)
        elif op.target in _ADDING:
            self._add(op)
        elif op.target == "aten.masked_scatter.default" and rows[0] is rows[1] is None:
            self._scatter(op, next(each for each in rows if each is not None))
        else:
            raise NotByRow(op.target)

    def _end_gradients(self, op: Op) -> None:
        """No gradient of a row that was not picked reaches what `op` reads for all rows: it is zero times what the ops
        behind give for a number that means nothing, which may be infinite (the root of a difference of equal numbers).
        """
        for value in (value for value in op.outputs if value.needs_grad):
            self.now[value.name] = self._without(op, value, self.rows[value.name], _FLOAT)

    def _reduce(self, op: Op, rows: _PickedRows) -> None:
        x, arguments = self._given(op)[0], arguments_of(op)
        given = arguments.get("dim")
        listed = (given,) if isinstance(given, int) else given or range(len(x.shape))
        dims = tuple(dim % len(x.shape) for dim in listed)
        if rows.dim not in dims or (not x.dtype.is_floating_point and _NEUTRAL[op.target]):
            raise NotByRow(op.target)
        kept = self._without(op, x, rows, _NEUTRAL[op.target])
        if op.target in _MEANS:
            others = math.prod(x.shape[dim] for dim in dims if dim != rows.dim)
            named = {"dim": dims, "keepdim": bool(arguments.get("keepdim"))}
            self.now[op.outputs[0].name] = self._mean(op, kept, rows, others, **named)
        else:
            self.now[op.outputs[0].name] = self._again(op, op.args, (kept, *self._given(op)[1:]))

    def _again(self, op: Op, args: Any, inputs: tuple[Value, ...]) -> Value:
        return self._emit(op, op.target, *fill(args, inputs), **{name: fill(v, inputs) for name, v in op.kwargs})

    def _mean(self, op: Op, terms: Value, rows: _PickedRows, others: int, **dims: Any) -> Value:
        """The sum of `terms` over `dims` by the number of rows that were picked, times `others`."""
        wanted = op.outputs[0].dtype
        exact = wanted if wanted in (torch.float32, torch.float64) else torch.float32
        total = self._emit(op, "aten.sum.dim_IntList", terms, dims["dim"], dims["keepdim"], dtype=exact)
        count = self._emit(op, "aten.sum.default", self.masks[rows.picked])
        count = self._emit(op, "aten.to.dtype", count, exact)
        if others != 1:
            count = self._emit(op, "aten.mul.Scalar", count, others)
        mean = self._emit(op, "aten.div.Tensor", total, count)
        return mean if exact == wanted else self._emit(op, "aten.to.dtype", mean, wanted)

    def _elementwise_loss(self, op: Op, dims: list[int | None], picked: str) -> None:
        reduction, single = _unreduced(op)
        terms = self._again(single, single.args, self._given(op))
        dim = row_dim(replace(single, outputs=(terms,)), dims)
        if reduction == _NONE or dim is None:
            raise NotByRow(op.target)
        rows = _PickedRows(picked, dim)
        kept = self._without(op, terms, rows, 0)
        every = tuple(range(len(terms.shape)))
        if reduction == _MEAN:
            others = math.prod(terms.shape) // terms.shape[dim]
            self.now[op.outputs[0].name] = self._mean(op, kept, rows, others, dim=every, keepdim=False)
        else:
            self.now[op.outputs[0].name] = self._emit(op, "aten.sum.default", kept)

    def _token_loss(self, op: Op) -> None:
        """A loss of each row is one of its rows; of others the targets of rows that were not picked are ignored."""
        arguments, given = arguments_of(op), list(self._given(op))
        target = arguments["target"].index
        rows, of_logits = self.rows.get(op.inputs[target].name), self.rows.get(op.inputs[0].name)
        is_index = not op.inputs[target].dtype.is_floating_point
        if rows is None or of_logits is None or rows.dim or of_logits.dim or not is_index:
            raise NotByRow(op.target)
        if arguments["reduction"] == _NONE:
            self.rows[op.outputs[0].name] = rows
        else:
            given[target] = self._without(op, given[target], rows, arguments["ignore_index"])
        self.now[op.outputs[0].name] = self._again(op, op.args, tuple(given))

    def _add(self, op: Op) -> None:
        """Rows that are added to places of a tensor, which they name: nothing is added by the others."""
        arguments, given = arguments_of(op), list(self._given(op))
        at = {name: arguments[name].index for name in arguments if isinstance(arguments[name], Slot)}
        source = at["source" if "source" in at else "src"]
        rows, of_index = self.rows.get(op.inputs[source].name), self.rows.get(op.inputs[at["index"]].name)
        dim = arguments["dim"] % len(op.inputs[0].shape)
        is_by_row = rows is not None and of_index is not None and (rows.dim == dim or op.target == _ADDING[1])
        if op.inputs[0].name in self.rows or not is_by_row or rows is None or of_index is None:
            raise NotByRow(op.target)
        if of_index.dim != (0 if op.target == _ADDING[0] else rows.dim):
            raise NotByRow(op.target)
        given[source] = self._without(op, given[source], rows, 0)
        self.now[op.outputs[0].name] = self._again(op, op.args, tuple(given))


def _unreduced(op: Op) -> tuple[int, Op]:
    """The reduction of a loss, and the loss without one."""
    reduction = arguments_of(op)["reduction"]
    position = [argument.name for argument in resolve(op.target)._schema.arguments].index("reduction")
    if position < len(op.args):
        return reduction, replace(op, args=(*op.args[:position], _NONE, *op.args[position + 1 :]))
    kwargs = dict(op.kwargs) | {"reduction": _NONE}
    return reduction, replace(op, kwargs=tuple(kwargs.items()))
