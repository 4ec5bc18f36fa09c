"""Meshes of a number of devices."""

import itertools
import math

import pytest

from autopar.costmodel.cluster.presets import PRESETS
from autopar.errors import MeshError
from autopar.mesh import Devices
from autopar.planner.layouts.mesh_shapes import as_used, factorise

H100, P100 = PRESETS["h100"], PRESETS["p100"]


@pytest.mark.parametrize("num_devices", [1, 2, 6, 8, 12, 16, 24, 64, 96, 1024])
@pytest.mark.parametrize("max_axes", [1, 2, 3, 4])
def test_all_meshes_within_link_levels(num_devices, max_axes):
    inner = math.gcd(num_devices, 8)
    outer = num_devices // inner
    levels = [size for size in (outer, inner) if size > 1] or [1]
    shapes = (
        shape
        for num_axes in range(1, max(max_axes, len(levels)) + 1)
        for shape in itertools.product(range(2, min(num_devices, 24) + 1), repeat=num_axes)
    )
    expected = {shape for shape in shapes if math.prod(shape) == num_devices and _is_within_levels(shape, levels)} or {
        (1,)
    }
    found = [mesh.shape for mesh in factorise(num_devices, H100, max_axes=max_axes)]
    assert len(found) == len(set(found)) and all(math.prod(shape) == num_devices for shape in found)
    assert [len(shape) for shape in found] == sorted(len(shape) for shape in found) and found[0] == tuple(levels)
    if num_devices <= 24:
        assert set(found) == expected


def _is_within_levels(shape: tuple[int, ...], levels: list[int]) -> bool:
    """Whether the axes are factors of the levels, one after the other, in descending order within each."""
    rest = list(shape)
    for level in levels:
        factors = []
        while rest and math.prod(factors) < level:
            factors.append(rest.pop(0))
        if math.prod(factors) != level or factors != sorted(factors, reverse=True):
            return False
    return not rest


def test_a_flat_network_is_one_level():
    assert [mesh.shape for mesh in factorise(16, P100)] == [(16,), (8, 2), (4, 4), (4, 2, 2)]


def test_nodes_may_be_used_in_part():
    used = as_used(Devices(16, per_node=4), H100)
    assert used.levels[0].size == 4 and used.levels[1:] == H100.levels[1:]
    assert factorise(16, used)[0].shape == (4, 4)
    with pytest.raises(MeshError, match="8 devices, 16 were asked for"):
        as_used(Devices(32, per_node=16), H100)
