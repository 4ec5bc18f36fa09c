"""Calibration of real gloo ranks: the same cluster on all, and ends that are prompt where a rank or a link fails."""

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from autopar.calibrate.fit_cluster import Fitted, Point
from autopar.calibrate.measure import Effort, measure_cores, measure_links
from autopar.calibrate.run_calibration import calibrate, save
from autopar.calibrate.time_links import Groups, TimedLinks
from autopar.cli import calibrate_command, main
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.cluster.measured_terms import Calibration, SharedCores
from autopar.errors import AutoparError
from tests.workers import RankError, Ranks

LEAST = Effort(True, 0.002, 0.002, (2**10, 2**14))
SOON_S = 10.0
STALL_S = 2.0


def calibrated() -> str:
    return calibrate(effort=LEAST).cluster.to_json()


@pytest.mark.multirank
def test_all_ranks_agree_on_a_cluster_of_their_host(ranks4, tmp_path):
    texts = ranks4.run(calibrated)
    path = tmp_path / "cluster.json"
    path.write_text(texts[0])
    cluster = load_cluster(path)
    assert [level.size for level in cluster.levels] in ([4], [2, 2])  # a busy machine may show a step
    assert cluster.num_devices == 4 and cluster.device_type == "cpu"
    origin = cluster.calibration
    assert (origin.backend, origin.num_ranks, len(origin.hosts)) == ("gloo", 4, 1)
    rates = {(rate.kind, rate.size) for level in cluster.levels for rate in level.group_rates}
    assert {("p2p", 2), ("all_reduce", 2), ("all_gather", 2), ("reduce_scatter", 2), ("all_to_all", 2)} <= rates
    assert cluster.kernel_s > 0 and cluster.update_s > 0 and cluster.flops_per_s["float32"] > 1e8


def on_one_core() -> SharedCores | None:
    links, allowed = TimedLinks(torch.device("cpu"), 20.0, 0.1), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        return measure_cores(links, (4,), lambda _: None)
    finally:
        os.sched_setaffinity(0, allowed)
        links.close()


@pytest.mark.multirank
def test_a_rank_whose_core_the_others_leave_computes_faster(ranks4):
    found, *others = ranks4.run(on_one_core)
    assert all(other == found for other in others)
    assert found.num_ranks == 4 and 1.25 <= found.speedup <= 8  # 4 if nothing else runs on that core


@pytest.mark.parametrize(
    "seconds, shared",
    [
        ({1: 1.0, 2: 1.02, 8: 1.1}, None),
        ({1: 1.0, 2: 1.95, 8: 2.0}, SharedCores(2, 2.0)),
        ({1: 1.0, 2: 1.0, 8: 4.0}, SharedCores(8, 4.0)),
    ],
)
def test_cores_are_shared_by_the_ranks_that_slow_each_other_down(seconds, shared):
    links = SimpleNamespace(device=torch.device("cpu"), computing_s=seconds.__getitem__)
    assert measure_cores(links, (2, 4), lambda _: None) == shared


def bytes_on_links() -> list[tuple[str, int, int]]:
    links = TimedLinks(torch.device("cpu"), 20.0, 0.001)
    try:
        _, times = measure_links(links, 4, 2, LEAST, lambda _: None)
    finally:
        links.close()
    assert all(timed.seconds > 0 for timed in times)
    return sorted({(timed.kind, timed.groups.size, timed.groups.stride) for timed in times})


@pytest.mark.multirank
def test_two_hosts_are_two_levels_and_groups_across_them_are_timed_with_all_others_at_once(ranks4):
    (timed, *others) = ranks4.run(bytes_on_links)
    assert all(other == timed for other in others)
    kinds = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
    assert timed == sorted(
        [(kind, 2, stride) for kind in (*kinds, "p2p") for stride in (1, 2)] + [(kind, 4, 1) for kind in kinds]
    )


