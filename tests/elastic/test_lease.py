"""One group of ranks at a time writes into a folder."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from autopar.elastic.lease import Lease, LeaseLost, job_name
from autopar.errors import AutoparError

QUICK = {"stale_s": 0.5, "beat_s": 0.05}


def test_another_job_is_refused_while_the_owner_is_alive(tmp_path):
    lease = Lease(tmp_path, "one", **QUICK)
    with pytest.raises(AutoparError, match=r"in use by another group of ranks .*'one'.*this one is job 'other'"):
        Lease(tmp_path, "other", **QUICK)
    with lease.held():
        pass
    lease.release()
    Lease(tmp_path, "other", **QUICK).release()


def test_the_next_generation_of_a_job_takes_over_and_the_one_before_writes_nothing(tmp_path):
    before = Lease(tmp_path, "one", **QUICK)
    after = Lease(tmp_path, "one", **QUICK)
    with pytest.raises(LeaseLost, match="taken by another group of ranks"), before.held():
        raise AssertionError("two generations hold the folder")
    before.release()
    with after.held():
        pass
    after.release()
    with pytest.raises(LeaseLost, match="ended since"):
        after.check()


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_a_dead_or_silent_owner_is_no_hindrance(tmp_path, host):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    name = socket.gethostname() if host == "here" else "elsewhere"
    owner = {"job": "gone", "token": "1", "host": name, "pid": ended.pid}
    (tmp_path / "lease.json").write_text(json.dumps(owner))
    start_s = time.monotonic()
    lease = Lease(tmp_path, "next", **QUICK)
    assert (time.monotonic() - start_s >= QUICK["stale_s"]) == (host == "elsewhere")
    lease.release()


def test_an_owner_elsewhere_that_gives_signs_of_life_is_known_without_comparing_clocks(tmp_path):
    file = tmp_path / "lease.json"
    file.write_text(json.dumps({"job": "far", "token": "1", "host": "elsewhere", "pid": 1}))
    beating = [
        sys.executable,
        "-c",
        f"import os, time\nfor i in range(60):\n os.utime({str(file)!r}, (i, i)); time.sleep(0.1)",
    ]
    beats = subprocess.Popen(beating)
    try:
        with pytest.raises(AutoparError, match="process 1 on elsewhere"):
            Lease(tmp_path, "near", stale_s=5, beat_s=0.05)
    finally:
        beats.kill()
        beats.wait()


def test_a_damaged_lease_is_named(tmp_path):
    (tmp_path / "lease.json").write_text("{")
    with pytest.raises(AutoparError, match=r"lease.json is damaged .*remove it"):
        Lease(tmp_path, "one", **QUICK)


def test_a_job_is_known_by_its_rendezvous(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "train-7")
    assert job_name() == "train-7"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert job_name() == "node0:29500"
    monkeypatch.delenv("MASTER_ADDR")
    assert str(os.getpid()) in job_name()
