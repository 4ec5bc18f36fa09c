"""Stand-ins for the results of calls that are not traced, and what is read of them."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.loops import advance_op  # noqa: F401 - it defines an op
from autopar.torch_compat import FakeTensor, disable_proxy_modes_tracing, without_function_modes

JOINS: frozenset[Any] = frozenset((torch.stack, torch.cat, torch.concat))
_MOST_PIECES = 16  # that a join of steps is of


@dataclass(slots=True)
class SeenCall:
    """A call by what must be alike, `key`, what may go on, `made`, the call and number of tensors that are results, and
    `indices`, and its results.
    """

    key: Any
    made: tuple[tuple[int, int], ...]
    indices: tuple[int, ...]
    results: Any = None
    spec: Any = None
    given: tuple[int, ...] = ()  # for each result the number of the tensor that was given that it is, or -1


@dataclass(slots=True)
class GuessedLoop:
    """A loop that is guessed: from call `start` on, steps of `period` calls.

    `last`: the two steps before; `traced`: the last that was traced. `free`: stand-ins that nobody holds.
    """

    start: int
    period: int
    last: deque[SeenCall]
    traced: tuple[SeenCall, ...]
    given: list[tuple[Any, int, int]] = field(default_factory=list)  # (reference to a stand-in, call, result)
    free: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class StandIn:
    """A stand-in that was there when its loop ended, and the tensor that it is once that was read."""

    tensor: torch.Tensor
    guessing: GuessedLoop
    call: int
    result: int
    settled: torch.Tensor | None = None

    @property
    def place(self) -> int:
        """The number of the call within its step."""
        return (self.call - self.guessing.start) % self.guessing.period

    @property
    def by(self) -> int:
        """How many steps it is behind the last that was traced."""
        return (self.call - self.guessing.start) // self.guessing.period + 1

    @property
    def is_view(self) -> bool:
        return self.guessing.traced[self.place].results[self.result]._is_view()


def advance(wanted: list[tuple[StandIn, int]]) -> list[torch.Tensor]:
    """The op that gives the tensors for stand-ins of a loop, (stand-in, 0 or the number of steps to stack from it)."""
    numbers: dict[tuple[int, int], int] = {}
    which = [numbers.setdefault((one.place, one.result), len(numbers)) for one, _ in wanted]
    traced = wanted[0][0].guessing.traced
    last = [traced[place].results[result] for place, result in numbers]
    return torch.ops.autopar.advance(last, which, [one.by for one, _ in wanted], [num for _, num in wanted])


def joined(func: Any, args: Any, kwargs: Any, stand_ins: Mapping[int, StandIn]) -> torch.Tensor | None:
    """The result of a `stack` or `cat` of the stand-ins of many steps in a row; None of another call."""
    dim = args[1] if len(args) == 2 else kwargs.get("dim", 0)
    tensors = args[0] if args else None
    if not isinstance(tensors, (tuple, list)) or set(kwargs) - {"dim"} or len(args) > 2 or type(dim) is not int:
        return None
    pieces: list[list[Any]] = []
    for x in tensors:
        one = stand_ins.get(id(x))
        if one is not None and one.settled is not None:  # and may have been written to
            one, x = None, one.settled
        if pieces and _is_next(pieces[-1], one):
            pieces[-1].append(one)
        elif pieces and one is None and not isinstance(pieces[-1][0], StandIn):
            pieces[-1].append(x)
        else:
            pieces.append([x if one is None else one])
    if len(pieces) > _MOST_PIECES or not any(isinstance(p[0], StandIn) and len(p) > 1 for p in pieces):
        return None
    dim = dim % (tensors[0].dim() + (func is torch.stack))
    return torch.cat([_piece(func, piece, dim) for piece in pieces], dim)


def _piece(func: Any, piece: list[Any], dim: int) -> torch.Tensor:
    if not isinstance(piece[0], StandIn):
        return func(piece, dim)
    first, last = piece[0], piece[-1]
    (stacked,) = advance([(min(first, last, key=lambda one: one.by), len(piece))])
    turned = (stacked.flip(0) if first.by > last.by else stacked).movedim(0, dim)
    return turned if func is torch.stack else turned.flatten(dim, dim + 1)


def _is_next(piece: list[Any], one: StandIn | None) -> bool:
    """Whether a stand-in is that of the next step, or of the one before."""
    last = piece[-1]
    if one is None or not isinstance(last, StandIn) or last.guessing is not one.guessing:
        return False
    if (last.place, last.result) != (one.place, one.result) or abs(one.by - last.by) != 1:
        return False
    return len(piece) == 1 or one.by - last.by == last.by - piece[-2].by


def made_like(x: torch.Tensor, num: int) -> list[torch.Tensor]:
    """Tensors that the trace does not know, of the kind of `x`."""
    assert isinstance(x, FakeTensor), "results of traced calls are fake"
    with disable_proxy_modes_tracing(), without_function_modes(), x.fake_mode:
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
            for _ in range(num)
        ]