def with_tell(folder: str, strike: str) -> None:
    """Calibrate, with rank 2 struck while it measures; every rank writes the error that it ends with."""
    path = Path(folder) / str(dist.get_rank())
    os.dup2(os.open(path.with_suffix(".err"), os.O_CREAT | os.O_WRONLY), 2)

    def tell(text: str) -> None:
        if dist.get_rank() == 2 and text.startswith("all_gather"):
            (path.parent / "struck").touch()
            if strike == "death":
                os._exit(3)
            if strike == "stall":
                time.sleep(60)
            raise ValueError("no luck today")

    try:
        calibrate(effort=LEAST, stall_s=STALL_S if strike == "stall" else 60.0, tell=tell)
    except AutoparError as error:
        path.write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("strike", "cause"),
    [
        ("error", "rank 2 failed first, ValueError: no luck today"),
        ("death", "rank 2 died"),
        ("stall", "expected all_gather of .* among ranks .*2.* found no answer"),
    ],
)
def test_a_rank_that_fails_ends_all_soon_with_the_first_cause(tmp_path, strike, cause):
    ranks = Ranks(4)
    ranks.run(os.getpid)
    with pytest.raises(RankError):
        ranks.run(with_tell, str(tmp_path), strike)
    ranks.stop()
    struck_s = (tmp_path / "struck").stat().st_mtime
    for rank in (0, 1, 3):
        assert max(path.stat().st_mtime for path in tmp_path.glob(f"{rank}*")) < struck_s + SOON_S + 2 * STALL_S
        told = "".join(path.read_text() for path in tmp_path.glob(f"{rank}*"))
        assert re.search(cause, told), f"rank {rank}: {told}"


def test_one_rank_has_no_links(capsys):
    assert main(["calibrate"]) == 2
    assert "one rank has no links to measure" in capsys.readouterr().err


def test_no_file_is_written_where_there_is_no_folder(tmp_path, capsys):
    assert main(["calibrate", "--links", "cpu", "--out", str(tmp_path / "none" / "here.json")]) == 2
    assert "folder that exists" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stall", ["-1", "0", "nan", "1e300"])
def test_a_time_to_stall_that_is_none_is_refused(capsys, stall):
    assert main(["calibrate", "--links", "h100", "--quick", f"--stall={stall}"]) == 2
    assert f"0.1 to 86400 seconds as --stall, found {float(stall):g}" in capsys.readouterr().err


def test_a_folder_is_no_file_to_write(tmp_path, capsys):
    assert main(["calibrate", "--links", "h100", "--quick", "--out", str(tmp_path)]) == 2
    assert f"expected a file in a folder that exists, found {str(tmp_path)!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR expected, but not set"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}, "RANK=x"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}, "1/2 clients joined"),
    ],
)
def test_ranks_that_do_not_meet_are_told(monkeypatch, capsys, environment, told):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", "--quick", "--stall", "1"]) == 2
    error = capsys.readouterr().err
    assert "do not meet" in error and told in error and "start all of them with torchrun" in error


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "found nothing"),
        (b"[1, 2]", "[1, 2] in place of an object"),
        (b"\xff\xfe\x00", "expected JSON text, found other bytes"),
        (b'{"version": 7}', "expected 1, found 7; calibrate again"),
        (b'{"version": 1}', "found no field 'levels'"),
        (b'{"levels": [], "calibration": {"hosts": "abc"}}', "'abc' in place of a list as hosts of calibration"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, content, told):
    path = tmp_path / "cluster.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        load_cluster(path)
    assert str(error.value).startswith(f"{path}: ")


def test_one_device_with_the_links_of_a_preset(tmp_path, capsys):
    path = tmp_path / "here.json"
    assert (
        main(["calibrate", "--quick", "--links", "h100", "--out", str(path), "--picture", str(tmp_path / "a.png")]) == 0
    )
    cluster = load_cluster(path)
    assert cluster.levels == load_cluster("h100").levels and cluster.calibration.backend == ""
    assert "mean error" in capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert not dist.is_initialized()


def test_the_file_of_hosts_that_differ_has_their_groups(tmp_path, monkeypatch):
    calibration = Calibration("", "gloo", 0.1, 0.2, {}, ("a", "b"), 5)
    one, groups = replace(load_cluster("cpu"), calibration=calibration), load_cluster("2 cpu + 3 cpu over 1GB/s")
    fitted = Fitted(one, (Point("update", 1.0, 1.0, 1.1),) * 2, {"host 1 (b)": 2.0}, groups)
    monkeypatch.setattr(calibrate_command, "calibrate", lambda **_: fitted)
    assert main(["calibrate", "--quick", "--links", "h100", "--out", str(tmp_path / "here.json")]) == 0
    assert load_cluster(tmp_path / "here.json") == groups


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(AutoparError, match="No space left on device"):
        save(load_cluster("cpu"), tmp_path / "here.json")
    assert not list(tmp_path.iterdir())


def rows_of(size: int, stride: int, block: int) -> list[int]:
    return [rank for row in Groups(size, stride, block).rows(12) for rank in row]


@pytest.mark.parametrize(("size", "stride", "block"), [(2, 1, 12), (3, 4, 12), (2, 3, 6), (12, 1, 12)])
def test_every_rank_is_in_one_group(size, stride, block):
    assert sorted(rows_of(size, stride, block)) == list(range(12))
