"""Clusters survive JSON, and what cannot be read says what would do."""

import pytest
import torch

from autopar.costmodel.cluster.load_cluster import Cluster, LinkLevel, cluster_from_json, load_cluster
from autopar.costmodel.cluster.presets import PRESETS


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
