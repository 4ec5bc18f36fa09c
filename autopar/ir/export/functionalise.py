"""Functionalisation: each storage has a current value, and views of it are taken again after an in-place write."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import TraceError
from autopar.ir.export.op_builder import OpBuilder, Origin
from autopar.ir.export.view_ops import ViewStep
from autopar.ir.gradients.observed_footprint import saves
from autopar.ir.graph import Op, Value, resolve
from autopar.ir.op_facts import is_view

_LEFT = (
    "the forward sets requires_grad of {} to {}, and it was {} before: expected what it was, at the forward's end. Set"
    " it before the call, or back within the forward"
)


@dataclass
class Storage:
    """Memory that tensors share; `owner`: "" for memory of the call itself, otherwise e.g. "parameter w". `leaf`: the
    value of a parameter that is frozen for now, as autograd follows it.
    """

    value: Value
    version: int = 0
    owner: str = ""
    leaf: Value | None = None

    def make_read_only(self, owner: str) -> None:
        """Refuse writes from now on: a view that cannot be taken again would keep the old values."""
        if not self.owner or self.is_writable:
            self.owner = owner

    @property
    def is_writable(self) -> bool:
        """Whether a forward may write to it; of what is not made by the call, to its state."""
        return not self.owner or (self.owner.startswith(("buffer ", "parameter ")) and self.leaf is None)


@dataclass
class View:
    """A tensor of the traced program: `steps` lead from its storage to `value`, which is valid for `version`."""

    storage: Storage
    steps: tuple[ViewStep, ...]
    value: Value
    version: int


def whole(value: Value, owner: str = "") -> View:
    """The view of a tensor that is its whole storage."""
    return View(Storage(value, 0, owner), (), value, 0)


def read(view: View, builder: OpBuilder, at: Origin) -> Value:
    """The current value of a view, which is taken again if its storage has been written."""
    if view.version != view.storage.version:
        value = view.storage.value
        for step in view.steps:
            value = step.take(builder, value, at)
        view.value, view.version = value, view.storage.version
    return view.value


def freeze(view: View, builder: OpBuilder, at: Origin) -> None:
    """No gradient reaches a parameter by what reads it from now on; views that there are already keep theirs. A trace
    may say so several times.
    """
    storage = view.storage
    if storage.leaf is None:
        storage.leaf = storage.value
        view.value = storage.value = builder.emit("aten.detach.default", (storage.value,), at=at)[0]


def thaw(view: View) -> None:
    """Reads of a frozen parameter are again what they were; TraceError if it was frozen when the forward began."""
    storage = view.storage
    if storage.leaf is not None:
        view.value = storage.value = storage.leaf
        storage.leaf = None
    elif not storage.value.needs_grad:
        raise TraceError(_LEFT.format(storage.owner, True, False))


def check_thawed(views: Iterable[View]) -> None:
    """TraceError for a parameter that the forward leaves frozen."""
    for view in views:
        if view.storage.leaf is not None:
            raise TraceError(_LEFT.format(view.storage.owner, False, True))


def write(view: View, value: Value, builder: OpBuilder, at: Origin) -> None:
    """Write `value` through the view into its storage; TraceError if that is not possible."""
    storage = view.storage
    _check_writable(view, builder, at)
    bases = [storage.value]
    for step in view.steps[:-1]:
        bases.append(step.take(builder, bases[-1], at))
    result: Value | None = value
    for base, step in zip(reversed(bases), reversed(view.steps)):
        result = step.put(builder, base, result, at) if result is not None else None
    is_apart = storage.value.needs_grad and (storage.owner.startswith("parameter ") or _is_unseen(view, at))
    if result is not None and is_apart:
        result = _rewritten(storage, result, builder, at)
    if result is None:
        chain = " of ".join(step.target for step in reversed(view.steps))
        raise TraceError(f"{at.line}: cannot write in place through {chain}; use the out-of-place operation here")
    storage.value, storage.version = result, storage.version + 1
    if not is_apart:
        view.value, view.version = value, storage.version


def _is_unseen(view: View, at: Origin) -> bool:
    """Whether autograd does not follow a write through the view, so that gradients pass by as if there were none."""
    return at.is_no_grad or any(step.target.startswith("aten.detach") for step in view.steps)


def _rewritten(storage: Storage, value: Value, builder: OpBuilder, at: Origin) -> Value:
    """The `value` that is written unseen by autograd, whose gradient is that of what it replaces: 0 of that is added,
    exactly. A parameter is finite, and a score that was masked may not be.
    """
    before = builder.emit("aten.detach.default", (storage.value,), at=at)[0]
    now = builder.emit("aten.detach.default", (value,), at=at)[0]
    at = replace(at, is_no_grad=False)
    zero = builder.emit("aten.sub.Tensor", (storage.value, before), at=at)[0]
    if not storage.owner:
        zero = builder.emit("aten.nan_to_num.default", (zero,), at=at)[0]
    return builder.emit("aten.add.Tensor", (zero, now), at=at)[0]


def _check_writable(view: View, builder: OpBuilder, at: Origin) -> None:
    current = view.storage.value
    is_parameter = view.storage.owner.startswith("parameter ")
    if current.needs_grad and is_parameter and view.storage.leaf is None:
        if name := _kept_by(current, builder.ops):
            raise TraceError(
                f"{at.line}: the forward changes {view.storage.owner} in place after %{name} read it, whose backward"
                " would see another value: write to it before, or around the call"
            )
    elif current.needs_grad and _is_unseen(view, at) and (name := _kept_by(current, builder.ops)):
        raise TraceError(
            f"{at.line}: a tensor that %{name} keeps for its backward is changed in place without autograd's knowledge,"
            " so that its gradient would be that of other numbers; use the out-of-place operation here"
        )
    if not view.storage.is_writable:
        raise TraceError(
            f"{at.line}: the forward changes {view.storage.owner} in place; only buffers may change: "
            "work on a clone, or register the tensor as a buffer"
        )


def _kept_by(value: Value, ops: list[Op]) -> str:
    """The name of an op whose backward reads the memory of `value`: of what made it, or read it or a view of it."""
    behind, ahead = {value}, {value}
    start = len(ops)
    while start and not set(ops[start - 1].outputs) & behind:
        start -= 1
    for op in reversed(ops[:start]):
        if set(op.outputs) & behind:
            if _is_copying(op.target):
                behind.update(op.inputs)
            elif saves(op, behind):
                return op.name
    for op in ops[start:]:
        if set(op.inputs) & ahead:
            if is_view(op.target):
                ahead.update(op.outputs)
            elif saves(op, ahead):
                return op.name
    return ""


def _is_copying(target: str) -> bool:
    """Whether the op stands for a write or a view in the model, which share memory."""
    return is_view(target) or target.endswith("_scatter.default")


def functional_target(target: str) -> str | None:
    """The functional op that returns the value that an in-place op writes; None if there is none.

    >>> functional_target("aten.add_.Tensor")
    'aten.add.Tensor'
    >>> functional_target("aten.pow_.Scalar")
    'aten.pow.Tensor_Scalar'
    """
    namespace, name, overload = target.split(".")
    special = {"normal_": "normal_functional", "bernoulli_": "bernoulli"}
    stem = special.get(name, name.removesuffix("_"))
    target_out = f"{namespace}.{stem}.{'p' if target == 'aten.bernoulli_.float' else overload}"
    try:
        named = resolve(target_out)
    except AttributeError:
        return _of_same_arguments(target, f"{namespace}.{stem}")
    if _types_of(named)[:1] != _types_of(resolve(target))[:1]:  # pow.Scalar has a number as its base
        return _of_same_arguments(target, f"{namespace}.{stem}")
    return None if named._schema.is_mutable else target_out


def _of_same_arguments(target: str, packet: str) -> str | None:
    """The functional overload of `packet`, "aten.pow", that takes what `target` takes."""
    try:
        named = resolve(packet)
    except AttributeError:
        return None
    for overload in named.overloads():
        op = getattr(named, overload)
        if not op._schema.is_mutable and _types_of(op) == _types_of(resolve(target)):
            return f"{packet}.{overload}"
    return None


def _types_of(op: Any) -> list[str]:
    return [str(argument.type) for argument in op._schema.arguments]
