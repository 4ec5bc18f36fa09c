"""Pins: the layouts that the user fixes for parameters and buffers."""

import difflib
from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import PinError
from autopar.ir.folding.fold import Folded
from autopar.ir.graph import Graph, Input
from autopar.mesh import Mesh
from autopar.sbp.placement import I, Layout, format_layout, is_even, parse_layout
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


def _members(name: str, folded: Folded | None) -> list[str]:
    if folded is None:
        return [name]
    first = folded.representative[name]
    return [member for member, representative in folded.representative.items() if representative == first]


def _close(name: str, known: Mapping[str, Input]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=3)
    return (
        f"; close to it: {', '.join(matches)}" if matches else f"; it has e.g. {', '.join(list(known)[:3]) or 'none'}"
    )


def _checked(fqn: str, text: str, item: Input, mesh: Mesh) -> Layout:
    layout, shape = _read(fqn, text, mesh), item.value.shape
    if any(placement.kind not in "SI" for placement in layout):
        raise PinError(
            f"pin {fqn}={text!r}: a tensor is stored split (S(dim)) or whole (B), found {format_layout(layout)}"
        )
    if not is_even(shape, layout, mesh.shape):
        raise PinError(
            f"pin {fqn}={text!r}: shape {list(shape)} does not divide evenly over mesh {mesh}; split another dim or"
            " fewer axes"
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
