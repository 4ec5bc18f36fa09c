"""Steps of a loop that are not traced: once many have called the same functions alike, further calls that go on so give
out stand-ins, until a call does otherwise.

torch.export takes milliseconds for a call. Python runs all steps nevertheless, so that each call is compared with those
of the two steps before: it must be the same function, with the same constants, on tensors whose places in the order of
calls, and indices, go on by as much as they did. Where the stand-ins are read, they are results of one
`autopar.advance`, which `roll_up` resolves in the loop of the steps that were traced; where it finds none, the model is
traced in full.
"""

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.ir.loops.find_loops import MIN_STEPS
from autopar.ir.loops.guessed_values import JOINS, GuessedLoop, SeenCall, StandIn, advance, joined, made_like
from autopar.ir.outline.chains import TELL_OF_A_TENSOR
from autopar.ir.outline.replaced_forward import replaced_forward
from autopar.torch_compat import FakeTensor, pytree, without_function_modes

_TRACED = MIN_STEPS + 4  # steps, of which the first may differ and one is cut at both ends
_MADE_AT_ONCE = 16  # to leave the trace and return takes longer than to make one
_LONGEST = 512  # calls of a step
_INDEXED: frozenset[Any] = frozenset((torch.Tensor.__getitem__, torch.select, torch.Tensor.select))
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format, type(...))


class UnsureSteps(BaseException):
    """Raised if the steps that were not traced may differ from those that were.

    It is no Exception, so that a model that catches exceptions does not continue.
    """


@dataclass
class _Guesses:
    """Whether a trace made any guess."""

    has_any: bool = False


Result = TypeVar("Result")
_GUESSES: ContextVar[_Guesses | None] = ContextVar("guesses", default=None)


def with_guessed_steps(trace: Callable[[], Result]) -> Result:
    """The result of `trace`, with steps that are guessed; of another trace, if that fails or is not sure."""
    guesses = _Guesses()
    token = _GUESSES.set(guesses)
    try:
        return trace()
    except (UnsureSteps, TraceError):
        if not guesses.has_any:
            raise
    finally:
        _GUESSES.reset(token)
    return trace()


