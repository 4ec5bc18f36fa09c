"""`autopar.scan`: a loop over steps as one op.

Backward computes each step again from what was carried into it, so that of all that the steps compute only this is
kept. It adds up gradients from the last step to the first, as autograd does that of a loop that is written out.
"""

from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.ir.loops.body import body_called, function_of
from autopar.torch_compat import FakeTensor

SCAN = "autopar.scan.default"
Tensor = torch.Tensor

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "scan(Tensor[] carried, Tensor[] sliced, Tensor[] invariant, str body, int[] dims, int[] starts, int[] strides,"
    " int steps) -> Tensor[]"
)


def scan(
    carried: Sequence[Tensor],
    sliced: Sequence[Tensor],
    invariant: Sequence[Tensor],
    body: str,
    dims: Sequence[int],
    starts: Sequence[int],
    strides: Sequence[int],
    steps: int,
) -> list[Tensor]:
    """The values that the last of `steps` steps carries on, then those that all give out, stacked along dim 0.

    Step t reads `sliced[i]` at index `starts[i] + t * strides[i]` of dim `dims[i]`.
    """
    slices = tuple(zip(dims, starts, strides))
    return list(_Scan.apply(body, slices, steps, len(carried), *carried, *sliced, *invariant))


_LIBRARY.impl("scan", scan, "CompositeImplicitAutograd")

Slices = tuple[tuple[int, int, int], ...]


def _has_no_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _at(step: int, slices: Slices, sliced: Sequence[Tensor]) -> list[Tensor]:
    return [x.select(dim, start + step * stride) for x, (dim, start, stride) in zip(sliced, slices)]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, body: str, slices: Slices, steps: int, num_carried: int, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.num_carried = (body, slices, steps), num_carried
        carried, function = tensors[:num_carried], function_of(body)
        sliced, invariant = tensors[num_carried:][: len(slices)], tensors[num_carried + len(slices) :]
        keeps = any(ctx.needs_input_grad)
        kept = [x.new_empty((steps, *x.shape)) for x in carried] if keeps else []
        given_out: list[Tensor] = []
        for step in range(1 if _has_no_data(tensors[0]) else steps):  # then all steps are alike
            for stacked, x in zip(kept, carried):
                stacked[step].copy_(x)
            results = function(*carried, *_at(step, slices, sliced), *invariant)
            carried = results[:num_carried]
            given_out = given_out or [x.new_empty((steps, *x.shape)) for x in results[num_carried:]]
            for stacked, x in zip(given_out, results[num_carried:]):
                stacked[step].copy_(x)
        ctx.save_for_backward(*kept, *sliced, *invariant)
        results = (*(x.clone() for x in carried), *given_out)  # an input may be returned as it is
        ctx.mark_non_differentiable(*(x for x in results if not x.dtype.is_floating_point and not x.is_complex()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise AutoparError(
                "a loop over steps has no second derivative, create_graph=True: call the model as it was before"
                " autopar.compile for that"
            )
        (name, slices, steps), num = ctx.call, ctx.num_carried
        body, function = body_called(name), function_of(name)
        kept, given = ctx.saved_tensors[:num], ctx.saved_tensors[num:]
        sliced, invariant = given[: len(slices)], given[len(slices) :]
        sums = _LoopGradients(slices, given, ctx.needs_input_grad[4 + num :])
        carried = list(gradients[:num])
        for step in reversed(range(1 if _has_no_data((*kept, *given)[0]) else steps)):
            read = (*(x[step] for x in kept), *_at(step, slices, sliced), *invariant)
            tracked = [value.needs_grad for value in body.inputs]
            leaves = [x.detach().requires_grad_(is_tracked) for x, is_tracked in zip(read, tracked)]
            with torch.enable_grad():
                results = function(*leaves)
            of_results = (*carried, *(None if g is None else g[step] for g in gradients[num:]))
            found = _gradients(results, of_results, leaves)
            carried = list(found[:num])
            sums.add(step, found[num:])
        return None, None, None, None, *carried, *sums.totals


def _gradients(
    results: Sequence[Tensor], of_results: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradient of each leaf; None of one that has none."""
    pairs = [(x, g) for x, g in zip(results, of_results) if g is not None and x.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return [next(found) if x.requires_grad else None for x in leaves]


class _LoopGradients:
    """The gradients of the inputs that steps read a slice of, or all of."""

    def __init__(self, slices: Slices, given: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self.slices, self.wanted = slices, wanted
        self.totals: list[Tensor | None] = [
            torch.zeros_like(x) if is_wanted and number < len(slices) else None
            for number, (x, is_wanted) in enumerate(zip(given, wanted))
        ]

    def add(self, step: int, found: Sequence[Tensor | None]) -> None:
        """Take the gradients of one step."""
        for number, gradient in enumerate(found):
            if gradient is None or not self.wanted[number]:
                continue
            total = self.totals[number]
            if number < len(self.slices):
                dim, start, stride = self.slices[number]
                assert total is not None
                total.select(dim, start + step * stride).add_(gradient)
            else:
                self.totals[number] = gradient if total is None else total + gradient
