"""Clusters survive JSON, and what cannot be read says what would do."""

import json
from dataclasses import replace

import pytest
import torch

from autopar.costmodel.cluster.load_cluster import Cluster, LinkLevel, cluster_from_json, load_cluster
from autopar.costmodel.cluster.measured_terms import Calibration, GroupRate, MemoryShare, ProductShare
from autopar.costmodel.cluster.presets import PRESETS

NODE = LinkLevel(8, 1e-6, 1e11, (GroupRate(2, 0.25, 1e-5), GroupRate(2, 0.5, kind="p2p")))
MEASURED = Cluster(
    "measured",
    (NODE, LinkLevel(0, 1e-5, 1e9)),
    {"float32": 1e12},
    1e11,
    2**30,
    "made up",
    kernel_s=1e-6,
    update_s=2e-6,
    fresh_s_per_byte=3e-10,
    algorithms=("ring",),
    product_shares=(ProductShare(0.5, 8, "float32"), ProductShare(0.25, op="aten.bmm", backward=0.2)),
    memory_shares=(MemoryShare("aten.gelu", 0.5, 0.25), MemoryShare("update", 0.5)),
    calibration=Calibration("2026-01-31", "gloo", 0.04, 0.2, {"torch": "2.9"}, ("one", "two"), 4),
)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_json_and_say_where_they_come_from(name, tmp_path):
    preset = load_cluster(name)
    (tmp_path / "cluster.json").write_text(preset.to_json())
    assert load_cluster(tmp_path / "cluster.json") == preset == load_cluster(preset)
    assert preset.name == name and preset.source


def test_an_unknown_name_lists_the_presets():
    with pytest.raises(ValueError, match=r"no cluster 'h1000'.*JSON file.*h100.*v100"):
        load_cluster("h1000")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"levels": [{"size": 2}]}'])
def test_damaged_files_are_refused(text):
    with pytest.raises(ValueError, match=r"not a cluster"):
        cluster_from_json(text)


@pytest.mark.parametrize("levels", [(), (LinkLevel(0, 0, 1.0), LinkLevel(2, 0, 1.0)), (LinkLevel(2, 0.0, 0.0),)])
def test_impossible_links_are_refused(levels):
    with pytest.raises(ValueError, match="cluster 'x'"):
        Cluster("x", levels, {"float32": 1.0}, 1.0, 1, "")


def test_a_dtype_without_rate_runs_at_that_of_float32():
    assert load_cluster("cpu").peak_flops_per_s(torch.float16) == load_cluster("cpu").peak_flops_per_s(torch.float32)
    assert load_cluster("h100").peak_flops_per_s(torch.bfloat16) > 10 * load_cluster("h100").peak_flops_per_s(
        torch.float32
    )


def test_measured_terms_survive_json():
    assert cluster_from_json(MEASURED.to_json()) == MEASURED


def test_a_cluster_without_measured_terms_does_not_write_them():
    content = json.loads(load_cluster("h100").to_json())
    assert not {"kernel_s", "product_shares", "calibration"} & set(content)
    assert set(content["levels"][0]) == {"size", "latency_s", "bandwidth_bytes_per_s"}


def test_a_file_of_another_version_is_refused():
    with pytest.raises(ValueError, match=r"another version: expected 1, found 2"):
        cluster_from_json(json.dumps(json.loads(MEASURED.to_json()) | {"version": 2}))


@pytest.mark.parametrize(
    "path, item, expected",
    [
        (("kernel_s",), -1.0, "kernel_s"),
        (("algorithms",), ["tree"], "ring or nested among them"),
        (("algorithms",), ["ring", "star"], "algorithms.*star"),
        (("update_s",), "1", "update_s"),
        (("product_shares", 0, "share"), 0.0, "share of product_shares"),
        (("product_shares", 0, "reuse"), float("nan"), "reuse of product_shares"),
        (("product_shares", 1, "op"), 3, "op of product_shares"),
        (("memory_shares", 0, "backward"), True, "backward of memory_shares 'aten.gelu'"),
        (("memory_shares", 0, "speed"), 1.0, "speed"),
        (("memory_shares", 1, "num_bytes"), 0.0, "num_bytes of memory_shares 'update'"),
        (("levels", 0, "group_rates", 0, "size"), 1, "size of group_rates of level 0"),
        (("levels", 0, "group_rates", 0, "kind"), "gather", "kind of '', 'all_reduce'.*group_rates of level 0"),
        (("levels", 0, "group_rates", 0, "least_s"), -1.0, "least_s of group_rates of level 0"),
        (("levels", 0, "group_rates"), {"size": 2}, "not a cluster"),
        (("calibration", "fit_error"), -0.1, "fit_error of calibration"),
        (("calibration", "date"), 20260131, "date and backend of calibration"),
        (("calibration", "versions"), "2.9", "not a cluster"),
        (("calibration",), {"date": "today"}, "not a cluster.*backend"),
        (("calibration",), "yesterday", "not a cluster"),
    ],
)
def test_a_wrong_term_is_refused_by_name(path, item, expected):
    content = json.loads(MEASURED.to_json())
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = item
    with pytest.raises(ValueError, match=expected):
        cluster_from_json(json.dumps(content))


def test_bounds_take_the_best_share_of_each_op():
    shares = (ProductShare(0.25, 4, backward=0.9), ProductShare(0.75, 64), ProductShare(0.5, op="aten.bmm"))
    best = replace(MEASURED, product_shares=shares).at_best().product_shares
    assert sorted((row.op, *row.shares) for row in best) == [("", 0.75, 0.9), ("aten.bmm", 0.5, 0.5)]
