"""Formulas by hand on round numbers, and properties that any machine obeys."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel, check_mesh
from autopar.costmodel.cluster.measured_terms import GroupRate
from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.collective_time import algorithms, collective_time, collective_times, spans
from autopar.costmodel.stage_transfer import RankLink, transfer
from autopar.errors import MeshError
from autopar.mesh import parse_mesh
from autopar.sbp.redistribute import Collective

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
NODE, NETWORK = LinkLevel(8, 1e-6, 100e9), LinkLevel(0, 1e-5, 1e9)


def cluster_of(*levels: LinkLevel, kind_factors: dict | None = None) -> Cluster:
    return Cluster("test", levels, {"float32": 1e12}, 1e11, 2**30, "made up", kind_factors or {})


def time_of(cluster: Cluster, mesh: str, kind: str, num_bytes: float, axes: tuple[int, ...] = (0,)) -> float:
    return collective_time(cluster, parse_mesh(mesh), Collective(kind, axes, int(num_bytes), "forward"))


def test_one_level_by_hand():
    flat = cluster_of(LinkLevel(0, 1e-6, 1e9))
    assert time_of(flat, "4", "all_reduce", 4e9) == pytest.approx(6.0 + 6e-6)
    assert time_of(flat, "4", "all_gather", 4e9) == pytest.approx(3.0 + 3e-6)
    assert time_of(flat, "4", "reduce_scatter", 4e9) == pytest.approx(3.0 + 3e-6)
    assert time_of(flat, "4", "all_to_all", 4e9) == pytest.approx(3.0 + 3e-6)


def test_small_all_reduce_takes_the_tree():
    assert time_of(cluster_of(LinkLevel(0, 1e-6, 1e9)), "64", "all_reduce", 0) == pytest.approx(2 * 6 * 1e-6)


def test_an_axis_is_priced_at_the_level_it_spans():
    cluster = cluster_of(NODE, NETWORK)
    inner, outer = (
        time_of(cluster, "4x8", "all_gather", 8e9, axes=(1,)),
        time_of(cluster, "4x8", "all_gather", 8e9, axes=(0,)),
    )
    assert inner == pytest.approx(7 / 8 * 8e9 / 100e9, rel=1e-3)
    assert outer == pytest.approx(3 / 4 * 8e9 / 1e9, rel=1e-3)


def test_hierarchical_all_reduce_by_hand():
    hierarchical = algorithms((NODE, NETWORK), (32,), (0,), "all_reduce")[0][1]
    inside, across = 2 * 7 / 8 / 100e9, 2 * 3 / 4 / 8 / 1e9
    assert hierarchical.beta_s_per_byte == pytest.approx(inside + across)
    assert hierarchical.alpha_s == pytest.approx(2 * (7 * 1e-6 + 3 * 1e-5))


def test_a_ring_through_a_node_uses_the_shares_of_all_its_devices():
    ring = algorithms((NODE, NETWORK), (32,), (0,), "all_gather")[0][0]
    assert ring.beta_s_per_byte == pytest.approx(31 / 32 / 8e9)
    assert ring.alpha_s == pytest.approx(31 * 1e-5)


def test_an_axis_over_parts_of_two_levels():
    (found,) = spans((NODE, NETWORK), (4, 4, 2), (1,))  # stride 2, size 4: half of it is still inside a node of 8
    assert [(span.num_children, span.latency_s) for span in found] == [(4, 1e-6)]
    (found,) = spans((NODE, NETWORK), (2, 8, 2), (1,))
    assert [(span.num_children, span.num_inside) for span in found] == [(4, 1), (2, 4)]


def price_of_group(levels: tuple[LinkLevel, ...], members: list[int], kind: str, num_bytes: float) -> float:
    """Seconds of one group, from the sets of ranks alone: flat, and level by level, with the emptiest part's links."""
    size, doubled = len(members), 2 if kind == "all_reduce" else 1
    nested_a = nested_b = exchange_a = exchange_b = 0.0
    flat, slowest_hop, tree_a, parts, capacity = math.inf, 0.0, 0.0, [{rank} for rank in members], 1
    for level in levels:
        capacity = capacity * level.size if level.size else math.inf
        blocks: dict[int, list[set[int]]] = {}
        for part in parts:
            blocks.setdefault(0 if capacity == math.inf else min(part) // capacity, []).append(part)
        joined = [several for several in blocks.values() if len(several) > 1]
        if joined:
            number, inside = max(map(len, joined)), min(len(part) for several in joined for part in several)
            flat, slowest_hop = (min(flat, inside * level.bandwidth_bytes_per_s), max(slowest_hop, level.latency_s))
            nested_a += (number - 1) * level.latency_s
            nested_b += (1 - 1 / number) / inside / level.bandwidth_bytes_per_s
            tree_a += 2 * math.ceil(math.log2(number)) * level.latency_s
            outside = max(sum(map(len, several)) for several in blocks.values()) - inside
            exchange_a += outside * level.latency_s
            exchange_b += outside / size / level.bandwidth_bytes_per_s
        parts = [set().union(*several) for several in blocks.values()]
    ring = (size - 1) * slowest_hop + num_bytes * (size - 1) / size / flat
    ways = [doubled * ring, doubled * (nested_a + num_bytes * nested_b)]
    if kind == "all_to_all":
        return exchange_a + num_bytes * exchange_b
    return min(ways + [tree_a + 2 * num_bytes / flat] * (kind == "all_reduce"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("node", [2, 3, 6, 8])
@pytest.mark.parametrize("mesh", ["4x4", "3x5", "4x6", "2x3x4", "5x2x3", "7x2", "6x8"])
def test_the_slowest_of_all_groups_is_priced(kind, node, mesh):
    levels = LinkLevel(node, 1e-6, 100e9), LinkLevel(2, 5e-6, 10e9), LinkLevel(0, 1e-5, 1e9)
    shape = parse_mesh(mesh).shape
    ranks = np.arange(math.prod(shape)).reshape(shape)
    for axes in sets_of_axes(shape):
        others = [axis for axis in range(len(shape)) if axis not in axes]
        size = math.prod(shape[axis] for axis in axes)
        groups = ranks.transpose(*others, *axes).reshape(-1, size).tolist()
        for num_bytes in (0, 10**5, 10**9):
            expected = max(price_of_group(levels, group, kind, num_bytes) for group in groups)
            assert time_of(cluster_of(*levels), mesh, kind, num_bytes, axes) == pytest.approx(expected), axes


def test_groups_that_straddle_two_nodes_cost_the_network():
    cluster = cluster_of(replace(NODE, size=6), NETWORK)  # of ranks 4 to 7, two are on either node
    assert time_of(cluster, "3x4", "all_gather", 1e9, (1,)) > 30 * time_of(cluster, "1x4", "all_gather", 1e9, (1,))


def test_a_backend_without_nested_collectives_is_priced_flat():
    flat = replace(cluster_of(NODE, NETWORK), algorithms=("ring",))
    assert time_of(flat, "32", "all_reduce", 8e9) == pytest.approx(2 * 31 * 1e-5 + 2 * 31 / 32 * 8e9 / 8e9)
    assert time_of(flat, "32", "all_gather", 8e9) > time_of(cluster_of(NODE, NETWORK), "32", "all_gather", 8e9)


def test_measured_factors_scale_their_kind_only():
    plain, scaled = cluster_of(NETWORK), cluster_of(NETWORK, kind_factors={"all_gather": 1.5})
    assert time_of(scaled, "4", "all_gather", 1e6) == pytest.approx(1.5 * time_of(plain, "4", "all_gather", 1e6))
    assert time_of(scaled, "4", "all_reduce", 1e6) == time_of(plain, "4", "all_reduce", 1e6)


def test_groups_of_a_size_have_a_bandwidth_and_a_base_latency_of_their_own():
    rates = (GroupRate(2, 0.25, 1e-5), GroupRate(8, 1.0, 4e-5), GroupRate(2, 0.5, kind="all_to_all"))
    pairs = cluster_of(replace(NODE, group_rates=rates), NETWORK)
    assert time_of(pairs, "4x2", "all_gather", 1e9, (1,)) == pytest.approx(1e-5 + 1e-6 + 0.5e9 / 25e9)
    assert time_of(pairs, "8", "all_gather", 1e9) == pytest.approx(4e-5 + 7e-6 + 7 / 8 * 1e9 / 100e9)
    assert time_of(pairs, "4x2", "all_to_all", 1e9, (1,)) == pytest.approx(1e-6 + 0.5e9 / 50e9)
    assert time_of(pairs, "2x4", "all_gather", 0, (1,)) == pytest.approx(2.5e-5 + 3e-6)  # half way in log2(size)
    assert transfer(pairs, 2, 1) == RankLink(1e-6 + 1e-5, 25e9)
    assert transfer(pairs, 2, 8) == RankLink(NETWORK.latency_s, NETWORK.bandwidth_bytes_per_s)


def test_a_collective_takes_the_least_time_of_its_groups_or_that_of_its_bytes():
    floored = cluster_of(replace(NODE, group_rates=(GroupRate(8, least_s=1e-3, kind="all_gather"),)), NETWORK)
    assert time_of(floored, "8", "all_gather", 1e6) == 1e-3
    assert time_of(floored, "8", "all_gather", 1e9) == time_of(cluster_of(NODE, NETWORK), "8", "all_gather", 1e9)
    assert time_of(floored, "8", "all_reduce", 1e6) == time_of(cluster_of(NODE, NETWORK), "8", "all_reduce", 1e6)
    shared = collective_times(floored, (8,), (0,), "all_gather", np.array([1e6]), latency_share=0.25)
    assert shared.tolist() == [0.25e-3]


def test_a_nested_all_reduce_pays_the_base_latency_of_its_three_collectives():
    levels = (
        replace(NODE, group_rates=(GroupRate(8, 1.0, 3e-6),)),
        replace(NETWORK, group_rates=(GroupRate(2, 1, 5e-6),)),
    )
    bases = [
        with_base.alpha_s - bare.alpha_s
        for with_base, bare in zip(
            *(algorithms(given, (16,), (0,), "all_reduce")[0] for given in (levels, (NODE, NETWORK)))
        )
    ]
    assert bases == pytest.approx([5e-6, 2 * 3e-6 + 5e-6, 5e-6])


def sets_of_axes(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [
        axes for size in range(1, len(mesh_shape) + 1) for axes in itertools.combinations(range(len(mesh_shape)), size)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", ["8x8", "4x16", "16x4", "2x4x8", "64x1"])
def test_all_axes_together_are_as_one_flat_axis(kind, mesh):
    for cluster in (cluster_of(NODE, NETWORK), PRESETS["h100"], PRESETS["v100-25g"]):
        for num_bytes in (0, 1000, 10**8):
            together = time_of(cluster, mesh, kind, num_bytes, tuple(range(parse_mesh(mesh).ndim)))
            assert together == time_of(cluster, "64", kind, num_bytes)


def test_outer_and_innermost_axis_together_span_half_of_each_node():
    (found,) = spans((NODE, NETWORK), (4, 2, 4), (0, 2))
    assert [(span.num_children, span.num_inside, span.latency_s) for span in found] == [(4, 1, 1e-6), (4, 4, 1e-5)]


meshes = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3).map(tuple)


@given(meshes, st.sampled_from(KINDS), st.integers(0, 2**34), st.integers(0, 2**34), st.sampled_from(sorted(PRESETS)))
def test_more_bytes_never_take_less_time(mesh_shape, kind, few, many, preset):
    few, many = sorted((few, many))
    for axes in sets_of_axes(mesh_shape):
        times = collective_times(PRESETS[preset], mesh_shape, axes, kind, np.array([few, many]))
        assert 0 <= times[0] <= times[1]


@given(meshes, st.sampled_from(KINDS), st.integers(1, 2**34))
def test_faster_links_never_take_more_time(mesh_shape, kind, num_bytes):
    slow, fast = cluster_of(NODE, NETWORK), cluster_of(NODE, LinkLevel(0, 5e-6, 4e9))
    for axes in sets_of_axes(mesh_shape):
        times = [float(collective_times(c, mesh_shape, axes, kind, np.float64(num_bytes))) for c in (slow, fast)]
        assert times[1] <= times[0]


@given(meshes, st.integers(2**26, 2**34))
def test_large_gathers_cost_less_than_the_all_reduce_they_are_half_of(mesh_shape, num_bytes):
    for axes in sets_of_axes(mesh_shape):
        half, whole = (
            float(collective_times(cluster_of(NODE, NETWORK), mesh_shape, axes, k, np.float64(num_bytes)))
            for k in KINDS[1::-1]
        )
        assert half <= whole


@given(meshes, st.sampled_from(KINDS), st.integers(0, 2**34))
def test_free_links_are_free(mesh_shape, kind, num_bytes):
    for axes in sets_of_axes(mesh_shape):
        assert collective_times(PRESETS["free-links"], mesh_shape, axes, kind, np.float64(num_bytes)) == 0


def test_a_mesh_must_fit_the_cluster():
    check_mesh(cluster_of(NODE), 8)
    with pytest.raises(MeshError, match=r"16 devices.*has 8"):
        check_mesh(cluster_of(NODE), 16)
