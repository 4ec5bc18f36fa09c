"""While a model is exported it takes the ways that it takes when it is run.

Models ask torch whether they are traced (`torch.compiler.is_exporting()`), and may compute something else then.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autopar.errors import TraceError

_QUESTIONS = ("is_compiling", "is_exporting")
# Who is told the truth: torch itself, and transformers, which when exported keeps masks that it drops where no token is
# masked (`masks_as_run` compares the two), leaves caches of its own alone and warns less.
_TOLD = ("torch", "transformers")


@contextmanager
def answers_as_run(model: nn.Module) -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` and `is_exporting()` are false for the code of the model."""
    names = sorted({type(module).__module__ for module in model.modules()})
    modules = [sys.modules[name] for name in names if name in sys.modules and not _is_told(name)]
    with ExitStack() as stack:
        for name in _QUESTIONS:
            original = getattr(torch.compiler, name)
            answer = _answered(original)
            stack.enter_context(patch.object(torch.compiler, name, answer))
            for module in modules:  # that imported the function itself
                for alias, value in list(vars(module).items()):
                    if value is original:
                        stack.enter_context(patch.object(module, alias, answer))
        yield


def _answered(original: Callable[[], bool]) -> Callable[[], bool]:
    def answer() -> bool:
        return _is_told(sys._getframe(1).f_globals.get("__name__", "")) and original()

    return answer


def _is_told(name: str) -> bool:
    return name.split(".")[0] in _TOLD


@contextmanager
def masks_as_run() -> Iterator[None]:
    """Inside, models of transformers are traced whose attention is the same with and without the mask that an export
    keeps; TraceError for others.

    With torch's fused attention, transformers drops a mask if no token is masked, and leaves it to the attention
    module's `is_causal` whether attention is causal. An export, whose mask may have any values, keeps it. The two
    differ where a causal mask is given to modules that are not causal, or one of both directions to causal ones.
    """
    masks, interfaces = sys.modules.get("transformers.masking_utils"), sys.modules.get("transformers.modeling_utils")
    if masks is None or interfaces is None:
        yield
        return
    made: dict[bool, dict[int, nn.Module]] = {True: {}, False: {}}  # by whether it is causal: modules that made masks
    used: dict[bool, dict[int, nn.Module]] = {True: {}, False: {}}  # by is_causal: attention modules given a mask
    attention = interfaces.ALL_ATTENTION_FUNCTIONS
    # how it asks whether it is exported: before 5.18 by the one, since then by the other
    exporting = next(x for x in ("is_torchdynamo_exporting", "is_tracing") if hasattr(masks, x))

    def noting(is_causal: bool, original: Callable[..., bool]) -> Callable[..., bool]:
        def asked(*args: Any, **kwargs: Any) -> bool:
            is_dropped = original(*args, **kwargs)
            with patch.object(masks, exporting, lambda *_: False):
                may_drop = original(None, *args[1:], **{k: v for k, v in kwargs.items() if k != "padding_mask"})
            if may_drop and not is_dropped and (owner := _module_of_caller()) is not None:
                made[is_causal][id(owner)] = owner
            return is_dropped

        return asked

    sdpa = attention["sdpa"]

    def attended(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # of query, key, value and mask, or their names
        if (args[3] if len(args) > 3 else kwargs.get("attention_mask")) is not None:
            is_causal = kwargs.get("is_causal")
            is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            used[bool(is_causal)][id(module)] = module
        return sdpa(module, *args, **kwargs)

    with (
        patch.object(masks, "_ignore_causal_mask_sdpa", noting(True, masks._ignore_causal_mask_sdpa)),
        patch.object(masks, "_ignore_bidirectional_mask_sdpa", noting(False, masks._ignore_bidirectional_mask_sdpa)),
    ):
        attention.register("sdpa", attended)
        try:
            yield
        finally:
            attention.register("sdpa", sdpa)
    for is_causal, owners in made.items():
        for key, owner in owners.items():
            if key not in made[not is_causal]:
                _check(owner, is_causal, used)


def _check(owner: nn.Module, is_causal: bool, used: dict[bool, dict[int, nn.Module]]) -> None:
    """TraceError if the owner's attention is never such as its mask is."""
    within = {id(module) for module in owner.modules()}
    other = next((module for key, module in used[not is_causal].items() if key in within), None)
    if other is None or within & used[is_causal].keys():
        return
    made, left = ("a causal mask", "no longer") if is_causal else ("a mask of both directions", "then")
    raise TraceError(
        f"{type(owner).__name__} makes {made} for {type(other).__name__}, whose is_causal is {not is_causal}: "
        f"transformers drops that mask when run, if no token is masked, and attention is {left} causal, but keeps it "
        'when exported. Load the model with attn_implementation="eager", which keeps it always, or correct is_causal'
    )


def _module_of_caller() -> nn.Module | None:
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back
    return None
