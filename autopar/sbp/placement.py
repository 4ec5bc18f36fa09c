"""Placements and layouts: how one tensor lies on the mesh; docs/architecture.md, "SBP", has the algebra."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """The way a tensor lies on one mesh axis: S(dim) split, P pending sum, I whole, R whole with a pending gradient.

    L: each rank has what it computed of its own tokens alone, which is no part of the global value: L(dim) has a part
    of the global size, in the rank's own order, L() the global size. E(dim): each rank has the rows of its own experts,
    sorted by expert, as many as there are, on average a part of the global size. There is no conversion from or to L
    and E: only ops turn one into the other.

    `unit`: of a split whose parts are multiples of so many elements, S(dim/unit), as heads are; see `parts.part_sizes`.
    """

    kind: str
    dim: int = -1
    unit: int = 1

    def __str__(self) -> str:
        name = {"I": "B", "R": "B*"}.get(self.kind, self.kind)
        if not self.is_split:
            return name
        return f"{name}({self.dim})" if self.unit == 1 else f"{name}({self.dim}/{self.unit})"

    __repr__ = __str__

    @property
    def is_split(self) -> bool:
        """Whether a rank has a part of the global size."""
        return self.dim >= 0

    @property
    def is_own(self) -> bool:
        """Whether a rank has what is no part of the global value, in an order of its own (L, E)."""
        return self.kind in "LE"


P, I, R = Placement("P"), Placement("I"), Placement("R")  # noqa: E741 - I is the field's letter

Layout = tuple[Placement, ...]  # one placement per mesh axis, outermost axis first


def S(dim: int, unit: int = 1) -> Placement:
    """The placement split along `dim`, which is not negative, in multiples of `unit`."""
    assert dim >= 0, f"S needs a non-negative dim, found {dim}"
    return Placement("S", dim, unit)


def L(dim: int = -1) -> Placement:
    """The placement of what each rank computed of its own tokens: split along `dim`, or of the global size (-1)."""
    return Placement("L", dim)


def E(dim: int) -> Placement:
    """The placement of the rows of each rank's own experts along `dim`."""
    return Placement("E", dim)


# A layout as numbers, which compare fast: for each axis the dim of a split (of L and E: more than any dim; in units: so
# many times UNIT more), or a negative number for another kind.
Codes = tuple[int, ...]
PENDING, WHOLE, USED, OWN = -1, -2, -3, -4
OWN_DIM = 64  # the code of L(0), and half that of E(0); torch's tensors have at most as many dims
UNIT = 256
_OF_KIND = {"P": PENDING, "I": WHOLE, "R": USED, "L": OWN}
_OF_CODE = {PENDING: P, WHOLE: I, USED: R, OWN: L()}


def codes_of(layout: Layout) -> Codes:
    """The codes of a layout: for each axis the dim of a split, else a negative number for the kind.

    >>> codes_of((S(1), P, I, R))
    (1, -1, -2, -3)
    """
    return tuple(
        [
            placement.dim if placement.kind == "S" and placement.unit == 1 else _other_code(placement)
            for placement in layout
        ]
    )


def _other_code(placement: Placement) -> int:
    if not placement.is_split:
        return _OF_KIND[placement.kind]
    if placement.kind == "S":
        return placement.dim + UNIT * placement.unit
    return placement.dim + (OWN_DIM if placement.kind == "L" else 2 * OWN_DIM)


def kind_of(code: int) -> str:
    """The kind of the placement whose code is `code`."""
    return placement_of(code).kind


def placement_of(code: int) -> Placement:
    """The placement whose code is `code`."""
    if code < 0:
        return _OF_CODE[code]
    unit, code = divmod(code, UNIT)
    return Placement("SLE"[code // OWN_DIM], code % OWN_DIM, unit or 1)


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
    parts = re.findall(r"S\([0-9]+/[1-9][0-9]*\)|[SLE]\([0-9]+\)|B\*|B|P|L", text)
    if "".join(parts) != text:
        raise ValueError(f"not a layout: {text!r}; write one of S(dim), B, B*, P per mesh axis, e.g. 'S(0)B'")
    plain = {"B": I, "B*": R, "P": P, "L": L()}
    return tuple(plain[part] if part in plain else Placement(part[0], *_numbers(part[2:-1])) for part in parts)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split("/")]


def num_parts(layout: Layout, mesh_shape: tuple[int, ...], dim: int) -> int:
    """The number of parts into which `layout` splits tensor dim `dim`."""
    parts = 1
    for placement, size in zip(layout, mesh_shape):
        if placement.dim == dim:
            parts *= size
    return parts


def is_even(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> bool:
    """Whether every split dim exists and its size is a multiple of its number of parts, in units."""
    units = {placement.dim: placement.unit for placement in layout if placement.is_split}
    return all(
        dim < len(shape) and shape[dim] % (num_parts(layout, mesh_shape, dim) * unit) == 0 and shape[dim] > 0
        for dim, unit in units.items()
    )


def can_split(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> bool:
    """Whether every split dim exists and has whole units; once its parts differ, all further axes split the same units.

    Parts need not be equal, and ranks behind the last have none.
    """
    local, unit_of = list(shape), dict[int, int]()  # of dims whose parts differ
    for placement, size in zip(layout, mesh_shape):
        if placement.is_split:
            dim, unit = placement.dim, placement.unit
            if dim >= len(shape) or not shape[dim] or local[dim] % unit or unit_of.get(dim, unit) != unit:
                return False
            if local[dim] % (size * unit):
                unit_of[dim] = unit
            local[dim] = -(-local[dim] // (size * unit)) * unit
    return True


def can_be_stored(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> bool:
    """Whether a tensor can lie in `layout` as a DTensor, whose parts have no units, with no axis larger than what it
    splits.
    """
    is_plain = all(placement.kind in "SI" and placement.unit == 1 for placement in layout)
    if not is_plain or not can_split(shape, layout, mesh_shape):
        return False
    return all(shape[placed.dim] >= num_parts(layout, mesh_shape, placed.dim) for placed in layout if placed.is_split)


def local_shape(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the first rank's part of a tensor of global `shape`; no rank has a larger one."""
    local = list(shape)
    for placement, size in zip(layout, mesh_shape):
        if placement.is_split:
            unit = placement.unit
            local[placement.dim] = -(-local[placement.dim] // (size * unit)) * unit
    return tuple(local)
