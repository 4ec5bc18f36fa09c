"""`autopar.advance`: values of a loop's last traced step, some steps later; an op of traces alone.

Result i is what `last[which[i]]` is `by[i]` steps later, or if `num[i]` is positive, what it is in so many steps from
there on, stacked along dim 0.
"""

from typing import Any

import torch

from autopar.torch_compat import below_autograd, without_function_modes

ADVANCE = "autopar.advance.default"

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("advance(Tensor[] last, int[] which, int[] by, int[] num) -> Tensor[]")


def _make(last: list[torch.Tensor], which: list[int], by: list[int], num: list[int]) -> list[torch.Tensor]:
    tensors = [last[i] for i in which]
    return [
        x.new_empty((n, *x.shape)) if n else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for x, n in zip(tensors, num)
    ]


class _AdvanceWithGradient(torch.autograd.Function):
    """The op under autograd: a result needs a gradient if the value of the last step does."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, last: list[torch.Tensor], which: list[int], *counts: list[int]
    ) -> tuple[torch.Tensor, ...]:
        with below_autograd():
            results = torch.ops.autopar.advance(last, which, *counts)
        ctx.mark_non_differentiable(*(x for x, i in zip(results, which) if not last[i].requires_grad))
        return tuple(results)


def _make_with_gradient(
    last: list[torch.Tensor], which: list[int], by: list[int], num: list[int]
) -> list[torch.Tensor]:
    with without_function_modes():
        return list(_AdvanceWithGradient.apply(torch.empty(0, requires_grad=True), last, which, by, num))


_LIBRARY.impl("advance", _make, "Meta")
_LIBRARY.impl("advance", _make_with_gradient, "Autograd")
