"""Collectives that were started and not yet waited for, and how backward hands their results on.

A gradient that is being summed has no value yet, but autograd wants one from the node that starts the sum. It gets a
placeholder, zero, and the sum arrives at the next node (`arrived`), which must be one that waits. Autograd runs the
nodes that are ready in the reverse order of their making: a node that was made early in forward waits late in backward.

Autograd casts each gradient to the dtype of what it is the gradient of. Those of a parameter that is computed in a
lower dtype than it is stored in (`cast_stored`) are summed in a wider one, and go past autograd in the same way.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from autopar.errors import AutoparError
from autopar.torch_compat import is_legacy_batchedtensor

_BATCHED = (
    "a batch of gradients at once (torch.autograd.grad(is_grads_batched=True), or what is built of it:"
    " torch.autograd.functional.jacobian and hessian(vectorize=True)) was asked of what a compiled model gave:"
    " collectives take one tensor each. Leave vectorize out, or call torch.autograd.grad(..., retain_graph=True) for"
    " each vector"
)
Result = TypeVar("Result")
Landing = Callable[[], tuple[torch.Tensor, ...]]  # waits for a collective and gives its results


@dataclass
class Waited:
    """The seconds that this process spent in collectives, counted while somebody `is_asking`."""

    seconds: float = 0.0
    is_asking: bool = False


WAITED = Waited()


def timed(wait: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """`wait(*args, **kwargs)`, which waits for other ranks; its time is counted in `WAITED`."""
    if not WAITED.is_asking:
        return wait(*args, **kwargs)
    start_s = time.perf_counter()
    try:
        return wait(*args, **kwargs)
    finally:
        WAITED.seconds += time.perf_counter() - start_s


@dataclass(frozen=True, eq=False)
class InFlight:
    """Result number `place` of a collective, which is wanted in `dtype`, for result number `output` of the node."""

    landing: Landing
    place: int
    dtype: torch.dtype
    output: int = 0

    def landed(self) -> torch.Tensor:
        """The result, once it is there."""
        return self.landing()[self.place].to(self.dtype)


_num_in_turn = 0  # scopes that are open; one for all threads, for autograd has its own


@contextmanager
def in_turn() -> Iterator[None]:
    """A scope in which backward waits for each sum where it starts it, as for timing it."""
    global _num_in_turn
    _num_in_turn += 1
    try:
        yield
    finally:
        _num_in_turn -= 1


def is_in_turn() -> bool:
    """Whether a scope of `in_turn` is open."""
    return _num_in_turn > 0


@dataclass(frozen=True, slots=True)
class Receiver:
    """Result number `output` of a node of autograd to which gradients may be in flight.

    The node has `in_flight`, a list; `takes_scatters` if it waits for parts of sums too, not for whole sums alone; and
    `wide`, the dtype in which it takes gradients, if that is not the one in which autograd gives them.
    """

    node: Any
    output: int

    @property
    def wide(self) -> torch.dtype | None:
        return getattr(self.node, "wide", None)

    @property
    def takes_scatters(self) -> bool:
        return getattr(self.node, "takes_scatters", False)

    def put(self, landing: Landing, place: int, dtype: torch.dtype) -> None:
        """Send result number `place` to the node, in `dtype` unless it takes another one."""
        self.node.in_flight.append(InFlight(landing, place, self.wide or dtype, self.output))


def receivers(tensors: Sequence[torch.Tensor]) -> tuple[Receiver, ...]:
    """The results of nodes that `tensors` are; () unless gradients may be in flight to each."""
    found = tuple(Receiver(x.grad_fn, x.output_nr) for x in tensors)
    return found if all(hasattr(one.node, "in_flight") for one in found) else ()


def wide_of(tensors: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The dtype in which gradients of `tensors` are taken, if it is another than theirs."""
    return _wide_of(receivers(tensors))


def _wide_of(found: Sequence[Receiver]) -> torch.dtype | None:
    dtypes = {one.wide for one in found}
    return dtypes.pop() if len(dtypes) == 1 else None


