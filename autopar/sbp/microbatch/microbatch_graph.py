"""`microbatched`: the graph of one microbatch; the microbatches of a step together compute the whole batch's result.

Outputs that are terms (a loss) are summed over the microbatches, slices are concatenated along their dim, all other
outputs are equal in all microbatches. The gradients of parameters and of whole arguments are summed, as autograd does
when backward runs once for each microbatch.

A mean over the batch is the sum over m equal parts of their means / m. A mean over tokens that are not ignored divides
by their number in the whole batch, which is an argument of the graph: the loss is the sum of its tokens' terms times 1
/ that number. So is what follows from arguments and buffers alone and is read whole, as `w.sum()` of a masked mean
`(loss * w).sum() / w.sum()`, or what rows alone do not give, as `x[order]`, of which each microbatch has a slice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.errors import MicrobatchError
from autopar.ir.graph import Graph, Op, Slot, Value, arguments_of
from autopar.ir.guards.guard_ops import GUARDED
from autopar.ir.op_facts import is_random
from autopar.sbp.analysis.expert_routing import INVERSE
from autopar.sbp.localize import localize
from autopar.sbp.microbatch.split_batch import (
    KNOWN,
    KNOWN_REDUCTION,
    KNOWN_ROWS,
    BatchSplit,
    is_share,
    num_samples,
    split_samples,
)
from autopar.sbp.microbatch.token_count import LossCount, is_known, known_value, loss_count
from autopar.sbp.placement import I, P, Placement, R, local_shape
from autopar.sbp.rules._by_name import argument_names, optional_tensor, tensor_of
from autopar.sbp.rules.loss import SUM
from autopar.sbp.signature import Strategy

KNOWN_ROLES = (KNOWN, KNOWN_REDUCTION, KNOWN_ROWS)


@dataclass(frozen=True)
class Microbatched:
    """The `graph` of one of `num_microbatches`, with the names of the whole graph.

    `placements`: name of each input and output -> its placement on the time axis: S(d) cut in consecutive slices
        (constants too, which the graph's `constant_ops` compute whole), P summed, I the same in all microbatches.
    `counts`: further "argument" inputs of `graph`, which are not among its `arguments`.
    `alike`: random ops that must draw the same numbers in all microbatches, since their results are whole.
    `added`: op or input that the whole graph lacks -> the op of the whole graph that it was added for; it stands next
        to that op and is named after it.
    """

    graph: Graph
    num_microbatches: int
    placements: Mapping[str, Placement]
    counts: tuple[LossCount, ...] = ()
    alike: tuple[str, ...] = ()
    added: Mapping[str, str] = field(default_factory=dict)


def microbatched(graph: Graph, num_microbatches: int) -> Microbatched:
    """The graph of one of `num_microbatches` microbatches of the whole-batch `graph`; with one, the graph unchanged. It
    is made once, and kept as long as `graph`.

    MicrobatchError for an op that needs the whole batch at once (batch norm in training above all), naming the op and
    its module, and for a number that does not divide the batch, naming the nearest that do.
    """
    if num_microbatches == 1:
        values = [item.value for item in graph.inputs] + [value for value in graph.outputs if isinstance(value, Value)]
        return Microbatched(graph, 1, {value.name: I for value in values})
    made = graph.once(_made)
    if num_microbatches not in made:
        split = graph.once(split_samples)
        _check_count(graph, split, num_microbatches)
        writing = _Writing(graph, split, num_microbatches)
        for op in graph.ops:
            writing.add(op)
        made[num_microbatches] = writing.finish()
    return made[num_microbatches]


def _made(_: Graph) -> dict[int, Microbatched]:
    """The microbatches made so far, by their number."""
    return {}


def microbatch_counts(graph: Graph) -> tuple[int, ...]:
    """The possible numbers of microbatches of `graph`, ascending; (1,) if its batch cannot be split."""
    try:
        granularity = graph.once(split_samples).granularity
    except MicrobatchError:
        return (1,)
    return tuple(count for count in range(1, granularity + 1) if granularity % count == 0)


def _check_count(graph: Graph, split: BatchSplit, count: int) -> None:
    if count >= 1 and split.granularity % count == 0:
        return
    possible = [number for number in range(1, split.granularity + 1) if split.granularity % number == 0]
    near = sorted(
        {
            max((n for n in possible if n < count), default=1),
            min((n for n in possible if n > count), default=possible[-1]),
        }
    )
    raise MicrobatchError(
        f"a batch of {num_samples(graph)} cannot be cut in {count} equal microbatches; the nearest numbers that divide"
        f" all that is split with it: {', '.join(map(str, near))}"
    )


class _Writing:
    """A walk over the whole graph that writes the graph of a microbatch."""

    def __init__(self, graph: Graph, split: BatchSplit, count: int) -> None:
        self.graph, self.split, self.count = graph, split, count
        self.names = {name for op in graph.ops for name in (op.name, *(value.name for value in op.outputs))}
        self.names |= {item.value.name for item in graph.inputs}
        self.values = {item.value.name: self._local(item.value) for item in graph.inputs}
        self.ops: list[Op] = []
        self.counts: list[LossCount] = []
        self.alike: list[str] = []
        self.added: dict[str, str] = {}
        self.placed: dict[str, Placement] = {}  # of values that are known before, where each microbatch has a slice

    def _local(self, value: Value) -> Value:
        return replace(value, shape=local_shape(value.shape, (self.split.placements[value.name],), (self.count,)))

    def _unique(self, stem: str) -> str:
        name = next(
            name for name in (stem, *(f"{stem}_{i}" for i in range(1, len(self.names) + 2))) if name not in self.names
        )
        self.names.add(name)
        return name

    def add(self, op: Op) -> None:
        """Write `op` with the local arguments of a microbatch."""
        signature = self.split.signatures[op.name]
        if signature.role in KNOWN_ROLES:
            self._add_known(op)
            return
        operands = [
            self._share(v, op) if is_share(op, signature, i, self.split.placements) else v
            for i, v in enumerate(op.inputs)
        ]
        inputs = tuple(self.values[value.name] for value in operands)
        if signature.role == INVERSE:
            inputs = (*inputs[:2], self._first(inputs[2], inputs[1].shape, op))
        args, kwargs = localize(op, Strategy((signature,)), (self.count,))
        outputs = tuple(map(self._local, op.outputs))
        self.values.update((value.name, value) for value in outputs)
        local = replace(op, args=args, kwargs=kwargs, inputs=inputs, outputs=outputs)
        if is_random(op) and not any(placement.is_split for placement in signature.outputs):
            self.alike.append(op.name)
        if signature.role == "tokens" and not _has_probabilities(op):
            is_counted = optional_tensor(op, "weight") is not None or is_known(self.graph, tensor_of(op, "target"))
            self._add_counted(local) if is_counted else self._add_guarded(local)
        elif signature.role and signature.role != INVERSE:
            self._add_averaged(local)
        else:
            self.ops.append(local)

    def _share(self, value: Value, user: Op | None) -> Value:
        """A term of `value`, which is the same in all microbatches: their sum is the value."""
        share = replace(value, name=self._unique(f"{user.name if user else value.name}_share"))
        self.values[share.name] = share
        self._call(share.name, "aten.div.Tensor", (Slot(0), float(self.count)), (self.values[value.name],), share, user)
        return share

    def _first(self, value: Value, shape: tuple[int, ...], user: Op) -> Value:
        """The first numbers of `value`, as many as fill `shape`."""
        first = replace(value, name=self._unique(f"{user.name}_first"), shape=shape)
        self._call(first.name, "aten.slice.Tensor", (Slot(0), 0, 0, shape[0]), (value,), first, user)
        return first

    def _call(
        self, name: str, target: str, args: tuple[Any, ...], inputs: tuple[Value, ...], output: Value, origin: Op | None
    ) -> None:
        at = (origin.is_no_grad, origin.module, origin.line) if origin else (False, "", "")
        if origin:
            self.added[name] = origin.name
        self.ops.append(Op(name, target, args, (), inputs, (output,), *at))

    def _add_known(self, op: Op) -> None:
        """Write `op`, whose results are there before the microbatches, as views of them: every op has its place."""
        for output in op.outputs:
            name = op.name if output is op.outputs[0] else self._unique(op.name)
            known = known_value(self.graph, op, output, self._unique(f"{output.name}_of_all"))
            local = self._local(output)
            given = replace(known.input, value=replace(local, name=known.input.value.name))
            self.counts.append(replace(known, input=given))
            self.added |= dict.fromkeys((given.value.name, *([] if name == op.name else [name])), op.name)
            self.placed[given.value.name] = self.split.placements[output.name]
            self.values[output.name] = local
            at = (op.is_no_grad, op.module, op.line)
            self.ops.append(Op(name, "aten.alias.default", (Slot(0),), (), (given.value,), (local,), *at))

    def _add_averaged(self, op: Op) -> None:
        """Write a mean over equal parts: the mean of this part / the number of parts."""
        (output,) = op.outputs
        own = replace(output, name=self._unique(f"{output.name}_own"))
        self.ops.append(replace(op, outputs=(own,)))
        self._call(
            self._unique(f"{op.name}_share"), "aten.div.Tensor", (Slot(0), float(self.count)), (own,), output, op
        )

    def _add_counted(self, op: Op) -> None:
        """Write a mean over tokens: the sum of this microbatch's terms *
        1 / the number of tokens in the whole batch.
        """
        (output,) = op.outputs
        count = loss_count(self.graph, op, self._unique(f"{op.name}_per_token"))
        self.counts.append(count)
        self.added[count.input.value.name] = op.name
        total = replace(output, name=self._unique(f"{output.name}_sum"))
        bound = arguments_of(op) | {"reduction": SUM}
        self.ops.append(
            replace(op, args=tuple(bound[name] for name in argument_names(op)), kwargs=(), outputs=(total,))
        )
        factor = count.input.value
        mean = (
            output
            if output.dtype == factor.dtype
            else replace(output, name=self._unique(f"{output.name}_mean"), dtype=factor.dtype)
        )
        self._call(self._unique(f"{op.name}_mean"), "aten.mul.Tensor", (Slot(0), Slot(1)), (total, factor), mean, op)
        if mean is not output:
            self._call(self._unique(f"{op.name}_cast"), "aten.to.dtype", (Slot(0), output.dtype), (mean,), output, op)

    def _add_guarded(self, op: Op) -> None:
        """Write a mean over tokens whose targets the parameters choose, so that none may be ignored: each call looks
        for such.
        """
        (output,), target, ignored = op.outputs, tensor_of(op, "target"), arguments_of(op)["ignore_index"]
        share = replace(output, name=self._unique(f"{output.name}_unguarded"))
        self._add_averaged(replace(op, outputs=(share,)))
        is_ignored = Value(self._unique(f"{op.name}_ignored"), target.shape, torch.bool, needs_grad=False)
        number = Value(self._unique(f"{op.name}_num_ignored"), (), torch.int64, needs_grad=False)
        self._call(is_ignored.name, "aten.eq.Scalar", (Slot(0), ignored), (target,), is_ignored, op)
        self._call(number.name, "aten.sum.default", (Slot(0),), (is_ignored,), number, op)
        line = (
            f"{op.line}: in microbatches, the number of targets that are ignored, which must not depend on parameters,"
        )
        args = (Slot(0), (Slot(1),), ("Eq(v0, 0)",), (line,))
        self._call(self._unique(f"{op.name}_guarded"), GUARDED, args, (share, number), output, op)

    def finish(self) -> Microbatched:
        outputs = tuple(self._output(value) if isinstance(value, Value) else value for value in self.graph.outputs)
        inputs = tuple(replace(item, value=self.values[item.value.name]) for item in self.graph.inputs)
        placements = {item.value.name: self._placement(item.value) for item in inputs}
        placements |= {value.name: self._placement(value) for value in outputs if isinstance(value, Value)}
        placements |= {count.input.value.name: self.placed.get(count.input.value.name, I) for count in self.counts}
        inputs += tuple(count.input for count in self.counts)
        graph = replace(self.graph, inputs=inputs, ops=tuple(self.ops), outputs=outputs)
        return Microbatched(graph, self.count, placements, tuple(self.counts), tuple(self.alike), self.added)

    def _output(self, value: Value) -> Value:
        """The output for `value`: a term of it if it has a gradient and is the same in all microbatches.

        Each microbatch's backward starts from its term.
        """
        if value.needs_grad and self.split.placements[value.name] == R:
            return self._share(value, None)
        return self.values[value.name]

    def _placement(self, value: Value) -> Placement:
        """The placement of an input or output, with I for R, which differ in the gradient only; shares are terms."""
        placement = self.split.placements.get(value.name, P)
        return I if placement == R else placement


def _has_probabilities(op: Op) -> bool:
    """Whether the targets of a loss over tokens are probabilities, so that no token is ignored."""
    return len(tensor_of(op, "target").shape) == len(tensor_of(op, "self").shape)
