"""Placements and layouts: how one tensor lies on the mesh; docs/architecture.md, "SBP", has the algebra."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from autopar.mesh import SeenShares


class _Unique(type):
    """The class of `Placement`, of which equal instances are one object, so that they hash and compare as fast as any
    object: planning does both by the million.
    """

    def __call__(
        cls, kind: str, dim: int = -1, unit: int = 1, shares: tuple[int, ...] = (), sections: tuple[int, ...] = ()
    ) -> Any:
        key = (kind, dim, unit, shares, sections)
        return _PLACEMENTS.get(key) or _PLACEMENTS.setdefault(key, super().__call__(*key))


_PLACEMENTS: dict[tuple[Any, ...], Any] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Placement(metaclass=_Unique):
    """The way a tensor lies on one mesh axis: S(dim) split, P pending sum, I whole, R whole with a pending gradient.

    L: each rank has what it computed of its own tokens alone, which is no part of the global value: L(dim) has a part
    of the global size, in the rank's own order, L() the global size. E(dim): each rank has the rows of its own experts,
    sorted by expert, as many as there are, on average a part of the global size. There is no conversion from or to L
    and E: only ops turn one into the other.

    `unit`: of a split whose parts are multiples of so many elements, S(dim/unit), as heads are; see `parts.part_sizes`.
    `shares`: of a split of the batch in unequal parts, S(dim:24+8), the units that each rank gets of so many as they
    are together, and of any other number in proportion (`shared_sizes`).
    `sections`: of a split in which each rank has its equal share of every section of the dim, S(dim|3x1), one after the
    other; their sizes in lowest terms, as of queries, keys and values in a fused projection.
    """

    kind: str
    dim: int = -1
    unit: int = 1
    shares: tuple[int, ...] = ()
    sections: tuple[int, ...] = ()

    def __str__(self) -> str:
        name = {"I": "B", "R": "B*"}.get(self.kind, self.kind)
        if not self.is_split:
            return name
        unit = "" if self.unit == 1 else f"/{self.unit}"
        sections = f"|{format_shares(self.sections)}" if self.sections else ""
        return f"{name}({self.dim}{unit}{f':{format_shares(self.shares)}' if self.shares else ''}{sections})"

    __repr__ = __str__

    @property
    def _key(self) -> tuple[str, int, int, tuple[int, ...], tuple[int, ...]]:
        return self.kind, self.dim, self.unit, self.shares, self.sections

    def __lt__(self, other: "Placement") -> bool:
        return self._key < other._key

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return Placement, self._key

    @property
    def is_split(self) -> bool:
        """Whether a rank has a part of the global size."""
        return self.dim >= 0

    @property
    def is_own(self) -> bool:
        """Whether a rank has what is no part of the global value, in an order of its own (L, E)."""
        return self.kind in "LE"


def format_shares(shares: Iterable[int]) -> str:
    """The text of shares; equal ones that follow one another are counted.

    >>> format_shares((24, 8)), format_shares((3, 3, 2, 2, 2))
    ('24+8', '2x3+3x2')
    """
    runs = [(size, len(list(run))) for size, run in itertools.groupby(shares)]
    return "+".join(str(size) if count == 1 else f"{count}x{size}" for size, count in runs)


def parse_shares(text: str) -> tuple[int, ...]:
    """The shares that `format_shares` writes as `text`; ValueError if there are none.

    >>> parse_shares("2x3+5")
    (3, 3, 5)
    """
    if not re.fullmatch(_SHARES, text):
        raise ValueError(f"not shares: {text!r}; write the rows of each rank, e.g. '24+8' or '2x3+3x2'")
    runs = (run.rpartition("x") for run in text.split("+"))
    counted = [(int(count or 1), int(size)) for count, _, size in runs]
    if sum(count for count, _ in counted) > MOST_SHARES:
        raise ValueError(f"not shares: {text!r} are of more than {MOST_SHARES} ranks")
    return tuple(size for count, size in counted for _ in range(count))


P, I, R = Placement("P"), Placement("I"), Placement("R")  # noqa: E741 - I is the field's letter

Layout = tuple[Placement, ...]  # one placement per mesh axis, outermost axis first
Item = TypeVar("Item")


class KeyTuple(tuple[Item, ...]):
    """A tuple that computes its hash once: long ones are asked for it by every cache that they key."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    def __reduce__(self) -> tuple[type, tuple[tuple[Item, ...]]]:
        return KeyTuple, (tuple(self),)  # the hash may be another in another process


def S(dim: int, unit: int = 1, shares: tuple[int, ...] = (), sections: tuple[int, ...] = ()) -> Placement:
    """The placement split along `dim`, which is not negative, in multiples of `unit`, in `shares` or in `sections`."""
    assert dim >= 0, f"S needs a non-negative dim, found {dim}"
    return Placement("S", dim, unit, shares, sections)


