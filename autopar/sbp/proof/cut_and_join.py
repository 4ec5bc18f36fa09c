"""A mesh of ranks inside one process: cut a tensor into parts by a layout, run a function per rank, join the parts."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.sbp.placement import Layout, Placement, shared_sizes

Coordinate = tuple[int, ...]
Parts = Mapping[Coordinate, torch.Tensor]


def cut(x: torch.Tensor, layout: Layout, mesh_shape: tuple[int, ...]) -> dict[Coordinate, torch.Tensor]:
    """Each rank's part of `x`; pending sums are random terms, the same on all ranks of an
    axis on which `x` is whole.
    """
    if not layout:
        return {(): x}
    if layout[0].kind in "IR":
        inner = [cut(x, layout[1:], mesh_shape[1:])] * mesh_shape[0]
    else:
        inner = [cut(piece, layout[1:], mesh_shape[1:]) for piece in _cut_once(x, layout[0], mesh_shape[0])]
    return {(index, *at): part.clone() for index, parts in enumerate(inner) for at, part in parts.items()}


def _cut_once(x: torch.Tensor, placement: Placement, size: int) -> list[torch.Tensor]:
    if placement.kind == "S":
        if placement.sections:
            unit = x.shape[placement.dim] // sum(placement.sections)
            sections = x.split([unit * section for section in placement.sections], placement.dim)
            shares = zip(*(section.chunk(size, placement.dim) for section in sections), strict=True)
            return [torch.cat(share, placement.dim) for share in shares]
        if placement.shares:
            return list(x.split(shared_sizes(x.shape[placement.dim], placement.shares, placement.unit), placement.dim))
        units, unit = x.shape[placement.dim] // placement.unit, placement.unit
        assert units * unit == x.shape[placement.dim], f"{tuple(x.shape)} has no whole units of {placement}"
        starts = [min(units, -(-units // size) * index) * unit for index in range(size + 1)]
        return [x.narrow(placement.dim, a, b - a) for a, b in itertools.pairwise(starts)]
    noise = [
        torch.randn_like(x) if x.is_floating_point() or x.is_complex() else torch.randint_like(x, 5)
        for _ in range(size - 1)
    ]
    return [*noise, x - sum(noise)] if noise else [x]


def join(parts: Parts, layout: Layout) -> torch.Tensor:
    """Inverse of `cut`; what is whole must be equal on all ranks."""
    for axis in reversed(range(len(layout))):
        groups: dict[Coordinate, list[torch.Tensor]] = {}
        for at, part in sorted(parts.items()):
            groups.setdefault(at[:axis], []).append(part)
        parts = {at: _join_once(group, layout[axis]) for at, group in groups.items()}
    return parts[()]


def _join_once(group: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    if placement.kind == "S" and placement.sections:
        unit = group[0].shape[placement.dim] // sum(placement.sections)
        shares = (x.split([unit * section for section in placement.sections], placement.dim) for x in group)
        return torch.cat([share for section in zip(*shares, strict=True) for share in section], placement.dim)
    if placement.kind == "S":
        return torch.cat(group, placement.dim)
    if placement.kind == "P":
        return sum(group[1:], group[0])
    for other in group[1:]:
        assert_near(other, group[0], "whole on all ranks")
    return group[0]


def on_ranks(function: Callable[[Coordinate], Any], mesh_shape: tuple[int, ...]) -> dict[Coordinate, Any]:
    """`function(coordinate)` for every rank, one after the other."""
    return {at: function(at) for at in itertools.product(*map(range, mesh_shape))}


def assert_near(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """AssertionError unless both are equal but for the order of sums: to 1e-9, or the rounding of a coarser dtype, of
    each element and of the largest one; integers and truth values exactly.
    """
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda m: f"{what}: {m}")
        return
    is_coarse = expected.dtype.is_floating_point and expected.dtype.itemsize < 8
    rounding = 32 * torch.finfo(expected.dtype).eps if is_coarse else 1e-9
    finite = expected.detach()[expected.isfinite()].abs()
    atol = rounding * max(1.0, float(finite.max()) if finite.numel() else 0.0)
    torch.testing.assert_close(found, expected, rtol=rounding, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}")