def placeholder(gradient: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zero of `shape`, in place of what is in flight of `gradient` to the node that gets this; it takes no memory."""
    return gradient.new_zeros((), dtype=dtype).expand(tuple(shape))


def is_placeholder(gradient: torch.Tensor) -> bool:
    """Whether nothing was added to a placeholder; one of no dims has no strides to tell it by."""
    return gradient.dim() > 0 and not any(gradient.stride())


def arrived(in_flight: list[InFlight], gradient: torch.Tensor, output: int = 0) -> torch.Tensor:
    """The whole gradient of result number `output` of a node, from `gradient`, which autograd gives it, and what is in
    flight to it. `in_flight` has none of it afterwards.
    """
    parts = [one.landed() for one in in_flight if one.output == output]
    in_flight[:] = [one for one in in_flight if one.output != output]
    # what others add to a placeholder has memory of its own
    is_empty = bool(parts) and is_placeholder(gradient)
    for part in parts:
        gradient, is_empty = part if is_empty else gradient + part, False
    return gradient


def all_arrived(in_flight: list[InFlight], gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """`arrived` of each result of a node; None for one that has no gradient."""
    by_output: dict[int, list[InFlight]] = {}
    for one in in_flight:
        by_output.setdefault(one.output, []).append(one)
    in_flight.clear()
    return tuple(
        x if x is None or output not in by_output else arrived(by_output[output], x, output)
        for output, x in enumerate(gradients)
    )


def expect(ctx: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Of a node of autograd that is made of `tensors`: where its gradients go, and what may be in flight to it."""
    found = receivers(tensors)
    ctx.dtype, ctx.waiting, ctx.wide = tensors[0].dtype, () if _num_in_turn else found, _wide_of(found)
    ctx.receivers = found if ctx.wide is not None else ()
    if ctx.wide is not None:
        ctx.in_flight = list[InFlight]()


def taken(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The whole gradients of a node, of which `expect` was called; AutoparError for batches of gradients."""
    if not torch.compiler.is_compiling() and any(map(is_legacy_batchedtensor, gradients)):
        raise AutoparError(_BATCHED)
    if ctx.wide is None:
        return tuple(gradients)
    return tuple(arrived(ctx.in_flight, x, output) for output, x in enumerate(gradients))


def given_back(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The `gradients` as a node, of which `expect` was called, returns them to autograd: those in a wider dtype go past
    it; where they are differentiated again they are rounded.
    """
    if not ctx.receivers or gradients[0].dtype == ctx.dtype or torch.is_grad_enabled():
        return tuple(x.to(ctx.dtype) for x in gradients)
    for place, receiver in enumerate(ctx.receivers):
        receiver.put(lambda: tuple(gradients), place, gradients[0].dtype)
    return tuple(placeholder(x, x.shape, ctx.dtype) for x in gradients)


class _CastStored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):
        ctx.in_flight, ctx.wide, ctx.before = list[InFlight](), x.dtype, receivers((x,))
        ctx.takes_scatters = bool(ctx.before) and ctx.before[0].takes_scatters
        return x.to(dtype)

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        if not (ctx.before and ctx.in_flight):
            return arrived(ctx.in_flight, gradient).to(ctx.wide), None
        (before,) = ctx.before  # waits as late as can be
        for one in ctx.in_flight:
            before.put(one.landing, one.place, ctx.wide)
        ctx.in_flight.clear()
        is_empty = is_placeholder(gradient)
        return placeholder(gradient, gradient.shape, ctx.wide) if is_empty else gradient.to(ctx.wide), None


def cast_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The stored part `x` of a parameter in `dtype`, in which it is computed. Its gradient has the dtype of `x`, and so
    have sums of it over ranks until then, if they are in that dtype.
    """
    return _CastStored.apply(x, dtype) if torch.is_grad_enabled() else x.detach().to(dtype)
