"""Pins: the layouts that the user fixes for parameters and buffers; and what a question rules out."""

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import PinError
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph, Input
from autopar.mesh import Mesh
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import I, Layout, can_be_stored, format_layout, parse_layout
from autopar.sbp.signature import Candidates


def restrict(
    candidates: Candidates, graph: Graph, pins: Mapping[str, str], mesh: Mesh, folded: Folded | None = None
) -> Candidates:
    """`candidates` in which each pinned parameter or buffer has its pinned layout only.

    `pins`: FQN (or alias) -> "S(0)B" with one placement for each mesh axis, or "tp:S(0),dp:B" by axis name, whole on
    all other axes. With `folded`, a pin holds for all copies of a repeat. PinError for a pin that is unknown,
    unreadable, uneven or contradicts another one.
    """
    inputs = {
        name: item
        for item in graph.inputs
        if item.kind in ("parameter", "buffer")
        for name in (item.fqn, *item.aliases)
    }
    layouts = dict(candidates.layouts)
    pinned_by: dict[str, tuple[Layout, str]] = {}
    for fqn, text in pins.items():
        if fqn not in inputs:
            raise PinError(f"pins name {fqn!r}, which is no parameter or buffer of the model{_close(fqn, inputs)}")
        layout = _checked(fqn, text, inputs[fqn], mesh)
        for name in _members(inputs[fqn].value.name, folded):
            first_layout, first_fqn = pinned_by.setdefault(name, (layout, fqn))
            if first_layout != layout:
                raise PinError(
                    f"pins differ for one tensor or its repeats: {first_fqn!r} and {fqn!r}; give them one layout"
                )
            layouts[name] = (layout,)
    return replace(candidates, layouts=layouts)


def without(candidates: Candidates, excluded: Mapping[str, Collection[str]], folded: Folded) -> Candidates:
    """`candidates` less those `excluded`.

    `excluded`: op -> texts of strategies, or input value -> texts of layouts; of names that are not among the
    candidates nothing is excluded. What holds for one op or value of a class of `folded` holds for the class. PinError
    if nothing is left.
    """
    by_class: dict[str, set[str]] = {}
    for name, texts in excluded.items():
        if name in folded.representative:
            by_class.setdefault(folded.representative[name], set()).update(texts)
    if not by_class:
        return candidates

    def kept(offered: Mapping[str, tuple], text: Callable[[Any], str]) -> dict[str, tuple]:
        allowed = dict(offered)
        for name in offered:
            if texts := by_class.get(folded.representative.get(name, name)):
                allowed[name] = tuple(each for each in offered[name] if text(each) not in texts)
                if not allowed[name]:
                    raise PinError(f"%{name} has no other layout than {' and '.join(sorted(texts))}")
        return allowed

    return replace(
        candidates, strategies=kept(candidates.strategies, str), layouts=kept(candidates.layouts, format_layout)
    )


def is_excluded(assignment: Assignment, excluded: Mapping[str, Collection[str]]) -> bool:
    """Whether the assignment has one of the strategies or layouts `excluded`, as `without` takes them."""
    strategies, layouts = assignment.strategies, assignment.layouts
    return any(
        (name in strategies and str(strategies[name]) in texts)
        or (name in layouts and format_layout(layouts[name]) in texts)
        for name, texts in excluded.items()
    )


def _members(name: str, folded: Folded | None) -> list[str]:
    if folded is None:
        return [name]
    first = folded.representative[name]
    return [member for member, representative in folded.representative.items() if representative == first]


def _close(name: str, known: Mapping[str, Input]) -> str:
    ends = {".".join(fqn.split(".")[-len(name.split(".")) :]): fqn for fqn in known}  # it may lack what is in front
    near = difflib.get_close_matches(name, list(dict.fromkeys([*known, *ends])), n=3)
    matches = dict.fromkeys(ends.get(one, one) for one in near)
    return (
        f"; close to it: {', '.join(matches)}" if matches else f"; it has e.g. {', '.join(list(known)[:3]) or 'none'}"
    )


def _checked(fqn: str, text: str, item: Input, mesh: Mesh) -> Layout:
    layout, shape = _read(fqn, text, mesh), item.value.shape
    if any(placement.kind not in "SI" for placement in layout):
        raise PinError(
            f"pin {fqn}={text!r}: a tensor is stored split (S(dim)) or whole (B), found {format_layout(layout)}"
        )
    if not can_be_stored(shape, layout, mesh.shape):
        raise PinError(
            f"pin {fqn}={text!r}: shape {list(shape)} cannot be stored so on mesh {mesh}; split a dim that it has, of"
            " at least one element a rank"
        )
    return layout


def _read(fqn: str, text: str, mesh: Mesh) -> Layout:
    try:
        layout = _by_axis(fqn, text, mesh) if ":" in text else parse_layout(text)
    except ValueError as error:
        raise PinError(f"pin {fqn}={text!r}: {error}") from error
    if len(layout) != mesh.ndim:
        raise PinError(f"pin {fqn}={text!r}: mesh {mesh} needs {mesh.ndim} placements, found {len(layout)}")
    return layout


def _by_axis(fqn: str, text: str, mesh: Mesh) -> Layout:
    layout = [I] * mesh.ndim
    for part in text.split(","):
        axis, _, placement = (piece.strip() for piece in part.partition(":"))
        if axis not in mesh.axis_names:
            raise PinError(f"pin {fqn}={text!r}: no mesh axis {axis!r}; the mesh has {', '.join(mesh.axis_names)}")
        parsed = parse_layout(placement)
        if len(parsed) != 1:
            raise PinError(f"pin {fqn}={text!r}: axis {axis!r} takes one placement, found {placement!r}")
        layout[mesh.axis_index(axis)] = parsed[0]
    return tuple(layout)
