"""Chains: opaque calls of one body, each on the results of the one before, are one op of the exported model.

torch.export takes milliseconds for an op, however little it does. So a call gives out stand-ins for its results, and is
recorded as an op only when something else happens: most models call their blocks one after the other. Stand-ins that
something else reads are results of an op; if one is read too late for that, the model is exported without chains.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from autopar.ir.export.source_lines import line_of_caller
from autopar.torch_compat import FakeTensor, disable_proxy_modes_tracing, pytree, without_function_modes


class Unsure(BaseException):
    """Raised if an opaque call may differ from the module's call.

    It is no Exception, so that a model that catches exceptions does not continue.
    """


class ReadLate(Unsure):
    """Raised if a result is read that is within a chain already."""


class Called(Protocol):
    """The body of the calls in a chain; `made`: the text of what it makes (`described`)."""

    @property
    def number(self) -> int: ...

    @property
    def made(self) -> str: ...


@dataclass(frozen=True)
class CallChain:
    """Modules `fqns` called one after the other, at these `lines` of the model, all with body number `body`.

    `links`: for each tensor argument of each module but the first, the number of the result of the module before that
    it is, or -1 for the tensor that the first module is called with.
    """

    fqns: tuple[str, ...]
    lines: tuple[str, ...]
    body: int
    links: tuple[int, ...] = ()


# The stand-ins of so many calls are made at once: to leave the trace and return takes longer than to make one.
_MADE_AT_ONCE = 16
# Shape, stride, dtype, device and whether it needs a gradient, of a tensor that an op makes.
Described = tuple[tuple[int, ...], tuple[int, ...], str, str, bool]


@lru_cache(maxsize=64)
def described(made: str) -> tuple[Described, ...]:
    """The tensors that the text describes; it is a list of `Described`."""
    return tuple(ast.literal_eval(made))


class Chaining:
    """The calls that are no op yet, with the stand-ins of all results so far. `emit`: records a chain as an op."""

    def __init__(self, emit: Callable[[Sequence[torch.Tensor], CallChain, str], list[torch.Tensor]]) -> None:
        self._emit = emit
        self._body: Called | None = None
        self._calls: list[tuple[str, str]] = []  # FQN of the module, line of the model
        self._given: list[torch.Tensor] = []
        self._links: tuple[int, ...] = ()
        self._results: list[list[torch.Tensor]] = []  # stand-ins of each call
        self._unused: list[list[torch.Tensor]] = []  # of calls to come
        # id of a stand-in that is no longer pending -> (the stand-in, its tensor if that is a result of an op)
        self._settled: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def call(self, fqn: str, body: Called, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results of module `fqn` called with these tensors."""
        links = self._links_to(body, tensors)
        if links is None:
            tensors = self.settle(tensors)
            if not tensors:
                return self._emit(tensors, CallChain((fqn,), (line_of_caller(),), body.number), body.made)
            self._body, self._given = body, tensors
        else:
            self._links = links
        self._calls.append((fqn, line_of_caller()))
        if not self._unused:
            self._unused = _stand_ins(body.made, tensors[0], 1 if links is None else _MADE_AT_ONCE)
        self._results.append(self._unused.pop())
        return self._results[-1]

    def settle(self, tree: Any) -> Any:
        """`tree` with tensors in place of stand-ins; all calls so far are ops."""
        if not self._results and not self._settled:
            return tree
        leaves, spec = pytree.tree_flatten(tree)
        self._flush({id(leaf) for leaf in leaves})
        known = [self._settled.get(id(leaf), (leaf, leaf)) for leaf in leaves]
        if any(tensor is None and stand_in is not None for stand_in, tensor in known):
            raise ReadLate("a result of a module is read after other modules of its kind were called")
        return pytree.tree_unflatten([tensor for _, tensor in known], spec)

    def _links_to(self, body: Called, tensors: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
        """The links of a call that continues the chain; None if it does not."""
        if body is not self._body or not self._results:
            return None
        before = {id(x): number for number, x in enumerate(self._results[-1])}
        same = [self._settled.get(id(x), (x, x))[1] is given for x, given in zip(tensors, self._given, strict=True)]
        if not all(id(x) in before or is_same for x, is_same in zip(tensors, same)):
            return None
        links = tuple(before.get(id(x), -1) for x in tensors)
        return links if max(links) >= 0 and (len(self._results) == 1 or links == self._links) else None

    def _flush(self, read: set[int]) -> None:
        """Record the pending calls; those with a stand-in in `read`, and the last one, end an op."""
        body, calls, given, links, pending = self._body, self._calls, self._given, self._links, self._results
        self._body, self._calls, self._given, self._links = None, [], [], ()
        self._results, self._unused = [], []
        start, inputs = 0, given
        for end, results in enumerate(pending, start=1):
            if end < len(pending) and read.isdisjoint(map(id, results)):
                self._settled.update((id(x), (x, None)) for x in results)
                continue
            assert body is not None, "calls are of a body"
            fqns, lines = zip(*calls[start:end])
            made = self._emit(inputs, CallChain(fqns, lines, body.number, links), body.made)
            self._settled.update((id(x), (x, tensor)) for x, tensor in zip(results, made, strict=True))
            start, inputs = end, [first if link < 0 else made[link] for first, link in zip(given, links)]


def _stand_ins(made: str, like: torch.Tensor, num: int) -> list[list[torch.Tensor]]:
    """Tensors as `described`, `num` times, that the trace does not know, of the kind of `like`."""
    if not isinstance(like, FakeTensor):
        raise Unsure("a module is called with a tensor that has contents")
    with disable_proxy_modes_tracing(), without_function_modes(), like.fake_mode:
        return [[_empty(*each) for each in described(made)] for _ in range(num)]


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: str, device: str, needs_grad: bool) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device, requires_grad=needs_grad)


TELL_OF_A_TENSOR = frozenset(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta")
        ),
        *(getattr(torch.Tensor, name) for name in ("size", "dim", "stride", "numel", "is_floating_point", "__len__")),
    ]
)


class Settling(TorchFunctionMode):
    """A mode in which whatever torch does, but for telling sizes and kinds, comes behind the calls before it."""

    def __init__(self, chaining: Chaining) -> None:
        super().__init__()
        self._chaining = chaining

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in TELL_OF_A_TENSOR:
            args, kwargs = self._chaining.settle((args, kwargs or {}))
        return func(*args, **(kwargs or {}))
