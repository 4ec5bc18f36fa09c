"""Activation checkpointing: regions that backward runs again, so that only their inputs are kept.

`torch.utils.checkpoint` does the same for one backward. Schedules that split backward (inputs first, weights later, one
pass for each group of weights) would run a region again in every pass. Here it is run again once, and its saved tensors
live as long as autograd may ask for them.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.autograd.graph import saved_tensors_hooks

Tensors = tuple[torch.Tensor, ...]


def recomputed(function: Callable[..., Tensors], *inputs: torch.Tensor) -> Tensors:
    """`function(*inputs)`, of which autograd keeps the inputs only; the first backward pass that reaches it runs it
    again.

    It is run to its end, so that every rank issues all of its collectives again, as priced. No random state is kept:
    random ops of a program have seeds of their own (`seeded_rng.seeded`).
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    with saved_tensors_hooks(_RegionCall(function, inputs).pack, _unpack):
        return function(*inputs)


class _SavedPlaceholder:
    """A placeholder of a tensor that `run` saved; autograd holds it as long as it may ask for the tensor."""

    __slots__ = ("__weakref__", "run")

    def __init__(self, run: "_RegionCall") -> None:
        self.run = run


class _RegionCall:
    """One call of a region: its inputs and, once backward has asked for one of them, its saved tensors."""

    def __init__(self, function: Callable[..., Tensors], inputs: Sequence[torch.Tensor]) -> None:
        self.function = function
        # Saved by autograd, so that hooks around this (offload, another recomputation) see the inputs as saved tensors.
        # A node of torch 2.11 has them as long as its output lives.
        self.kept = _Keep.apply(torch.empty(0, requires_grad=True), *inputs)
        self.autocast = _autocast(inputs[0].device.type) if inputs else nullcontext()
        self.saved: list[ref[_SavedPlaceholder]] = []
        self.made: WeakKeyDictionary[_SavedPlaceholder, torch.Tensor] = WeakKeyDictionary()

    def pack(self, _: torch.Tensor) -> _SavedPlaceholder:
        saved = _SavedPlaceholder(self)
        self.saved.append(ref(saved))
        return saved

    def again(self) -> None:
        """Run the region again, and give its saved tensors to the placeholders that are still alive."""
        saved_again: list[torch.Tensor] = []
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in self.kept.grad_fn.saved_tensors]
        with torch.enable_grad(), self.autocast, saved_tensors_hooks(lambda x: saved_again.append(x.detach()), _never):
            self.function(*inputs)
        if len(saved_again) != len(self.saved):
            raise RuntimeError(
                f"a recomputed region saved {len(self.saved)} tensors in forward, {len(saved_again)} when run again"
            )
        self.made.update((saved, x) for one, x in zip(self.saved, saved_again) if (saved := one()) is not None)


def _unpack(saved: _SavedPlaceholder) -> torch.Tensor:
    if saved not in saved.run.made:
        saved.run.again()
    return saved.run.made[saved]


def _never(_: Any) -> torch.Tensor:
    raise AssertionError("nothing is differentiated through the second run")


class _Keep(torch.autograd.Function):
    """An autograd node that holds tensors and computes nothing."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx, *gradients):
        raise AssertionError("nothing depends on it")


def _autocast(device_type: str) -> Any:
    """A context with the present state of autocast."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    dtype, is_on = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, dtype=dtype, enabled=is_on, cache_enabled=torch.is_autocast_cache_enabled())
