"""Prices of many pairs of layouts at once against the list of steps of each pair."""

import itertools

import pytest
import torch

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.collective_time import collective_time
from autopar.costmodel.conversion_cost import conversion_times, copy_bytes, same_tensor
from autopar.ir.graph import Value
from autopar.mesh import Mesh
from autopar.sbp.placement import I, P, R, S, can_split
from autopar.sbp.redistribute import collectives_of, collectives_of_value, redistribute

CLUSTER = Cluster("test", (LinkLevel(2, 1e-6, 1e8), LinkLevel(0, 1e-5, 1e7)), {"float32": 1e9}, 1e8, 2**30, "made up")


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (3,)])
def test_all_pairs(shape, needs_grad):
    mesh, value = (
        Mesh(shape, tuple(f"a{i}" for i in range(len(shape)))),
        Value("x", (12, 24, 5, 36), torch.float32, needs_grad),
    )
    layouts = tuple(itertools.product((S(0), S(1), S(3), P, I, R), repeat=len(shape)))
    found = conversion_times(value, layouts, layouts, shape, CLUSTER)
    for (i, src), (j, dst) in itertools.product(enumerate(layouts), repeat=2):
        collectives = [
            c for step in redistribute(src, dst) for c in collectives_of(step, value.shape, 4, shape, needs_grad)
        ]
        assert found[i, j] == pytest.approx(sum(collective_time(CLUSTER, mesh, c) for c in collectives)), (src, dst)


def test_pairs_whose_units_the_axes_do_not_divide_although_they_divide_the_extent():
    mesh, value = Mesh((2, 8), ("a0", "a1")), Value("x", (64, 768), torch.float32, True)  # 12 heads of 64
    layouts = tuple(itertools.product((S(0), S(1), S(1, 64), P, R), (S(0), S(1), S(1, 64), P, R)))
    found = conversion_times(value, layouts, layouts, mesh.shape, CLUSTER)
    for (i, src), (j, dst) in itertools.product(enumerate(layouts), repeat=2):
        collectives = [c for step in redistribute(src, dst) for c in collectives_of_value(step, value, mesh.shape)]
        assert found[i, j] == pytest.approx(sum(collective_time(CLUSTER, mesh, c) for c in collectives)), (src, dst)


def test_pairs_of_parts_of_different_sizes():
    mesh, value = Mesh((4, 2, 3), ("a0", "a1", "a2")), Value("x", (25, 12, 50), torch.float32, True)
    offered = itertools.product((S(0), S(1), S(2), S(1, 3), S(2, 5), P, I, R), repeat=3)
    layouts = tuple(one for one in offered if can_split(value.shape, one, mesh.shape))[::17]
    found = conversion_times(value, layouts, layouts, mesh.shape, CLUSTER)
    for (i, src), (j, dst) in itertools.product(enumerate(layouts), repeat=2):
        collectives = [c for step in redistribute(src, dst) for c in collectives_of_value(step, value, mesh.shape)]
        assert found[i, j] == pytest.approx(sum(collective_time(CLUSTER, mesh, c) for c in collectives)), (src, dst)


def test_bytes_and_what_leaves_the_tensor_as_it_is():
    value, layouts = Value("x", (12, 24), torch.float32, True), ((S(0), I), (S(0), R), (P, S(1)))
    assert same_tensor(layouts, layouts).tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    copies, held = (copy_bytes(value, layouts, layouts, (2, 3), is_held=is_held).tolist() for is_held in (False, True))
    assert copies == [[576.0, 576.0, 384.0]] * 3
    assert held == [[0.0, 0.0, 384.0], [0.0, 0.0, 384.0], [576.0, 576.0, 0.0]]
