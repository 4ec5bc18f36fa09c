"""While a model is exported: the values of tensors that follow from its example arguments, its buffers and constants.

Where the forward branches on such a value, or makes a tensor whose size depends on one, the example decides, and the
graph has a guard that compares at every call (`ir/guards`). Values that depend on no argument and no buffer need none.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.ir.export.source_lines import quoted_here
from autopar.ir.graph import resolve
from autopar.ir.guards.example_values import MOST_ELEMENTS, value_of
from autopar.ir.guards.export_hooks import answers_of_branches, fake_ops_seen_by
from autopar.ir.guards.finite_answers import FiniteAnswers
from autopar.ir.guards.guard_ops import NOTE, condition_of
from autopar.ir.guards.raising_branches import answer_without_error
from autopar.ir.numbers.drawn_answers import DrawnAnswers
from autopar.torch_compat import FakeTensor, pytree, without_dispatch_modes

_NUMBERS = frozenset(("aten.item.default", "aten._local_scalar_dense.default"))
_READ = (torch.SymInt, torch.SymFloat)  # numbers that were read of tensors
_IS_NONZERO = "aten.is_nonzero.default"


CONSTANT, BUFFERS, ARGUMENTS = 0, 1, 2  # what a value depends on, of these the last


@dataclass(slots=True)
class _Known:
    """The value of a fake tensor, and what it depends on."""

    value: torch.Tensor
    depends_on: int


class KnownValues(TorchFunctionMode):
    """Computes what is known, answers by it, and notes guards in the graph that is being exported.

    An integer that is read of the arguments is a symbol, of which comparisons alone are guarded, or if
    `takes_integers`, a number that must be the same at every call.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], takes_integers: bool) -> None:
        super().__init__()
        self.model, self.takes_integers = model, takes_integers
        self.example = [value_of(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
        buffers = model.named_buffers(remove_duplicate=False)
        self.buffers = {name: value_of(x) for name, x in buffers}
        # Of fake tensors, held weakly: torch.arange and the like copy what somebody else holds.
        self.known: MutableMapping[torch.Tensor, _Known] = WeakTensorKeyDictionary()
        # Memory of values into which something unknown was written; held, so that no other value gets its identity.
        self.written: dict[int, torch.UntypedStorage] = {}
        self.symbols: dict[sympy.Symbol, tuple[torch.Tensor, Any]] = {}
        self.computed: dict[sympy.Symbol, torch.Tensor] = {}  # numbers that are not known, as those of a loss
        self.finite, self.drawn = FiniteAnswers(), DrawnAnswers()
        self.pending: list[tuple[Sequence[torch.Tensor], str, str]] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the model is exported."""
        before = self.model.register_forward_pre_hook(self._take, with_kwargs=True, prepend=True)
        after = self.model.register_forward_hook(lambda *_: self._flush())
        try:
            with (
                patch.object(Distribution, "_validate_args", False),  # it only raises errors
                fake_ops_seen_by(self._run),
                answers_of_branches(self._decide),
                self,
            ):
                yield
        finally:
            before.remove()
            after.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.finite.note(func, args, result)
        self.drawn.note(func, args, result)
        if self.pending:
            self._flush()
        return result

    def _flush(self) -> None:
        pending, self.pending = self.pending, []
        for values, condition, line in pending:
            resolve(NOTE)(list(values), condition, line)

    def _take(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note which fake tensors stand for the example's arguments and the buffers."""
        leaves = pytree.tree_leaves((args, kwargs))
        if len(leaves) == len(self.example):
            for fake, real in zip(leaves, self.example):
                self._note_given(fake, real, ARGUMENTS)
        for name, fake in module.named_buffers(remove_duplicate=False):
            self._note_given(fake, self.buffers.get(name), BUFFERS)

    def _note_given(self, fake: Any, real: torch.Tensor | None, depends_on: int) -> None:
        if isinstance(fake, FakeTensor) and real is not None:
            self.known[fake] = _Known(real, depends_on)

    def _of(self, leaf: Any) -> _Known | None:
        """The known value of a tensor argument."""
        if not isinstance(leaf, FakeTensor):
            is_small = type(leaf) is torch.Tensor and not leaf.is_meta and leaf.numel() <= MOST_ELEMENTS
            return _Known(leaf, CONSTANT) if is_small else None
        found = self.known.get(leaf)
        is_lost = found is not None and found.value.untyped_storage()._cdata in self.written
        return None if is_lost else found

    def knows(self, x: Any) -> bool:
        """Whether the example tells the value of a tensor."""
        return self._of(x) is not None

    def is_given(self, x: Any) -> bool:
        """Whether the value of a tensor follows from the arguments, and so may differ from batch to batch."""
        known = self._of(x)
        return known is not None and known.depends_on == ARGUMENTS

    def is_answered(self, x: torch.Tensor) -> bool:
        """Whether the example tells the truth of a tensor, or it follows from numbers being finite or drawn."""
        return self.knows(x) or self.finite.of(x) is not None or self.drawn.of(x) is not None

    def _run(self, original: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of `func` on fake tensors, as `original()` gives it or as the values decide."""
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        read = [_Known(torch.empty(()), ARGUMENTS) for leaf in leaves if isinstance(leaf, _READ)]
        known = [*map(self._of, tensors), *read]
        is_known = func.namespace in ("aten", "prims") and None not in known and not _is_any(func)
        values = [one for one in known if one is not None]
        target = str(func)
        if is_known and target in _NUMBERS:
            return self._number(original, tensors[0], values[0])
        if is_known and target == _IS_NONZERO:
            return self._answer(tensors[0], values[0])
        if is_known and torch.Tag.dynamic_output_shape in func.tags:
            return self._sized(original, func, args, kwargs, values)
        if target == "aten.masked_select.default" and (mask := self._of(args[1])) is not None:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return args[0].new_empty(int(mask.value.expand(shape).sum()))
        result = original()
        self.finite.note(func, args, result)
        self.drawn.note(func, args, result)
        if target in _NUMBERS and isinstance(result, (*_READ, torch.SymBool)):
            self.computed |= dict.fromkeys(result.node.expr.free_symbols, tensors[0])
        if not is_known:
            if func._schema.is_mutable:
                self._forget(args, kwargs, func)
            return result
        self._follow(func, args, kwargs, result, _most(values))
        return result

    def _sized(self, original: Any, func: Any, args: Any, kwargs: Any, values: Sequence[_Known]) -> Any:
        computed = self._computed(func, args, kwargs)
        if computed is None:
            return original()
        mode = next(x.fake_mode for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor))

        def faked(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            with mode:
                fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            self.known[fake] = _Known(x, _most(values))
            return fake

        return pytree.tree_map(faked, computed)

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any, depends_on: int) -> None:
        """Compute the op on the values too, and note what its results are."""
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, FakeTensor)]
        if not made or sum(_numel(x) for x in made) > MOST_ELEMENTS:
            return
        computed = self._computed(func, args, kwargs)
        real = [x for x in pytree.tree_leaves(computed) if isinstance(x, torch.Tensor)]
        if len(real) != len(made):
            self._forget(args, kwargs, func)
            return
        for fake, value in zip(made, real):
            if tuple(value.shape) == tuple(fake.shape):
                self.known[fake] = _Known(value, depends_on)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The op run on the values; None where that fails."""
        with without_dispatch_modes():
            try:
                real_args, real_kwargs = pytree.tree_map_only((torch.Tensor, *_READ), self._value, (args, kwargs))
                return func(*real_args, **real_kwargs)
            except Exception:  # whatever it is, the op's fake result stands
                return None

    def _value(self, x: Any) -> Any:
        """The value of a tensor, or of a number that was read of tensors, which reading it so does not fix."""
        if isinstance(x, _READ):
            kind = float if isinstance(x, torch.SymFloat) else int
            return kind(x.node.expr.xreplace({symbol: read[1] for symbol, read in self.symbols.items()}))
        known = self._of(x)
        assert known is not None, "all tensors of the call are known"
        return known.value

    def _forget(self, args: Any, kwargs: Any, func: Any) -> None:
        """The tensors that the op writes something unknown to are unknown, with all that share their memory."""
        names = [argument.name for argument in func._schema.arguments if argument.is_write]
        bound = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
        for leaf in pytree.tree_leaves([bound.get(name) for name in names]):
            if isinstance(leaf, torch.Tensor) and leaf in self.known:
                storage = self.known[leaf].value.untyped_storage()
                self.written[storage._cdata] = storage

    def _number(self, original: Callable[..., Any], fake: torch.Tensor, known: _Known) -> Any:
        """A number read of a tensor; a symbol, whose value is kept, if batches may differ in it."""
        number = known.value.item()
        if known.depends_on == CONSTANT:
            return number
        is_integer = not isinstance(number, (bool, float, complex))
        if isinstance(number, bool) or (isinstance(number, float) and known.depends_on == BUFFERS):
            self._guard([fake], _equals(number))
            return number
        if is_integer and self.takes_integers:
            self._guard([fake], _equals(number))
            return number
        symbol = original()
        self.symbols[symbol.node.expr] = fake, number
        return symbol

    def _answer(self, fake: torch.Tensor, known: _Known) -> bool:
        answer = bool(known.value)
        if known.depends_on > CONSTANT:
            self._guard([fake], _equals(answer))
        return answer

    def _decide(self, expression: Any) -> Any:
        """The value of an expression of numbers that were read of tensors; if they are not known, what holds of finite
        ones or raises no error, or None.
        """
        symbols = sorted(expression.free_symbols, key=str)
        sources = {symbol: read[0] for symbol, read in self.symbols.items()} | self.computed
        if not symbols or any(symbol not in sources for symbol in symbols):
            return None
        drawn = self.drawn.of_all(expression, {symbol: sources[symbol] for symbol in symbols})
        if drawn is not None:
            return drawn
        if all(symbol in self.symbols for symbol in symbols):
            value = expression.xreplace({symbol: sympy.sympify(self.symbols[symbol][1]) for symbol in symbols})
        else:
            finite = {symbol: self.finite.of(source) for symbol, source in sources.items() if symbol in symbols}
            if None not in finite.values():
                value = expression.xreplace({symbol: sympy.Integer(truth) for symbol, truth in finite.items()})
            else:
                value = {True: sympy.true, False: sympy.false, None: None}[answer_without_error()]
        if value is None:
            return None
        written = expression.xreplace({symbol: sympy.Symbol(f"v{i}") for i, symbol in enumerate(symbols)})
        condition = condition_of(written)
        if value is not sympy.true:
            condition = f"Not({condition})" if value is sympy.false else f"Eq({condition}, {value})"
        self._guard([sources[symbol] for symbol in symbols], condition)
        return value

    def _guard(self, values: Sequence[torch.Tensor], condition: str) -> None:
        self.pending.append((values, condition, quoted_here()))


def _most(values: Sequence[_Known]) -> int:
    """The last of the things that the values depend on."""
    return max((one.depends_on for one in values), default=CONSTANT)


def _equals(number: Any) -> str:
    if isinstance(number, bool):
        return "Ne(v0, 0)" if number else "Eq(v0, 0)"
    return f"Eq(v0, {number!r})"


def _numel(x: torch.Tensor) -> int:
    numel = x.numel()
    return numel if isinstance(numel, int) else MOST_ELEMENTS + 1


def _is_any(func: Any) -> bool:
    """Whether the values are random, or those of memory that nothing has been written to."""
    is_empty = str(func).startswith(("aten.empty", "aten.new_empty"))
    return is_empty or torch.Tag.nondeterministic_seeded in func.tags