def steps_guessed(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which calls of the model's forward may be guessed, if it is within `with_guessed_steps`."""
    guesses, forward = _GUESSES.get(), model.forward
    if guesses is None:
        return nullcontext()

    def guessed(*args: Any, **kwargs: Any) -> Any:
        mode = _StepGuesses(guesses)
        with mode:
            result = forward(*args, **kwargs)
        return mode.settled_tree(result)

    return replaced_forward(model, guessed)


class _StepGuesses(TorchFunctionMode):
    def __init__(self, guesses: _Guesses) -> None:
        super().__init__()
        self.guesses = guesses
        self.num = 0  # calls so far
        self.places: dict[int, tuple[Any, int, int]] = {}  # id of a tensor -> (reference to it, call, result)
        self.outside: dict[int, tuple[Any, int]] = {}  # id of a tensor -> (reference to it, its number)
        self.numbers = itertools.count()
        self.seen: dict[Any, deque[int]] = {}  # key of a call -> the last calls with it
        self.runs: dict[int, int] = {}  # period -> calls in a row with the key of the call a period before
        self.recent: deque[SeenCall] = deque(maxlen=3 * _LONGEST)
        self.guessing: GuessedLoop | None = None
        self.stand_ins: dict[int, StandIn] = {}  # by id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in TELL_OF_A_TENSOR:
            return func(*args, **kwargs)
        if self.guessing is not None:
            call = self._described(func, args, kwargs)
            if call is not None and self._goes_on(call):
                return self._stand_in(call, _tensors((args, kwargs)))
            self._flush()
        if self.stand_ins:
            if func in JOINS and (whole := joined(func, args, kwargs, self.stand_ins)) is not None:
                self._note(None, whole, [])
                return whole
            args, kwargs = self._settle(func, args, kwargs)
        call, tensors = self._described(func, args, kwargs), _tensors((args, kwargs))
        result = func(*args, **kwargs)
        self._note(call, result, tensors)
        return result

    def settled_tree(self, tree: Any) -> Any:
        """`tree`, which the model returns, without stand-ins."""
        self._flush()
        leaves, spec = pytree.tree_flatten(tree)
        return pytree.tree_unflatten(self._settled(leaves), spec)

    def _settle(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments without stand-ins."""
        if _writes(func, kwargs):  # a tensor that stand-ins follow from, for all that is known
            self._settled([one.tensor for one in self.stand_ins.values()])
        leaves, spec = pytree.tree_flatten((args, kwargs))
        found = [self.stand_ins[id(leaf)] for leaf in leaves if id(leaf) in self.stand_ins]
        if not found:
            return args, kwargs
        if _writes(func, kwargs) and any(one.is_view for one in found):
            raise UnsureSteps("a view of a step that was not traced is written to")
        return pytree.tree_unflatten(self._settled(leaves), spec)

    def _settled(self, leaves: list[Any]) -> list[Any]:
        """`leaves` with results of an op in place of stand-ins."""
        pending: dict[int, list[StandIn]] = {}
        for leaf in leaves:
            one = self.stand_ins.get(id(leaf))
            if one is not None and one.settled is None and one not in pending.setdefault(id(one.guessing), []):
                pending[id(one.guessing)].append(one)
        for several in pending.values():
            for one, tensor in zip(several, advance([(one, 0) for one in several])):
                one.settled = tensor
                self.places[id(tensor)] = weakref.ref(tensor), one.call, one.result
        known = [self.stand_ins.get(id(leaf)) for leaf in leaves]
        return [leaf if one is None else one.settled for leaf, one in zip(leaves, known)]

    def _described(self, func: Any, args: Any, kwargs: Any) -> SeenCall | None:
        """The call by what is compared; None if it cannot be guessed."""
        if _writes(func, kwargs):
            return None
        fixed: list[Any] = [func, torch.is_grad_enabled(), *map(_autocast, ("cpu", "cuda"))]
        made: list[tuple[int, int]] = []
        indices: list[int] | None = [] if func in _INDEXED else None
        with without_function_modes():  # that would be asked for each size
            is_plain = self._describe((args, kwargs), fixed, made, indices)
        return SeenCall(tuple(fixed), tuple(made), tuple(indices or ())) if is_plain else None

    def _describe(self, tree: Any, fixed: list[Any], made: list[tuple[int, int]], indices: list[int] | None) -> bool:
        if isinstance(tree, torch.Tensor):
            known = self.places.get(id(tree))
            if known is not None and known[0]() is tree:
                fixed.append("made")
                made.append(known[1:])
            else:
                fixed.append(self._number_outside(tree))
            fixed += [tree.shape, tree.stride(), tree.dtype, tree.requires_grad]
            return all(type(size) is int for size in tree.shape)  # symbols have no hash
        if type(tree) in (tuple, list):
            fixed.append((type(tree), len(tree)))
            return all(self._describe(item, fixed, made, indices) for item in tree)
        if type(tree) is dict:
            fixed.append(tuple(tree))
            return all(self._describe(item, fixed, made, indices) for item in tree.values())
        if type(tree) is slice:
            fixed.append(slice)
            return self._describe((tree.start, tree.stop, tree.step), fixed, made, indices)
        if type(tree) is torch.Size:
            fixed.append(tuple(tree))
            return True
        if type(tree) is int and indices is not None:
            fixed.append(int)
            indices.append(tree)
            return True
        fixed += [type(tree), tree if tree == tree else "nan"] if isinstance(tree, _PLAIN) else []
        return isinstance(tree, _PLAIN)

    def _number_outside(self, tensor: torch.Tensor) -> int:
        """A number of a tensor that no call made that was seen."""
        known = self.outside.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = self.outside[id(tensor)] = weakref.ref(tensor), next(self.numbers)
        return known[1]

    def _note(self, call: SeenCall | None, result: Any, tensors: list[torch.Tensor]) -> None:
        """Take a call that was traced."""
        results, spec = pytree.tree_flatten(result)
        if call is None or not results or not all(isinstance(x, FakeTensor) for x in results):
            self.runs.clear()
            self.recent.clear()
            self.num += 1
            return
        for number, x in enumerate(results):
            self.places[id(x)] = weakref.ref(x), self.num, number
        before = self.seen.setdefault(call.key, deque(maxlen=8))
        periods = [self.num - at for at in before]
        self.runs = {p: self.runs.get(p, 0) + 1 for p in periods if p <= _LONGEST}
        before.append(self.num)
        self.num += 1
        steps = {p: run // p for p, run in self.runs.items()}
        if any(num >= MIN_STEPS for num in steps.values()):
            call.results, call.spec = results, spec
            call.given = tuple(next((i for i, x in enumerate(tensors) if x is result), -1) for result in results)
            self.recent.append(call)
        else:
            self.recent.clear()
        for period in sorted(p for p, num in steps.items() if num >= _TRACED):
            if len(self.recent) >= 4 * period and self._is_steady(period) and self._is_start(period):
                calls = list(self.recent)[-2 * period :]
                self.guessing = GuessedLoop(self.num, period, deque(calls), tuple(calls[period:]))
                self.guesses.has_any = True
                break

    def _is_steady(self, period: int) -> bool:
        """Whether each call of the last step goes on as that of the step before did."""
        calls = list(self.recent)[-3 * period :]
        first, second, third = calls[:period], calls[period : 2 * period], calls[2 * period :]
        return all(_follows(*three) for three in zip(first, second, third))

    def _is_start(self, period: int) -> bool:
        """Whether a step begins here: where it reads least of the step before, at indices that are nearest."""
        calls = list(self.recent)[-3 * period :]
        first = self.num - len(calls)

        def cost(offset: int) -> tuple[int, int]:
            start, read, indices = period + offset, set[tuple[int, ...]](), list[int]()
            for number in range(start, start + period):
                call, before = calls[number], calls[number - period]
                read |= {made for made in call.made if first + start - period <= made[0] < first + start}
                indices += [now for now, then in zip(call.indices, before.indices) if now != then]
            return len(read), max(indices, default=0) - min(indices, default=0)

        return cost(period) == min(map(cost, range(1, period + 1)))

    def _goes_on(self, call: SeenCall) -> bool:
        guessing = self.guessing
        assert guessing is not None, "it is asked while a loop is guessed"
        return _follows(guessing.last[0], guessing.last[guessing.period], call)

    def _stand_in(self, call: SeenCall, tensors: list[torch.Tensor]) -> Any:
        guessing = self.guessing
        assert guessing is not None, "it is asked while a loop is guessed"
        old, like = guessing.last.popleft(), guessing.last[guessing.period - 1]
        place = (self.num - guessing.start) % guessing.period
        is_guessed = self.num - guessing.start >= 2 * guessing.period
        call.results, call.spec, call.given = [], like.spec, like.given
        made_now: list[torch.Tensor] = []
        for number, (x, given) in enumerate(zip(like.results, like.given)):
            free = guessing.free.setdefault((place, number), [])
            made = tensors[given] if given >= 0 else free.pop() if free else self._made(x, free, guessing)
            self.places[id(made)] = weakref.ref(made), self.num, number
            guessing.given.append((weakref.ref(made), self.num, number))
            call.results.append(made if given < 0 else None)
            made_now.append(made)
        if is_guessed:
            for number in range(len(old.results)):
                if old.given[number] < 0 and sys.getrefcount(old.results[number]) <= 2:  # this list and the call
                    guessing.free[place, number].append(old.results[number])
        guessing.last.append(call)
        self.num += 1
        return pytree.tree_unflatten(made_now, call.spec)

    def _made(self, like: torch.Tensor, free: list[torch.Tensor], guessing: GuessedLoop) -> torch.Tensor:
        """A tensor like that one; many at once behind the first steps, in which those that nobody holds come free."""
        free += made_like(like, _MADE_AT_ONCE if self.num - guessing.start > 4 * guessing.period else 1)
        return free.pop()

    def _flush(self) -> None:
        """End the loop that is guessed: stand-ins that are still there are results of an op."""
        guessing, self.guessing = self.guessing, None
        self.runs.clear()
        self.recent.clear()
        if guessing is None or self.num == guessing.start:
            return
        guessing.last.clear()
        guessing.free.clear()
        for reference, at, number in guessing.given:
            if (x := reference()) is not None:
                self.stand_ins[id(x)] = StandIn(x, guessing, at, number)


def _follows(first: SeenCall, second: SeenCall, third: SeenCall) -> bool:
    """Whether three calls are alike, and what moves goes on from the second to the third as from the first."""
    if not first.key == second.key == third.key or first.given != second.given:
        return False
    moving = ((*itertools.chain(*call.made), *call.indices) for call in (first, second, third))
    return all(c - b == b - a for a, b, c in zip(*moving, strict=True))


def _autocast(device_type: str) -> torch.dtype | None:
    """The dtype of autocast; None while it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _writes(func: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    is_inplace = name.endswith("_") and not name.endswith("__")
    return is_inplace or name in ("__setitem__", "__set__", "__delitem__") or name.startswith("__i") or "out" in kwargs
