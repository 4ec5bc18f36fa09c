"""The keys of a call: the parts that all ranks must agree on, and those that a program depends on; and examples."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, warn
from autopar.ir.autocast import autocast_on
from autopar.ir.export.pytree_types import register_types
from autopar.ir.guards.example_values import keep_value
from autopar.ir.inference.kv_caches import remedy_of
from autopar.runtime.local_batch import LocalBatch
from autopar.torch_compat import FakeTensor, pytree, without_dispatch_modes

Key = tuple[Any, ...]  # what a call looks like; hashable
# Leaves that are written into a program as they are.
CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    Enum,
)


def describe_call(
    modes: tuple[bool, ...], args: tuple, kwargs: dict, device_type: str, parts: LocalBatch | None = None
) -> tuple[Key, Key, list[Any]]:
    """(parts of a call that the ranks must agree on, parts that a program depends on, leaves); keywords in any order.

    `device_type`: of the model's tensors, whose autocast counts. `parts`: of the batch; of shares, which differ, sizes
    are those of the whole.
    """
    kwargs = dict(sorted(kwargs.items()))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if not all(isinstance(leaf, (torch.Tensor, *CONSTANTS)) for leaf in leaves):
        register_types((args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
    ambient = torch.get_default_dtype(), autocast_on(device_type), torch.is_grad_enabled()
    own = [_describe(leaf) for leaf in leaves]
    if parts is not None and parts.shares is not None:
        own = [
            (parts.whole_shape(leaf), *one[1:]) if isinstance(leaf, torch.Tensor) else one
            for leaf, one in zip(leaves, own)
        ]
    key = (tuple(own), spec, modes, *ambient)
    placements = tuple(leaf.placements if isinstance(leaf, DTensor) else None for leaf in leaves)
    return (*key, placements), key, leaves


def example_of(leaf: Any, parts: LocalBatch | None) -> Any:
    """The example for an argument in tracing; AutoparError if it is neither a tensor nor a plain constant.

    `parts`: of the batch, if each rank gives one.
    """
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise AutoparError(
                f"an argument of the model is a tensor of layout {leaf.layout}, of which no rule says how it splits;"
                " expected dense ones: hand in its values and indices, or a padded tensor and its lengths, and join"
                " them in forward"
            )
        shape = leaf.shape if parts is None else parts.whole_shape(leaf)
        example = torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
        return keep_value(example, leaf) if shape == leaf.shape else example
    if isinstance(leaf, CONSTANTS):
        return leaf
    raise AutoparError(
        f"an argument of the model holds a {type(leaf).__module__}.{type(leaf).__qualname__}; expected tensors,"
        f" numbers, strings, None and tuples, lists, dicts and dataclasses of these; {remedy_of(leaf)}"
    )


def program_keys(key: Key, *, in_both_grad_modes: bool, for_both_ways: bool) -> list[Key]:
    """The keys of all calls that the program for `key`, (*key of the call, generation, trains), does for: with and
    without gradients, and by train_step or alone.
    """
    *call, grad_mode, generation, trains = key
    grad_modes = (True, False) if in_both_grad_modes else (grad_mode,)
    ways = (True, False) if for_both_ways else (trains,)
    return [(*call, mode, generation, way) for mode in grad_modes for way in ways]


def up_to_sizes(key: Key) -> Key:
    """`key` of a program without the sizes of tensors."""
    leaves, *rest = key
    return tuple((len(leaf[0]), *leaf[1:]) if isinstance(leaf[0], tuple) else leaf for leaf in leaves), *rest


def goes_on(before: Key | None, last: Key | None, key: Key) -> bool:
    """Whether the call with `key` differs from the last one as that does from the one before, and in sizes alone, as
    calls with a cache that grows do.

    Ranks that were called alike twice need not ask each other then: one that is called otherwise goes to where ranks
    meet, and learns there that the others do not.
    """
    if before is None or last is None or not up_to_sizes(before) == up_to_sizes(last) == up_to_sizes(key):
        return False
    sizes = [[size for leaf in one[0] if isinstance(leaf[0], tuple) for size in leaf[0]] for one in (before, last, key)]
    return all(b - a == c - b for a, b, c in zip(*sizes, strict=True))


def up_to_numbers(key: Key) -> Key:
    """`key` of a program without the values of ints and floats."""
    leaves, *rest = key
    return tuple(leaf[:1] if leaf[0] in (int, float) else leaf for leaf in leaves), *rest


def tell_time_of_another(seconds: float, *, is_for_sizes: bool) -> None:
    """Warn of how long planning anew took: for another kind of call, or for other sizes of a known one."""
    if is_for_sizes:
        warn(
            f"a call whose sizes no known plan is good for was planned in {seconds:.1f} s, once: the plan is kept for"
            " calls of sizes like these"
        )
        return
    warn(
        f"a call that is new to the model (other numbers, structures or modes) was traced and planned in"
        f" {seconds:.1f} s; every further kind of call takes about as long, once; other sizes of tensors keep the plan"
    )


def tell_time_of_trace(seconds: float) -> None:
    """Warn of how long the trace of a call of other sizes took, whose plan was kept."""
    warn(
        f"a call of other sizes was traced again in {seconds:.1f} s, its plan is kept; that trace serves all sizes that"
        " the model treats alike"
    )


@dataclass
class GradModeReads:
    """Whether a forward asks whether gradients are recorded."""

    found: bool = False


@contextmanager
def grad_mode_reads() -> Iterator[GradModeReads]:
    """Inside, torch.is_grad_enabled() tells models, but neither torch nor autopar, what it says now, whatever a trace
    needs.
    """
    mode, of_torch, reads = torch.is_grad_enabled(), torch.is_grad_enabled, GradModeReads()

    def answer() -> bool:
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in ("torch", "autopar"):
            return of_torch()
        reads.found = True
        return mode

    with patch.object(torch, "is_grad_enabled", answer):
        yield reads


@contextmanager
def own_autograd() -> Iterator[None]:
    """Plan as for training whatever mode the first call is in, unseen by whoever counts saved tensors (activation
    checkpointing) or ops (FlopCounterMode).
    """
    unchanged = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), unchanged, without_dispatch_modes():
        yield


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        if isinstance(leaf, FakeTensor):
            raise AutoparError(
                f"an argument of shape {tuple(leaf.shape)} is a fake tensor, without values, and the compiled model has"
                " parts and collectives of real ones: expected tensors with values. What a step takes is predicted"
                " before autopar.compile: autopar.plan(model, mesh, args=...) takes the model, and tensors on meta"
            )
        if forward_ad.unpack_dual(leaf).tangent is not None:
            raise AutoparError(
                f"an argument of shape {tuple(leaf.shape)} is a dual tensor of torch.autograd.forward_ad, whose tangent"
                " would be lost: collectives have no derivative in forward mode. Call the model plainly, and"
                " differentiate its output by torch.autograd.grad or torch.autograd.functional.jacobian"
            )
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, (float, complex)):  # -0.0 is another number than 0.0, and nan is the same one each time
        return type(leaf), repr(leaf)
    if isinstance(leaf, CONSTANTS):
        return type(leaf), leaf
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}", "not supported"  # the ranks cannot pickle any class
