"""`check_own_rows`: the model's own code on each rank's rows of a batch, and the mean of the ranks' losses."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError, MicrobatchError, PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph, Op, Value
from autopar.ir.interpret import constants_for, run_constants
from autopar.ir.op_facts import is_random
from autopar.ir.trace import trace
from autopar.plain_torch.module_calls import ExampleRun
from autopar.sbp.analysis.megatron_pairs import base_name
from autopar.sbp.microbatch.split_batch import (
    ALLOWED_ROLES,
    BATCH_STATISTICS,
    KNOWN,
    KNOWN_REDUCTION,
    BatchSplit,
    batch_size,
    is_share,
    split_batch,
)
from autopar.sbp.placement import P
from autopar.sbp.signature import Signature
from autopar.torch_compat import pytree

# Ops that give a multiple of their result for a multiple of all that they read, or nearly (a sum of 1 at least).
_LINEAR = """add sub neg sum mean stack cat to _to_copy clone detach alias view reshape flatten squeeze unsqueeze expand
    expand_as select slice index clamp clamp_min where nan_to_num maximum"""
_MOST_BYTES = 2**30  # of constants that are computed to compare their parts


def check_own_rows(graph: Graph, num_parts: int, example: ExampleRun) -> tuple[str, ...]:
    """Sentences on what the mean of the results of `num_parts` parts of the batch depends on, when the model of `graph`
    is run on each alone.

    PlanError, with the op and its line, if rows are computed with other rows, or a loss is no mean of the parts' own.
    Parts are to the model's code what microbatches are, but that it counts rows itself: of a sum over the batch each
    part has a term, of a mean `num_parts` times a term.
    """
    if num_parts == 1:
        return ()
    try:
        split = split_batch(graph, ALLOWED_ROLES - {KNOWN_REDUCTION} | {BATCH_STATISTICS})
    except MicrobatchError as error:
        told = str(error).removesuffix("; use one microbatch").replace("be run on microbatches", "be run in parts")
        raise PlanError(f"torch runs the model on {num_parts} parts of the batch, each by itself: {told}") from error
    remarks = tuple(_of_batch_norm(graph, split, example.model))
    _check_constants(graph, split, num_parts)
    problem = _Scales(graph, split, num_parts, {}).problem()
    if problem:  # the code may divide by the number of its rows, which is a number in the graph
        changed = _changed_numbers(graph, num_parts, example)
        problem = _Scales(graph, split, num_parts, changed).problem() if changed else problem
    if problem:
        raise PlanError(problem)
    return (*remarks, *_of_counts(graph, split))


def seeds_remark(graph: Graph) -> Iterator[str]:
    """The sentence on seeds for a model that draws random numbers."""
    op = next((op for op in graph.ops if is_random(op)), None)
    if op is not None:
        yield (
            f"The model draws random numbers ({_where(op)}): call torch.manual_seed with one seed on ranks that take"
            " the same rows, and with another one for other rows."
        )


def _where(op: Op) -> str:
    return " ".join(part for part in (base_name(op), op.module, op.line) if part)


def _of_batch_norm(graph: Graph, split: BatchSplit, model: nn.Module) -> Iterator[str]:
    ops = [op for op in graph.ops if split.signatures[op.name].role == BATCH_STATISTICS]
    for op in ops:
        if not isinstance(model.get_submodule(op.module), nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            raise PlanError(
                f"{_where(op)} computes statistics of the whole batch, and torch has SyncBatchNorm for modules"
                " nn.BatchNorm1d, 2d and 3d alone: use one of them"
            )
    if ops:
        yield (
            f"Batch norm ({_where(ops[0])}): its statistics are those of the whole batch on GPUs, by SyncBatchNorm;"
            " elsewhere each rank has those of its own rows, and trains another model than one device does."
        )


def _of_counts(graph: Graph, split: BatchSplit) -> Iterator[str]:
    counted = [op for op in graph.ops if split.signatures[op.name].role in ("tokens", KNOWN)]
    if counted:
        yield (
            f"The loss is the mean of the ranks' and microbatches' losses: that of the whole batch if each has as many"
            f" labels that count ({_where(counted[-1])})."
        )


def _check_constants(graph: Graph, split: BatchSplit, num_parts: int) -> None:
    """PlanError if a constant that the model makes for the rows of a batch is another one for other rows."""
    cut = {}
    for item in graph.of_kind("constant"):
        place = split.placements[item.value.name]
        if place.is_split and item.value.num_bytes <= _MOST_BYTES:
            cut[item.value.name] = place.dim
    ops, tensors = constants_for(graph, cut)
    if any(x.is_meta for x in tensors.values()):
        return
    inputs = tuple(item for item in graph.of_kind("constant") if item.value.name in cut)
    found = run_constants(replace(graph, inputs=inputs, constant_ops=ops, constants=tensors), "cpu")
    for name, dim in cut.items():
        parts = found[name].chunk(num_parts, dim)
        if any(part.shape != parts[0].shape or not torch.equal(part, parts[0]) for part in parts[1:]):
            user = next((op for op in graph.ops if any(value.name == name for value in op.inputs)), None)
            raise PlanError(
                f"the model makes a tensor of shape {list(found[name].shape)} that is another one for other rows of"
                f" the batch ({_where(user) if user else name}), and on each of {num_parts} ranks its code makes that"
                " of the first rows; hand it to the model with the batch"
            )


@dataclass
class _Scales:
    """The results of the model's code on a part of the batch, as multiples of what that part has of each value: its
    rows, its term of a sum, or the whole. `changed`: op -> factor by which a number that it multiplies with differs.
    """

    graph: Graph
    split: BatchSplit
    num_parts: int
    changed: Mapping[str, float]
    scales: dict[str, float] = field(default_factory=dict)  # of those that are not 1

    def problem(self) -> str:
        """Why the mean over the parts is not what the model returns; "" if it is."""
        for op in self.graph.ops:
            signature = self.split.signatures[op.name]
            scale = self._of(op, signature)
            if scale is None:
                return (
                    f"{_where(op)} adds up or compares sums over the batch and means, which parts of it scale otherwise"
                )
            if scale != 1.0:
                self.scales.update((value.name, scale) for value in op.outputs)
        return next(filter(None, map(self._of_output, self.graph.outputs)), "")

    def _of_output(self, value: Any) -> str:
        if not isinstance(value, Value) or not value.needs_grad:
            return ""
        is_term = self.split.placements[value.name] == P
        expected, found = float(self.num_parts if is_term else 1), self.scales.get(value.name, 1.0)
        if math.isclose(expected, found):
            return ""
        op = next(op for op in reversed(self.graph.ops) if value in op.outputs)
        what = "a sum over the rows of the batch" if found < expected else "not the mean over the parts"
        return (
            f"the model returns {what} ({_where(op)}), and torch takes the mean of what {self.num_parts} parts of the"
            " batch give: return the mean over the rows that the model is called with"
        )

    def _of(self, op: Op, signature: Signature) -> float | None:
        """The scale of the results of `op`; None where they have none."""
        given = [
            self.scales.get(value.name, 1.0)
            * (self.num_parts if is_share(op, signature, slot, self.split.placements) else 1.0)
            for slot, value in enumerate(op.inputs)
        ]
        makes_mean = signature.role in ("mean", "tokens") or (signature.role == KNOWN and base_name(op) == "mean")
        scale = self._of_inputs(op, signature, given)
        if scale is None:
            return None
        if signature.role == KNOWN:  # the whole batch's, which a part's own code has of its rows
            return scale if makes_mean else scale / self.num_parts
        return scale * (self.num_parts if makes_mean else 1.0) * self.changed.get(op.name, 1.0)

    def _of_inputs(self, op: Op, signature: Signature, given: list[float]) -> float | None:
        name, others = base_name(op), [x for x, p in zip(given, signature.inputs) if p != P]
        terms = {x for x, p in zip(given, signature.inputs) if p == P}
        if all(x == 1.0 for x in given):
            return 1.0
        if name == "mul":
            return math.prod(given)
        if name in ("div", "reciprocal"):
            return given[0] / math.prod(given[1:]) if name == "div" else 1.0 / given[0]
        if len(terms) == 1 and all(x == 1.0 for x in others):
            return next(iter(terms))  # the op is linear in its terms
        if len(set(given)) == 1 and name in _LINEAR.split():
            return given[0]
        return None


def _changed_numbers(graph: Graph, num_parts: int, example: ExampleRun) -> dict[str, float]:
    """Op that multiplies or divides by a number -> the factor by which that of the model's code differs if it is run on
    a part of the batch; {} if it cannot be traced.
    """
    rows = batch_size(graph)

    def part(x: torch.Tensor) -> torch.Tensor:
        return x[: rows // num_parts] if x.ndim and len(x) == rows else x

    args, kwargs = pytree.tree_map_only(torch.Tensor, part, (tuple(example.args), dict(example.kwargs)))
    try:
        own = trace(skeleton(example.model), args, kwargs)
    except AutoparError:
        return {}
    alike = {op.name: op for op in own.ops}
    return {op.name: factor for op in graph.ops if (factor := _factor(op, alike.get(op.name))) != 1.0}


def _factor(op: Op, other: Op | None) -> float:
    if other is None or other.target != op.target or base_name(op) not in ("mul", "div"):
        return 1.0
    pairs = [
        (a, b)
        for a, b in zip(op.args, other.args)
        if all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b)) and a and b
    ]
    return math.prod((b / a) if base_name(op) == "mul" else (a / b) for a, b in pairs)
