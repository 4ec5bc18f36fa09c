"""While a model is exported, the rows that a mask selects, as a loop over experts does, are recorded as an op.

`torch.where(mask)`, `mask.nonzero()` and indexing by a mask are `autopar.rows`, with as many rows as the mask has True:
an unknown number of at least one, so that no program may depend on it but on whether there are rows. A loop over the
experts that have rows, `for expert in (mask.sum((1, 2)) > 0).nonzero()`, runs for all experts. Both are right if an
expert without rows changes nothing, which a second export without any rows shows (`ir.passes.check_idle`).

`torch.bincount(ids, minlength=num)`, as routers count their tokens by, has `num` counts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.ir.export.source_lines import quoted_here
from autopar.ir.graph import resolve
from autopar.ir.guards.guard_ops import NOTE
from autopar.ir.guards.raising_branches import answer_without_error
from autopar.ir.masks.picked_rows import PICKED
from autopar.torch_compat import FakeTensor, disable_proxy_modes_tracing, pytree, without_dispatch_modes

ROWS = "autopar.rows.default"

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("rows(Tensor mask, bool is_empty) -> Tensor[]")


def _rows(mask: torch.Tensor, is_empty: bool) -> list[torch.Tensor]:
    """The coordinates of the True of `mask`."""
    return [each[:0] if is_empty else each for each in mask.nonzero(as_tuple=True)]


def _unknown_rows(mask: torch.Tensor, is_empty: bool) -> list[torch.Tensor]:
    size: Any = 0 if is_empty else mask.numel()
    if not is_empty and isinstance(mask, FakeTensor):
        size = torch.library.get_ctx().new_dynamic_size(min=1)
    return [mask.new_empty(size, dtype=torch.int64) for _ in mask.shape]


_LIBRARY.impl("rows", _rows, "CPU")
_LIBRARY.impl("rows", _rows, "CUDA")
torch.library.register_fake("autopar::rows", _unknown_rows, lib=_LIBRARY)

_TENSOR = torch.Tensor
_NONZERO = (torch.nonzero, _TENSOR.nonzero, torch.argwhere, _TENSOR.argwhere)
_EQUAL = (torch.eq, _TENSOR.eq, _TENSOR.__eq__)
_ABOVE = (torch.gt, torch.greater, _TENSOR.gt, _TENSOR.greater, _TENSOR.__gt__)
_SUMS = (torch.sum, _TENSOR.sum, torch.any, _TENSOR.any)
_ANY = (torch.any, _TENSOR.any)
_VIEWS = (torch.squeeze, _TENSOR.squeeze, _TENSOR.bool, _TENSOR.to)


@dataclass
class _Seen:
    """The known tensors of the model, by identity; they are held, so that no other gets it.

    `of_mask`: tensor -> the mask whose part for one expert it is, or of which it says which experts have rows; `kinds`:
    "sum" over all dims but one, "hit" where that is positive, "part", or "some": whether it has any row. `numbers`:
    tensors of numbers of experts, that have contents. `iterated`: masks whose experts with rows are iterated over.
    `asked`: masks of which the model asks whether they have rows; `selected`: those that select rows. `rows`: view of
    memory that is a mask -> its rows, so that all that it selects is known to have as many.
    """

    held: list[Any] = field(default_factory=list)
    kinds: dict[int, tuple[str, int]] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)
    iterated: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    selected: set[int] = field(default_factory=set)
    compared: dict[tuple[int, int, Any], torch.Tensor] = field(default_factory=dict)
    rows: dict[Any, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def keep(self, made: Any, kind: str, mask: int) -> Any:
        self.held.append(made)
        self.kinds[id(made)] = kind, mask
        return made

    def number(self, made: Any) -> Any:
        for each in pytree.tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self.held.append(each)
                self.numbers.add(id(each))
        return made


class RowsKept(TorchFunctionMode):
    """A context in which selected rows are ops; of no rows at all if the experts are `idle`.

    `is_known`: whether the example tells the values of a mask, which then decide. `picks`: whether the rows that a
    mask selects are `autopar.picked`, of which there may be none. `is_answered`: whether a tensor's truth is told.
    """

    def __init__(
        self,
        is_known: Callable[[torch.Tensor], bool],
        *,
        idle: bool = False,
        picks: Callable[[torch.Tensor], bool] = lambda _: False,
        is_answered: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        self.is_known, self.idle, self.picks, self.seen = is_known, idle, picks, _Seen()
        self.is_answered = is_answered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if self.seen.numbers and any(id(leaf) in self.seen.numbers for leaf in pytree.tree_leaves((args, named))):
            return self._with_numbers(func, args, named)
        handle = _HANDLERS.get(func)
        known = None if handle is None else handle(self, func, args, named)
        return func(*args, **named) if known is None else known

    def _rows(self, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kind, of = self.seen.kinds.get(id(mask), ("", 0))
        if kind == "part" and of not in self.seen.iterated:
            raise TraceError("a loop over experts with rows selects rows by another mask than it counts them in")
        self.seen.selected.add(id(self._held(mask)))
        place = (mask.storage_offset(), mask.shape, mask.stride())  # as text, since symbols have no hash
        view = (mask.untyped_storage()._cdata, mask._version, repr(place))
        if view not in self.seen.rows:
            made = resolve(PICKED)(mask) if self.picks(mask) else resolve(ROWS)(mask, self.idle)
            self.seen.rows[view] = tuple(made)
        return self.seen.rows[view]

    def check(self) -> None:
        """TraceError if the model asked a mask that selects nothing whether it has any True."""
        if self.seen.asked - self.seen.selected and not self.idle:
            raise TraceError(
                "the model branches on whether a number is among the values of a tensor, but not to select these; a"
                " plan needs one fixed program: use torch.where or a mask"
            )

    def _with_numbers(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """A call on tensors of numbers of experts: computed if on these alone."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if all(id(leaf) in self.seen.numbers for leaf in tensors):
            with disable_proxy_modes_tracing(), without_dispatch_modes():
                return self.seen.number(func(*args, **kwargs))
        if func is _TENSOR.__getitem__ and isinstance(args[1], torch.Tensor):
            number = int(self._with_numbers(_TENSOR.item, (args[1],), {})) if args[1].numel() == 1 else None
            if number is not None and args[1].dim() <= 1:
                part = args[0][number if args[1].dim() == 0 else slice(number, number + 1)]
                return self.seen.keep(part, "part", id(args[0]))
        if any(leaf.numel() != 1 for leaf in tensors if id(leaf) in self.seen.numbers):
            raise TraceError("the numbers of all experts that have rows are used together; loop over them instead")
        plain = partial(self._plain, self._with_numbers)
        return self.__torch_function__(func, (), *pytree.tree_map(plain, (tuple(args), dict(kwargs))))

    def _plain(self, compute: Callable[..., Any], leaf: Any) -> Any:
        is_number = isinstance(leaf, torch.Tensor) and id(leaf) in self.seen.numbers
        return compute(_TENSOR.item, (leaf,), {}) if is_number else leaf

    def where(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch.where of a mask alone."""
        return None if len(args) > 1 or kwargs or self.is_known(args[0]) else self._rows(args[0])

    def nonzero(self, func: Any, args: Any, kwargs: Any) -> Any:
        """All forms of nonzero: the experts that have rows, or the rows of one."""
        mask, is_tuple = args[0], bool(kwargs.get("as_tuple", False))
        if self.is_known(mask):
            return None
        kind, of = self.seen.kinds.get(id(mask), ("", 0))
        if kind == "hit":
            self.seen.iterated.add(of)
            with disable_proxy_modes_tracing(), without_dispatch_modes():
                every = torch.arange(0 if self.idle else mask.shape[0])
                return self.seen.number((every,) if is_tuple else every[:, None])
        rows = self._rows(mask)
        return rows if is_tuple else torch.stack(rows, -1)

    def get(self, func: Any, args: Any, kwargs: Any) -> Any:
        """x[mask]."""
        index = self._without_masks(args[1])
        return None if index is None else args[0][index]

    def select(self, func: Any, args: Any, kwargs: Any) -> Any:
        """masked_select of a tensor and a mask of one shape: x[mask]."""
        is_plain = len(args) == 2 and not kwargs and args[0].shape == args[1].shape
        return self.get(func, args, kwargs) if is_plain and self.picks(args[1]) else None

    def put(self, func: Any, args: Any, kwargs: Any) -> Any:
        """x[mask] = value."""
        index = self._without_masks(args[1])
        return None if index is None else (func(args[0], index, args[2]), args[0])[1]

    def _without_masks(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        is_mask = [isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts]
        if not any(is_mask) or any(self.is_known(part) for part, is_one in zip(parts, is_mask) if is_one):
            return None
        masks = zip(parts, is_mask)
        return tuple(each for part, is_one in masks for each in (self._rows(part) if is_one else (part,)))

    def bincount(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The counts of ids below `minlength`; another id is an error of scatter_add, where torch has more counts."""
        return None if self.is_known(args[0]) else _counts(*args, **kwargs)

    def equal(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The comparison of x with a number: the same tensor for the same x, so that both select as many rows."""
        if kwargs or len(args) != 2 or not isinstance(args[0], torch.Tensor) or type(args[1]) is not int:
            return None
        key = id(args[0]), args[0]._version, args[1]
        if key not in self.seen.compared:
            self.seen.held.append(args[0])
            self.seen.compared[key] = func(*args)
        return self.seen.compared[key]

    def total(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A sum over all dims of ids == expert, or over all but the first of any mask."""
        x, *rest = args
        if not rest and not kwargs and any(x is mask for mask in self.seen.compared.values()):
            return self.seen.keep(func(x), "some", id(self._held(x)))
        if not rest and not kwargs and func in _ANY and x.dtype == torch.bool and self.picks(x):
            return self.seen.keep(func(x), "any", id(self._held(x)))
        dims = kwargs.get("dim", rest[0] if rest else None)
        dims = (dims,) if isinstance(dims, int) else dims
        if not isinstance(dims, tuple | list) or len(kwargs.keys() - {"dim"}) or len(rest) > 1:
            return None
        if {dim % x.dim() for dim in dims} != set(range(1, x.dim())):
            return None
        return self.seen.keep(func(*args, **kwargs), "sum", id(self._held(x)))

    def above(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A sum > 0."""
        kind, of = self.seen.kinds.get(id(args[0]), ("", 0))
        if kind not in ("sum", "some") or kwargs or type(args[1]) is not int or args[1] != 0:
            return None
        return self.seen.keep(func(*args), {"sum": "hit"}.get(kind, kind), of)

    def truth(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Whether there are rows; of those that are picked there may be none, and the branch is one on values. That a
        mask, not of an expert, has any is taken to be so, and each call checks it.
        """
        kind, of = self.seen.kinds.get(id(args[0]), ("", 0))
        if kind == "any" and not self.is_answered(args[0]) and answer_without_error() is None:
            self.seen.asked.add(of)
            resolve(NOTE)([args[0]], "Ne(v0, 0)", quoted_here())
            return True
        if kind != "some" or self.is_known(args[0]) or self.picks(args[0]):
            return None
        self.seen.asked.add(of)
        return not self.idle

    def view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A view or a cast of an expert's part of a mask."""
        kind, of = self.seen.kinds.get(id(args[0]), ("", 0))
        return self.seen.keep(func(*args, **kwargs), kind, of) if kind == "part" else None

    def _held(self, x: Any) -> Any:
        self.seen.held.append(x)
        return x


def _counts(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    if not minlength:
        raise TraceError(
            "torch.bincount has as many counts as the largest id that it finds; give it their number, minlength="
        )
    if weights is None:
        terms = torch.ones_like(input, dtype=torch.int64)
    else:
        terms = weights.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
    return terms.new_zeros(minlength).scatter_add(0, input.long(), terms)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.where: RowsKept.where,
    _TENSOR.__getitem__: RowsKept.get,
    _TENSOR.__setitem__: RowsKept.put,
    _TENSOR.__bool__: RowsKept.truth,
    torch.bincount: RowsKept.bincount,
    _TENSOR.bincount: RowsKept.bincount,
    torch.masked_select: RowsKept.select,
    _TENSOR.masked_select: RowsKept.select,
    **dict.fromkeys(_NONZERO, RowsKept.nonzero),
    **dict.fromkeys(_EQUAL, RowsKept.equal),
    **dict.fromkeys(_SUMS, RowsKept.total),
    **dict.fromkeys(_ABOVE, RowsKept.above),
    **dict.fromkeys(_VIEWS, RowsKept.view),
}
