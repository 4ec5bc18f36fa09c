"""Custom `torch.autograd.Function`s on parts, run as the ops that they are made of."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.ir.functions.function_body import body_of
from autopar.ir.functions.function_passes import MAX, MIN, SUM, Reduce, function_called, passes_of
from autopar.ir.graph import Op
from autopar.sbp.axis import Axis
from autopar.sbp.convert import all_reduce
from autopar.sbp.functions.function_splits import split_of
from autopar.sbp.local_ops.local_op import LocalOp
from autopar.sbp.placement import I, local_shape
from autopar.sbp.redistribute import Collective
from autopar.sbp.signature import Strategy

TARGET = "autopar.custom_function.default"
_OPS = {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX, MIN: dist.ReduceOp.MIN}
Roles = Mapping[str, Sequence[Axis]]


def custom_function(*tensors: torch.Tensor, function: str, **roles: Sequence[Axis]) -> Any:
    """The results of the local function of this name; `roles` are the axes over which it reduces."""
    results = _AsOps.apply(function, roles, *tensors)
    return results[0] if len(results) == 1 else results


class _AsOps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, roles: Roles, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.name, ctx.roles, ctx.num_inputs = name, roles, len(tensors)
        forward, _ = passes_of(name)
        results, saved = forward(_reducing(roles), *(x.contiguous() for x in tensors))  # as they were traced
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*(x for x in results if not x.dtype.is_floating_point and not x.is_complex()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise AutoparError(
                "a custom autograd.Function that is split has no second derivative, create_graph=True: call the model"
                " as it was before autopar.compile for that"
            )
        _, backward = passes_of(ctx.name)
        wanted = function_called(ctx.name).body.output_gradients
        given = [gradient.contiguous() for gradient, value in zip(gradients, wanted) if value is not None]
        found = backward(_reducing(ctx.roles), *ctx.saved_tensors, *given)
        return None, None, *found


def _reducing(roles: Roles) -> Reduce:
    def reduce(x: torch.Tensor, kind: str, over: tuple[str, ...]) -> torch.Tensor:
        for axis in (axis for role in over for axis in roles[role] if axis.size > 1):
            x = all_reduce(x, axis, _OPS[kind])
        return x

    return reduce


def _collectives(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Collective, ...]:
    """An all-reduce of each value that the function reduces, over each axis whose split does so."""
    body, found = body_of(op), list[Collective]()
    assert body is not None, f"{op.target} has a role but is not known as ops"
    splits = [split_of(op, signature) for signature in strategy.signatures]
    for number, inner in enumerate(body.ops):
        phase = "forward" if number < body.num_forward else "backward"
        for slot, value in enumerate(inner.outputs):
            placed = tuple(I if split is None else split.of_ops[inner.name].outputs[slot] for split in splits)
            size = math.prod(local_shape(value.shape, placed, mesh_shape)) * value.dtype.itemsize
            axes = [axis for axis, split in enumerate(splits) if split is not None and value.name in split.reductions]
            found += [Collective("all_reduce", (axis,), size, phase) for axis in axes if mesh_shape[axis] > 1]
    return tuple(found)


LOCAL_OPS = {TARGET: LocalOp(custom_function, _collectives)}
