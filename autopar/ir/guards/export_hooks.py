"""Hooks into an export: its ops on fake tensors, and its decisions by numbers that have no value."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from autopar.torch_compat import FakeTensorMode


@contextmanager
def fake_ops_seen_by(run: Callable[..., Any]) -> Iterator[None]:
    """Inside, an op on fake tensors gives `run(original, op, args, kwargs)`; `original()` is what torch gives.

    Below autograd and whatever records ops; modes cannot be put there, since an export makes its own.
    """
    dispatch = FakeTensorMode.dispatch

    def seen(self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(lambda: dispatch(self, func, types, args, kwargs or {}), func, args, dict(kwargs or {}))

    with patch.object(FakeTensorMode, "dispatch", seen):
        yield


@contextmanager
def answers_of_branches(decide: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, an expression of numbers read of tensors has the value `decide(expression)`, unless that is None, where
    torch refuses to branch on it.
    """
    evaluate = ShapeEnv.evaluate_expr

    def evaluated(self: ShapeEnv, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return evaluate(self, orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            value = decide(orig_expr)
            if value is None:
                raise
            return value

    with patch.object(ShapeEnv, "evaluate_expr", evaluated):
        yield