def shares(dim: int, unit: int = 1) -> Placement:
    """The placement split along `dim` in the shares that the axis has, in generated code."""
    return Placement("S", dim, unit, (1,))


def L(dim: int = -1) -> Placement:
    """The placement of what each rank computed of its own tokens: split along `dim`, or of the global size (-1)."""
    return Placement("L", dim)


def E(dim: int) -> Placement:
    """The placement of the rows of each rank's own experts along `dim`."""
    return Placement("E", dim)


# A layout as numbers, which compare fast: for each axis the dim of a split (of L and E: more than any dim; in units: so
# many times UNIT more; in shares or sections: SHARED times more for each that are known), or a negative number for
# another kind.
Codes = tuple[int, ...]
PENDING, WHOLE, USED, OWN = -1, -2, -3, -4
OWN_DIM = 64  # the code of L(0), and half that of E(0); torch's tensors have at most as many dims
UNIT = 256
SHARED = 2**48
MOST_SHARES = 2**16  # ranks of an axis
_SHARES = r"(?:[1-9][0-9]{0,4}x)?[1-9][0-9]{0,8}(?:\+(?:[1-9][0-9]{0,4}x)?[1-9][0-9]{0,8})*"
_NUMBERS: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {((), ()): 0}  # of (shares, sections), in their codes
_OF_KIND = {"P": PENDING, "I": WHOLE, "R": USED, "L": OWN}
_OF_CODE = {PENDING: P, WHOLE: I, USED: R, OWN: L()}


def codes_of(layout: Layout) -> Codes:
    """The codes of a layout: for each axis the dim of a split, else a negative number for the kind.

    >>> codes_of((S(1), P, I, R))
    (1, -1, -2, -3)
    """
    return tuple(
        [
            placement.dim
            if placement.kind == "S" and placement.unit == 1 and not placement.shares and not placement.sections
            else _other_code(placement)
            for placement in layout
        ]
    )


def _other_code(placement: Placement) -> int:
    if not placement.is_split:
        return _OF_KIND[placement.kind]
    if placement.kind == "S":
        number = _NUMBERS.setdefault((placement.shares, placement.sections), len(_NUMBERS))
        return placement.dim + UNIT * placement.unit + SHARED * number
    return placement.dim + (OWN_DIM if placement.kind == "L" else 2 * OWN_DIM)


def kind_of(code: int) -> str:
    """The kind of the placement whose code is `code`."""
    return placement_of(code).kind


