"""`OpBuilder`: builds a list of ops with unique names, inferred outputs and origins."""

import builtins
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from autopar.errors import TraceError
from autopar.ir.autocast import Autocast, Casts, casts_of
from autopar.ir.call_args import take_slots
from autopar.ir.export.infer_metas import PLACEMENT_KWARGS, Inference, Meta
from autopar.ir.graph import Op, Value

_NUMBERS = re.compile(r"(_\d+)+$")


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of an op in the model."""

    name: str
    module: str = ""
    line: str = ""
    is_no_grad: bool = False


def stem_of(name: str) -> str:
    """A name without the numbers that make it unique.

    >>> stem_of("conv2d_1_0")
    'conv2d'
    """
    return _NUMBERS.sub("", name)


@lru_cache(maxsize=4096)
def _identifier(base: str) -> tuple[str, int]:
    """(a Python identifier like `base`, the first number behind it: 1 if it is a name of a builtin)."""
    stem = re.sub(r"\W", "_", base).rstrip("_")
    stem = f"_{stem}" if not stem or stem[0].isdigit() or keyword.iskeyword(stem) else stem
    return stem, 1 if hasattr(builtins, stem) else 0


@dataclass(frozen=True)
class OpBuilder:
    """A list of `ops` under construction, with the storages of
    `functionalise` the only mutable state of a conversion.
    """

    ops: list[Op] = field(default_factory=list)
    used_names: set[str] = field(default_factory=set)
    next_number: dict[str, int] = field(default_factory=dict)
    inference: Inference = field(default_factory=Inference)
    known_casts: dict[Any, Casts] = field(default_factory=dict)
    guards: list[tuple[tuple[Value, ...], str, str]] = field(default_factory=list)  # values, condition, line
    tracked: dict[str, int] = field(default_factory=dict)  # values -> the ops before `requires_grad_` made each a leaf

    def unique(self, base: str) -> str:
        """A fresh Python identifier like `base` that is no name of a builtin."""
        stem, first = _identifier(base)
        count = self.next_number.get(stem, first)
        while (name := f"{stem}_{count}" if count else stem) in self.used_names:
            count += 1
        self.next_number[stem] = count + 1
        self.used_names.add(name)
        return name

    def emit(
        self,
        target: str,
        args: Any,
        kwargs: dict[str, Any] | None = None,
        *,
        at: Origin,
        fallback: Sequence[Meta] = (),
        made: tuple[Sequence[Meta], bool] | None = None,
    ) -> tuple[Value, ...]:
        """Append a call whose args hold `Value`s; `fallback` describes the outputs where the op cannot run on meta.

        `made`: the outputs, and whether they are a tuple, if the op was run on meta already.
        """
        kept = {name: value for name, value in (kwargs or {}).items() if name not in PLACEMENT_KWARGS}
        slotted, named, inputs = take_slots(args, kept, lambda leaf: isinstance(leaf, Value))
        metas, is_tuple = made or self._infer(target, slotted, named, inputs, at, fallback)
        name = self.unique(at.name)
        outputs = tuple(
            Value(self.unique(f"{name}_out{i}") if is_tuple else name, meta.shape, meta.dtype, meta.needs_grad)
            for i, meta in enumerate(metas)
        )
        self.ops.append(Op(name, target, slotted, named, inputs, outputs, at.is_no_grad, at.module, at.line, is_tuple))
        return outputs

    def casts_of(self, target: str, args: Any, kwargs: Any, inputs: Sequence[Value], on: Autocast) -> Casts:
        """As `autocast.casts_of`, once for each kind of call."""
        key = (target, repr(args), repr(kwargs), tuple((v.shape, v.dtype) for v in inputs), on)
        if key not in self.known_casts:
            self.known_casts[key] = casts_of(target, args, kwargs, inputs, on)
        return self.known_casts[key]

    def _infer(
        self, target: str, args: Any, kwargs: Any, inputs: Any, at: Origin, fallback: Sequence[Meta]
    ) -> tuple[Any, bool]:
        try:
            return self.inference.outputs(target, args, kwargs, inputs, at.is_no_grad)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError) as error:
            if not fallback:
                raise TraceError(
                    f"{target} at {at.line}: outputs cannot be inferred on the meta device: {error}"
                ) from error
        needs_grad = not at.is_no_grad and any(value.needs_grad for value in inputs)
        metas = tuple(Meta(m.shape, m.dtype, needs_grad and m.dtype.is_floating_point) for m in fallback)
        return metas, len(fallback) > 1
