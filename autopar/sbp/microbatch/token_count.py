"""Numbers of the whole batch that are known before its microbatches run: the weight of a loss's tokens, by which a mean
is divided, and what else follows from arguments and buffers alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from autopar.errors import MicrobatchError
from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.graph import Graph, Input, Op, Value, arguments_of
from autopar.ir.interpret import constants_for
from autopar.ir.op_facts import is_random
from autopar.sbp.local_ops._arguments import sum_dtype
from autopar.sbp.rules._by_name import optional_tensor, tensor_of


@dataclass(frozen=True)
class LossCount:
    """An argument `input` of a microbatch's graph, the same in all or a slice, and the `graph` that computes the whole.

    The only output of `graph`, from the whole batch's arguments, buffers and constants, is 1 / the number of tokens
    that are not ignored, or 1 / the sum of their classes' weights, or the value of an op of the whole graph.
    """

    input: Input
    graph: Graph


def loss_count(graph: Graph, op: Op, name: str) -> LossCount:
    """The token count of `op`, a mean over tokens in the whole-batch `graph`, as an argument called `name`.

    MicrobatchError if targets or weights depend on parameters or random numbers, which are not known before the step,
    and for a loss in float16, in which a sum of terms may overflow.
    """
    (loss,), target, weight = op.outputs, tensor_of(op, "target"), optional_tensor(op, "weight")
    if loss.dtype == torch.float16:
        raise MicrobatchError(
            f"{_where(op)} would sum the losses of a microbatch's tokens, which can overflow float16: compute it from"
            " logits.float()"
        )
    ops, inputs = _known_before(graph, op, [value for value in (target, weight) if value is not None])
    builder = OpBuilder(list(ops))
    builder.used_names.update(value.name for item in (*graph.ops, *graph.inputs) for value in _values(item))
    result = _inverse(
        builder,
        target,
        weight,
        arguments_of(op)["ignore_index"],
        sum_dtype(loss.dtype),
        Origin(name, op.module, op.line),
    )
    return _computed(graph, inputs, builder.ops, result, name)


def known_ops(graph: Graph) -> frozenset[str]:
    """The ops whose results follow from arguments, buffers and constants, and have no gradient."""
    unknown = {item.value.name for item in graph.of_kind("parameter")}
    known = set()
    for op in graph.ops:
        is_unknown = is_random(op) or any(value.needs_grad for value in (*op.inputs, *op.outputs))
        if is_unknown or any(value.name in unknown for value in op.inputs):
            unknown.update(value.name for value in op.outputs)
        else:
            known.add(op.name)
    return frozenset(known)


def is_known(graph: Graph, value: Value) -> bool:
    """Whether `value` follows from arguments, buffers and constants."""
    known = graph.once(known_ops)
    return all(op.name in known for op in graph.ops if value in op.outputs)


def known_value(graph: Graph, op: Op, result: Value, name: str) -> LossCount:
    """The `result` of `op`, one of `known_ops`, as an argument called `name`."""
    ops, inputs = _known_before(graph, op, [result])
    return _computed(graph, inputs, ops, result, name)


def _computed(graph: Graph, inputs: tuple[Input, ...], ops: Iterable[Op], result: Value, name: str) -> LossCount:
    constant_ops, constants = constants_for(graph, {item.value.name for item in inputs})
    count = replace(
        graph,
        inputs=inputs,
        ops=tuple(ops),
        outputs=(result,),
        mutations=(),
        constant_ops=constant_ops,
        constants=constants,
        output_spec=None,
    )
    return LossCount(Input("argument", replace(result, name=name), name), count)


def _where(op: Op) -> str:
    return f"{op.target} at %{op.name} ({' '.join(filter(None, (op.module, op.line)))})"


def _values(item: Op | Input) -> tuple[Value, ...]:
    return item.outputs if isinstance(item, Op) else (item.value,)


def _known_before(graph: Graph, loss: Op, wanted: Iterable[Value]) -> tuple[tuple[Op, ...], tuple[Input, ...]]:
    """The ops and inputs that the `wanted` operands of the loss are computed from."""
    names = {value.name for value in wanted}
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if any(value.name in names for value in op.outputs):
            ops.append(op)
            names.update(value.name for value in op.inputs)
    inputs = tuple(item for item in graph.inputs if item.value.name in names)
    unknown = [f"parameter {item.fqn}" for item in inputs if item.kind == "parameter"] + [
        f"%{op.name}" for op in ops if is_random(op)
    ]
    if unknown:
        raise MicrobatchError(
            f"{_where(loss)} is a mean over tokens whose number depends on {unknown[0]}; it must be known before the"
            " first microbatch: compute the targets from the model's arguments, or sum the losses and divide by a"
            " number of your own"
        )
    return tuple(reversed(ops)), inputs


def _inverse(
    builder: OpBuilder, target: Value, weight: Value | None, ignored: int, dtype: torch.dtype, at: Origin
) -> Value:
    """1 / the weight of all targets that are not `ignored`."""

    def call(name: str, *args: object, **kwargs: object) -> Value:
        return builder.emit(f"aten.{name}", args, kwargs, at=at)[0]

    counted = call("ne.Scalar", target, ignored)
    if weight is not None:
        zero = call("zeros_like.default", target)
        weights = call("index.Tensor", weight, [call("where.self", counted, target, zero)])
        counted = call("mul.Tensor", weights, counted)
    total = call("to.dtype", call("sum.default", counted), torch.float64)
    return call("to.dtype", call("reciprocal.default", total), dtype)
