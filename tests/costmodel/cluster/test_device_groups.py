"""Clusters of groups of devices that differ: text, JSON, links, and what is refused."""

import json
from dataclasses import replace

import pytest

from autopar.costmodel.cluster.device_groups import joined, orders, ranks_of, seen_by
from autopar.costmodel.cluster.hardware import check_mesh
from autopar.costmodel.cluster.load_cluster import LinkLevel, cluster_from_json, load_cluster
from autopar.costmodel.collective_time import collective_times
from autopar.errors import MeshError

TEXT = "8 v100-25g + 4 p100"


def test_groups_are_read_from_text_and_survive_json(tmp_path):
    cluster = load_cluster(TEXT)
    assert cluster.num_devices == 12 and cluster.name == TEXT
    (tmp_path / "two.json").write_text(cluster.to_json())
    assert load_cluster(tmp_path / "two.json") == cluster == cluster_from_json(seen_by(cluster, 1).to_json())
    short = {"groups": [{"num_devices": 8, "cluster": "v100-25g"}, {"num_devices": 4, "cluster": "p100"}]}
    assert cluster_from_json(json.dumps(short)) == cluster
    hosts = {
        "groups": [{"num_devices": 1, "cluster": json.loads(load_cluster(one).to_json())} for one in ("a100", "v100")]
    }
    linked = json.dumps(hosts | {"name": "two hosts", "link": {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}})
    assert cluster_from_json(linked).groups.link == LinkLevel(0, 1e-5, 1e9)


def test_all_orders_of_a_few_groups_are_told_apart_and_survive_json():
    cluster = load_cluster("2 v100 + 2 p100 + 4 a100 over 2GB/s")
    each = orders(cluster)
    assert len({one.name for one in each}) == 6 and each[0] == cluster and not cluster.groups.reordered_from
    for one in each[1:]:
        assert one.groups.reordered_from == cluster.name and one.groups.link == cluster.groups.link
        assert one.name.endswith(" over 2GB/s") and load_cluster(one.name).groups.members == one.groups.members
        assert cluster_from_json(one.to_json()) == one and orders(one) == (one,)
    named = replace(cluster, name="ours")
    assert orders(named)[1].name == "ours: 2 v100 + 4 a100 + 2 p100"
    assert len(orders(load_cluster("2 v100 + 4 p100 + 2 v100"))) == 3
    assert len(orders(load_cluster("1 v100 + 1 p100 + 1 a100 + 1 h100"))) == 1
    assert orders(load_cluster("v100")) == (load_cluster("v100"),)


def test_the_files_of_two_calibrated_hosts_are_groups(tmp_path):
    for name, one in (("fast", "v100-25g"), ("slow-1", "p100")):
        (tmp_path / f"{name}.json").write_text(load_cluster(one).to_json())
    cluster = load_cluster(f"8 {tmp_path}/fast.json + 4 {tmp_path}/slow-1.json over 3.5GB/s")
    assert cluster.groups.members == load_cluster(TEXT).groups.members
    assert cluster.groups.link.bandwidth_bytes_per_s == 3.5e9


def test_the_link_between_groups_is_the_slowest_unless_it_is_given():
    v100, p100 = load_cluster("v100-25g"), load_cluster("p100")
    slowest = min(v100.levels[-1].bandwidth_bytes_per_s, p100.levels[-1].bandwidth_bytes_per_s)
    assert load_cluster(TEXT).groups.link.bandwidth_bytes_per_s == slowest
    assert load_cluster(f"{TEXT} over 3.5GB/s").groups.link.bandwidth_bytes_per_s == 3.5e9
    assert load_cluster(f"{TEXT} over 100Gbit/s").groups.link.bandwidth_bytes_per_s == 12.5e9


def test_each_group_has_its_own_links_and_all_wait_for_the_slowest_across():
    cluster = load_cluster("8 v100 + 8 p100")
    fast, slow = (seen_by(cluster, group) for group in (0, 1))
    inner = [float(collective_times(one, (8, 2), (1,), "all_reduce", 1e6)) for one in (fast, slow)]
    alone = [float(collective_times(load_cluster(one), (4, 2), (1,), "all_reduce", 1e6)) for one in ("v100", "p100")]
    assert inner == pytest.approx(alone) and inner[0] < inner[1]
    across = [float(collective_times(one, (16,), (0,), "all_reduce", 1e8)) for one in (fast, slow)]
    assert across[0] == across[1]
    assert across[0] > max(float(collective_times(load_cluster("p100"), (8,), (0,), "all_reduce", 1e8)), *inner)
    quick = load_cluster("8 v100 + 8 p100 over 300GB/s")
    assert float(collective_times(seen_by(quick, 0), (16,), (0,), "all_reduce", 1e8)) < across[0]


def test_ranks_of_the_first_axis_are_those_of_the_groups():
    cluster = load_cluster(TEXT)
    assert ranks_of(cluster, 12) == (range(8), range(8, 12)) and ranks_of(cluster, 3) == (range(2), range(2, 3))
    with pytest.raises(ValueError, match=r"no whole number of ranks.*take an axis of 3 or 6 or 12 ranks"):
        ranks_of(cluster, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8 v100 + 8 p101", "no cluster 'p101'"),
        ("8 v100 + ", "not a cluster of groups"),
        ("8 v100 + 0 p100", "not a cluster of groups"),
        ("8 v100 + 8 p100 over fast", "not a cluster of groups"),
        ("8 v100 + 8 p100 over 0GB/s", "not a cluster of groups"),
        ("8 v100 + 8 cpu", "one type of device"),
    ],
)
def test_malformed_groups_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        load_cluster(text)


def test_a_group_without_links_is_refused():
    v100 = load_cluster("v100")
    island = replace(v100, name="island", levels=(replace(v100.levels[0], size=8),))
    with pytest.raises(ValueError, match=r"'island', has no links to other groups.*over 3.1GB/s"):
        joined([(8, island), (8, load_cluster("p100"))])
    assert joined([(8, island), (8, load_cluster("p100"))], LinkLevel(0, 1e-5, 1e9)).num_devices == 16
    with pytest.raises(ValueError, match="expected a number of devices from 1 to 8, found 9"):
        joined([(9, island), (8, load_cluster("p100"))], LinkLevel(0, 1e-5, 1e9))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"groups": [{"num_devices": 8, "cluster": "v100"}]}, "two of them or more"),
        ({"groups": [{"num_devices": 8, "cluster": "v100"}] * 2, "levels": []}, "found 'levels'"),
        ({"groups": [{"num_devices": 8}] * 2}, "groups are objects"),
        ({"groups": [{"num_devices": 8, "cluster": "x100"}] * 2}, "one of a100"),
        ({"groups": [{"num_devices": 8, "cluster": "v100"}] * 2, "link": {"latency_s": 0}}, "the link one with"),
        (
            {
                "groups": [{"num_devices": 8, "cluster": "v100"}] * 2,
                "link": {"latency_s": 0, "bandwidth_bytes_per_s": -1},
            },
            "expected a number",
        ),
        ({"groups": [{"num_devices": 8, "cluster": "v100"}] * 2, "version": 9}, "another version"),
    ],
)
def test_damaged_groups_are_refused(content, message):
    with pytest.raises(ValueError, match=message):
        cluster_from_json(json.dumps(content))


def test_nothing_is_priced_on_groups_that_no_one_sees():
    with pytest.raises(MeshError, match="12 devices together; found a mesh of 12"):
        check_mesh(load_cluster(TEXT), 12)
    with pytest.raises(MeshError, match="found a mesh of 4"):
        check_mesh(seen_by(load_cluster(TEXT), 0), 4)
