"""Functions of torch that look at values: each is written out while a model is exported, or recorded as an op.

`torch.equal` and `torch.allclose` give Python's answer, of which a branch is a condition of the tensors compared.
`torch.cond` of a tensor is refused.
`one_hot` without a number of classes has one for each index up to the largest, which is a condition too.
`gaussian_nll_loss` raises an error if a variance is negative: each call compares. `ctc_loss` keeps tensors whose sizes
depend on the lengths: the losses of the samples are one op, `autopar.ctc_loss`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as functional

from autopar.errors import TraceError
from autopar.ir.export.source_lines import quoted_here
from autopar.ir.graph import resolve
from autopar.ir.guards.guard_ops import NOTE
from autopar.torch_compat import FakeTensor

CTC = "autopar.ctc_loss.default"

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank,"
    " bool zero_infinity) -> Tensor"
)
_TORCH_CTC = functional.ctc_loss  # as they are before an export replaces them
_EQUAL, _ALLCLOSE, _ONE_HOT = torch.equal, torch.allclose, functional.one_hot


@contextmanager
def values_kept() -> Iterator[None]:
    """Inside, these functions record what they look at."""
    written_out = [(functional, function) for function in (ctc_loss, gaussian_nll_loss, one_hot)]
    written_out += [(owner, function) for owner in (torch, torch.Tensor) for function in (equal, allclose)]
    with ExitStack() as stack:
        for owner, function in written_out:
            stack.enter_context(patch.object(owner, function.__name__, function))
        stack.enter_context(patch.object(torch, "cond", cond))
        yield


def equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    """`torch.equal`, as a branch on a tensor."""
    if not isinstance(input, FakeTensor) and not isinstance(other, FakeTensor):
        return _EQUAL(input, other)
    return input.shape == other.shape and bool((input == other).all())


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """`torch.cond` of a Python bool. That of a tensor gives the other branch's parameters gradients of zero."""
    if isinstance(pred, torch.Tensor):
        raise TraceError(
            "torch.cond of a tensor is not recorded: write if, of which each call goes the way of the example or names"
            " the line, or torch.where of both"
        )
    return (true_fn if pred else false_fn)(*operands)


def allclose(
    input: torch.Tensor, other: torch.Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """`torch.allclose`, as a branch on a tensor."""
    if not isinstance(input, FakeTensor) and not isinstance(other, FakeTensor):
        return _ALLCLOSE(input, other, rtol, atol, equal_nan)
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`functional.one_hot`, with the example's number of classes where none is given."""
    if num_classes != -1 or not isinstance(tensor, FakeTensor):
        return _ONE_HOT(tensor, num_classes)
    above, most = 0, 1  # the largest index lies between, found by branches on the tensor
    while not bool((tensor < most).all()):
        above, most = most, 2 * most
    while most - above > 1:
        middle = (above + most) // 2
        above, most = (above, middle) if bool((tensor < middle).all()) else (middle, most)
    return _ONE_HOT(tensor.clamp(max=most - 1), most)  # a larger index in another batch is for the condition to tell


def _ctc(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The loss of each sample of [steps, samples, classes]."""
    if type(log_probs) not in (torch.Tensor, torch.nn.Parameter) or log_probs.is_meta or not log_probs.shape[1]:
        return log_probs.sum((0, 2))  # no values, or no sample: a tensor of that shape, with the gradient
    lengths = input_lengths, target_lengths
    return _TORCH_CTC(log_probs, targets, *lengths, blank, "none", zero_infinity)


_LIBRARY.impl("ctc_loss", _ctc, "CompositeImplicitAutograd")


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.ctc_loss` of [steps, samples, classes], by the op.

    "mean" divides the loss of each sample by the length of its target, as torch's documentation says.
    """
    if log_probs.dim() != 3:
        raise TraceError("torch.nn.functional.ctc_loss of a single sample: give it [steps, 1, classes]")
    given, wanted = (_lengths(lengths, log_probs) for lengths in (input_lengths, target_lengths))
    losses = resolve(CTC)(log_probs, targets, given, wanted, blank, zero_infinity)
    if reduction == "mean":
        return (losses / wanted.clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if reduction == "sum" else losses


def _lengths(given: Any, like: torch.Tensor) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else torch.tensor(tuple(given), device=like.device)


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.gaussian_nll_loss`: (log v + (x - y)^2 / v) / 2 of a variance v that is `eps` at least."""
    if not isinstance(var, torch.Tensor):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = var * torch.ones_like(input)
    else:
        resolve(NOTE)([(var.detach() < 0).any()], "Eq(v0, 0)", quoted_here())
    if var.size() != input.size() and input.size()[:-1] == var.size():
        var = var.unsqueeze(-1)
    is_alike = input.ndim == var.ndim and sum(n for m, n in zip(input.size(), var.size()) if m != n) in (0, 1)
    if var.size() != input.size() and not is_alike:
        raise ValueError("var is of incorrect size")
    least = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (least.log() + (input - target) ** 2 / least) + (0.5 * math.log(2 * math.pi) if full else 0.0)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