def placement_of(code: int) -> Placement:
    """The placement whose code is `code`."""
    if code < 0:
        return _OF_CODE[code]
    number, code = divmod(code, SHARED)
    unit, code = divmod(code, UNIT)
    shares, sections = tuple(_NUMBERS)[number] if number else ((), ())
    return Placement("SLE"[code // OWN_DIM], code % OWN_DIM, unit or 1, shares, sections)


def is_convertible(src: Layout, dst: Layout) -> bool:
    """Whether a value can be converted from `src` to `dst`: on no axis from or to L or E."""
    return all(a == b or not (a.is_own or b.is_own) for a, b in zip(src, dst))


def format_layout(layout: Layout) -> str:
    """The text of a layout, in the form of pins.

    >>> format_layout((S(0), I))
    'S(0)B'
    """
    return "".join(map(str, layout))


def parse_layout(text: str) -> Layout:
    """The layout that `format_layout` writes as `text`; ValueError if there is none.

    >>> parse_layout("S(1)B*P")
    (S(1), B*, P)
    """
    parts = re.findall(rf"S\([0-9]+(?:\|{_SHARES}|(?:/[1-9][0-9]*)?:{_SHARES})\)|{_WITHOUT_SHARES}", text)
    if "".join(parts) != text:
        raise ValueError(f"not a layout: {text!r}; write one of S(dim), B, B*, P per mesh axis, e.g. 'S(0)B'")
    plain = {"B": I, "B*": R, "P": P, "L": L()}
    return tuple(plain[part] if part in plain else _split_of(part) for part in parts)


_WITHOUT_SHARES = r"S\([0-9]+/[1-9][0-9]*\)|[SLE]\([0-9]+\)|B\*|B|P|L"


def _split_of(text: str) -> Placement:
    numbers, _, sections = text[2:-1].partition("|")
    numbers, _, shares = numbers.partition(":")
    sizes = [parse_shares(each) if each else () for each in (shares, sections)]
    dim, _, unit = numbers.partition("/")
    return Placement(text[0], int(dim), int(unit or 1), *sizes)


def num_parts(layout: Layout, mesh_shape: tuple[int, ...], dim: int) -> int:
    """The number of parts into which `layout` splits tensor dim `dim`."""
    parts = 1
    for placement, size in zip(layout, mesh_shape):
        if placement.dim == dim:
            parts *= size
    return parts


def is_even(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> bool:
    """Whether every split dim exists and its size, or that of each of its sections, is a multiple of its number of
    parts, in units, and none is in shares.
    """
    if any(placement.shares for placement in layout):
        return False
    units = {placement.dim: sum(placement.sections) or placement.unit for placement in layout if placement.is_split}
    if any(placement.sections for placement in layout) and _mixes_sections(layout):
        return False
    return all(
        dim < len(shape) and shape[dim] % (num_parts(layout, mesh_shape, dim) * unit) == 0 and shape[dim] > 0
        for dim, unit in units.items()
    )


def _mixes_sections(layout: Layout) -> bool:
    """Whether two axes split one dim in other sections: what one axis leaves has none of the other's."""
    split = {(placement.dim, placement.sections) for placement in layout if placement.is_split}
    return len(split) > len({dim for dim, _ in split})


def can_split(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> bool:
    """Whether every split dim exists and has whole units; once its parts differ, all further axes split the same units.

    Parts need not be equal, and ranks behind the last have none. What is in shares is whole before, sections are equal.
    """
    if any(placement.sections for placement in layout):
        in_sections = tuple(placement if placement.sections else I for placement in layout)
        if _mixes_sections(layout) or not is_even(shape, in_sections, mesh_shape):
            return False
    split = set[int]()
    local, unit_of = list(shape), dict[int, int]()  # of dims whose parts differ
    for placement, size in zip(layout, mesh_shape):
        if placement.is_split:
            dim, unit = placement.dim, placement.unit
            if dim >= len(shape) or not shape[dim] or local[dim] % unit or unit_of.get(dim, unit) != unit:
                return False
            if placement.shares and (dim in split or local[dim] < size * unit or len(placement.shares) != size):
                return False
            if placement.shares or local[dim] % (size * unit):
                unit_of[dim] = unit
            split.add(dim)
            local[dim] = _largest_part(local[dim], placement, size)
    return True


def can_be_stored(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> bool:
    """Whether a tensor can lie in `layout` as a DTensor, whose parts have no units and no sections (a checkpoint of
    torch has one run of indices of each rank, and so none of a `_StridedShard` alone), with a placement for each axis
    and no axis larger than what it splits.
    """
    if len(layout) != len(mesh_shape):
        return False
    is_plain = all(
        placed.kind in "SI" and placed.unit == 1 and not placed.shares and not placed.sections for placed in layout
    )
    if not is_plain or not can_split(shape, layout, mesh_shape):
        return False
    return all(shape[placed.dim] >= num_parts(layout, mesh_shape, placed.dim) for placed in layout if placed.is_split)


def local_shape(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The largest shape of a rank's part of a tensor of global `shape`: the first rank's, but for shares, of which it
    is the largest, or that of the rank that sees them (`SeenShares`).
    """
    local = list(shape)
    for placement, size in zip(layout, mesh_shape):
        if placement.is_split:
            local[placement.dim] = _seen_part(local[placement.dim], placement, size)
    return tuple(local)


def _seen_part(extent: int, placement: Placement, size: int) -> int:
    if size > 1 and isinstance(placement.shares, SeenShares):
        return shared_sizes(extent, placement.shares, placement.unit)[placement.shares.seen]
    return _largest_part(extent, placement, size)


def _largest_part(extent: int, placement: Placement, size: int) -> int:
    unit = placement.unit
    if placement.shares and size > 1:
        return max(shared_sizes(extent, placement.shares, unit))
    return -(-extent // (size * unit)) * unit


@lru_cache(maxsize=2**10)
def shared_sizes(extent: int, shares: tuple[int, ...], unit: int = 1) -> tuple[int, ...]:
    """The sizes of all parts of a dim of size `extent` in `shares` of its units.

    If they are as many as the shares together, these; otherwise in proportion, rounded so that each rank has one at
    least, as `can_split` demands, the largest remainders up.

    >>> shared_sizes(32, (24, 8)), shared_sizes(20, (3, 1, 1), 4), shared_sizes(7, (24, 8)), shared_sizes(3, (30, 1, 1))
    ((24, 8), (12, 4, 4), (5, 2), (1, 1, 1))
    """
    units = extent // unit
    if units == sum(shares):
        return tuple(size * unit for size in shares)
    spare, total = max(0, units - len(shares)), sum(shares)
    exact = [max(0.0, units * share / total - 1) for share in shares]
    scale = spare / sum(exact) if sum(exact) else 0.0
    sizes = [int(one * scale) for one in exact]
    largest_first = sorted(range(len(shares)), key=lambda index: (sizes[index] - exact[index] * scale, index))
    for index in largest_first[: spare - sum(sizes)]:
        sizes[index] += 1
    return tuple((size + 1) * unit for size in sizes)
