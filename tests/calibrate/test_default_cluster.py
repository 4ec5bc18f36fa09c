"""The cluster of plans for which none is named: measured once, then read, the same on every rank."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.calibrate import default_cluster as module
from autopar.calibrate.default_cluster import cache_folder, default_cluster
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import AutoparError
from tests.calibrate.test_calibration import LEAST
from tests.workers import RankError, Ranks, device_mesh

pytestmark = pytest.mark.multirank


@contextmanager
def environment(**names: str) -> Iterator[list[warnings.WarningMessage]]:
    """The variables as given, AUTOPAR_CLUSTER not set otherwise; the warnings."""
    with mock.patch.dict(os.environ, names), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if "AUTOPAR_CLUSTER" not in names:
            os.environ.pop("AUTOPAR_CLUSTER", None)
        yield told


def twice(folder: str) -> tuple[list[str], list[list[str]], bool]:
    """(JSON of both clusters, warnings of both, whether random numbers go on as before)."""
    mesh, texts, told_each = device_mesh((4,), ("dp",)), [], []
    torch.manual_seed(7)
    expected = torch.random.get_rng_state()
    for _ in range(2):
        with environment(AUTOPAR_CACHE=folder) as told:
            texts.append(default_cluster(mesh, effort=LEAST).to_json())
        told_each.append([str(one.message) for one in told])
    return texts, told_each, torch.equal(expected, torch.random.get_rng_state())


def test_it_is_measured_once_and_then_read(ranks4: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    results = ranks4.run(twice, str(folder))
    (path,) = folder.iterdir()
    for texts, _, goes_on in results:
        assert texts == [results[0][0][0]] * 2 and goes_on
    assert load_cluster(path).to_json() == results[0][0][0]
    first, again = results[0][1]
    assert len(first) == 1 and str(path) in first[0] and "AUTOPAR_CLUSTER" in first[0] and not again
    assert not any(told for _, each, _ in results[1:] for told in each)  # one line, on the first rank


def test_a_damaged_file_is_measured_again(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(twice, str(tmp_path))
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-20])
    results = ranks4.run(twice, str(tmp_path))
    assert load_cluster(path).to_json() == results[0][0][0] and len(results[0][1][0]) == 1


def in_no_folder(path: str) -> list[str]:
    with environment(AUTOPAR_CACHE=path) as told:
        default_cluster(device_mesh((4,), ("dp",)), effort=LEAST)
    return [str(one.message) for one in told]


def test_where_it_cannot_be_saved_it_is_used_and_said(ranks4: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told, *others = ranks4.run(in_no_folder, str(tmp_path / "file" / "folder"))
    assert "measured again next time" in told[-1] and "AUTOPAR_CACHE" in told[-1] and not any(others)


def named(name: str) -> str:
    with environment(AUTOPAR_CLUSTER=name if dist.get_rank() == 0 else "nothing"):
        return default_cluster(device_mesh((2, 2), ("dp", "tp"))).name


def test_a_named_cluster_is_that_of_the_first_rank(ranks4: Ranks) -> None:
    assert ranks4.run(named, "h100") == [load_cluster("h100").name] * 4
    with pytest.raises(RankError, match=r"AUTOPAR_CLUSTER='h1000' cannot be used.*h100"):
        ranks4.run(named, "h1000")


def of_half_the_world() -> str:
    mesh = device_mesh((2, 2), ("dp", "tp"))["tp"]
    with environment(AUTOPAR_CACHE="/nowhere") as told:
        name = default_cluster(mesh).name
    assert not told
    return name


def test_ranks_without_the_others_take_the_preset(ranks4: Ranks) -> None:
    assert ranks4.run(of_half_the_world) == [load_cluster("cpu").name] * 4


def failing() -> tuple[str, list[str]]:
    def fail(**_: object) -> None:
        raise AutoparError("calibrate: expected neighbouring ranks on the same host")

    with environment(AUTOPAR_CACHE="/nowhere") as told, mock.patch.object(module, "calibrate", fail):
        name = default_cluster(device_mesh((4,), ("dp",))).name
    return name, [str(one.message) for one in told]


def test_hosts_that_cannot_be_calibrated_have_the_preset(ranks4: Ranks) -> None:
    for name, told in ranks4.run(failing):
        assert name == load_cluster("cpu").name and "neighbouring ranks" in told[-1]


def planned(folder: str) -> tuple[str, str]:
    mesh, texts = device_mesh((4,), ("dp",)), []
    with environment(AUTOPAR_CACHE=folder):
        default_cluster(mesh, effort=LEAST)
        for dtype in (torch.float32, torch.bfloat16):
            model, x = nn.Linear(8, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype)
            texts.append(autopar.compile(model, mesh, args=(x,)).plan.explain())
    return tuple(texts)


def test_plans_are_made_for_it(ranks4: Ranks, tmp_path: Path) -> None:
    for texts in ranks4.run(planned, str(tmp_path)):
        assert all("fit error" in text and "a tie" in text for text in texts)


def test_the_cache_folder_is_that_of_the_user() -> None:
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": "/x", "AUTOPAR_CACHE": ""}):
        assert cache_folder() == Path("/x/autopar")
