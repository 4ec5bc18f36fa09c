"""Rules that users give for ops of their own, defined with `torch.library`: `register_rule`."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, ParamSpec, TypeVar, cast

from autopar.errors import AutoparError
from autopar.ir.graph import Op, resolve
from autopar.sbp.rules.custom_function import NAMED, Rule
from autopar.torch_compat import OpOverload

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
WHOLE = "whole"

_GIVEN: dict[str, Rule] = {}  # by target
_CACHES: list[Any] = []  # of functions whose results follow from rules


def per_rules(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator: results are kept for equal arguments until a rule is registered."""
    cached = lru_cache(maxsize=4096)(function)
    _CACHES.append(cached)
    return cast(Callable[Parameters, Result], cached)


def register_rule(op: Any, rule: Rule | Literal["elementwise", "batch", "whole"]) -> None:
    """Say how an op of `torch.library` may be split over devices; the last rule of an op counts.

    `op`: the op, what `torch.library.custom_op` returned, or its name, "library::op" or "library::op.overload".
    `rule`: "elementwise", each element of what it returns depends on the elements at the same place alone; "batch",
    each sample, along dim 0 of all tensors, is treated by itself; "whole", it is run whole on each device, and no rule
    is discovered; or a function from a call of it to its signatures on one mesh axis (CONTRIBUTING.md, "Add an op
    rule").

    When a model with the op is planned, each signature is run on small samples of the call, whole and on parts, forward
    and backward. AutoparError, then, with the sample, if one is not true; here, if there is no such op, or autopar has
    a rule for it.
    """
    target = _target(op)
    if target.startswith(("aten.", "prims.", "autopar.")):
        raise AutoparError(f"register_rule: expected an op of your own, found {target}: rules of torch's are autopar's")
    if not callable(rule) and rule not in (*NAMED, WHOLE):
        raise AutoparError(
            f"register_rule of {target}: expected {', '.join(map(repr, (*NAMED, WHOLE)))} or a rule, found {rule!r}"
        )
    _GIVEN[target] = rule if callable(rule) else NAMED.get(rule, _whole)
    forget_signatures()


def forget_signatures() -> None:
    """Forget what followed from the rules so far."""
    for cached in _CACHES:
        cached.cache_clear()


def given_rule(op: Op) -> Rule | None:
    """The rule that the op's target was given."""
    return _GIVEN.get(op.target)


def _whole(op: Op) -> tuple[()]:
    return ()


def _target(op: Any) -> str:
    """The target of an op, of the only overload of several, or of what has a name."""
    if isinstance(op, str):
        try:
            op = resolve(op.replace("::", "."))
        except (AttributeError, RuntimeError) as error:
            raise AutoparError(f"register_rule: expected the name of an op, 'library::op', found {op!r}") from error
    op = getattr(op, "_opoverload", op)  # of what custom_op returned
    if hasattr(op, "overloads") and len(op.overloads()) == 1:
        op = getattr(op, op.overloads()[0])
    if not isinstance(op, OpOverload):
        raise AutoparError(f"register_rule: expected an op of torch.library, or one of its overloads, found {op!r}")
    return str(op)
