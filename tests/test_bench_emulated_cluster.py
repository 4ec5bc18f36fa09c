"""Hosts of an emulated cluster: their links are as slow as asked for, and nothing of them is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.emulated_cluster import PREFIX, ClusterError, EmulatedCluster, clean, emulated_cluster

RATE_BITS, NUM_BYTES = 100e6, 8 * 2**20

RECEIVE = """
import socket, sys, time
with socket.create_server(("", 5001)) as server:
    print("ready", flush=True)
    link, _ = server.accept()
    size, start = 0, None
    while part := link.recv(2**20):
        start = start or time.monotonic()
        size += len(part)
    print(size / (time.monotonic() - start) * 8, flush=True)
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 5001)).sendall(bytes(int(sys.argv[2])))"
ALGORITHM = """
import socket, sys
link = socket.create_connection((sys.argv[1], 5001))
print(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""
RANK = """
import os, socket, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}: {total.tolist()}", flush=True)
if "fail" in sys.argv and dist.get_rank() == 1:
    sys.exit(7)
if "wait" in sys.argv or "fail" in sys.argv:
    time.sleep(600)
dist.destroy_process_group()
"""


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)}


@pytest.fixture
def script(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "rank.py").write_text(RANK)
    before = namespaces()
    yield str(tmp_path / "rank.py")
    assert namespaces() == before


def measured_bits(cluster: EmulatedCluster, sender: int, receiver: int, address: str) -> float:
    """Bits a second from one host to another."""
    listen = cluster.command(receiver, [sys.executable, "-c", RECEIVE])
    with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        subprocess.run(
            cluster.command(sender, [sys.executable, "-c", SEND, address, str(NUM_BYTES)]), check=True, timeout=60
        )
        return float(server.stdout.readline())


@pytest.mark.emulated
def test_cards_are_as_slow_as_asked_for_in_both_directions_and_loopback_is_not() -> None:
    with emulated_cluster(3, "100mbit") as cluster:
        for sender, receiver in ((0, 1), (1, 0), (2, 0)):
            bits = measured_bits(cluster, sender, receiver, cluster.addresses()[receiver])
            assert 0.8 * RATE_BITS < bits < 1.15 * RATE_BITS
        assert measured_bits(cluster, 0, 0, "127.0.0.1") > 3 * RATE_BITS
    with emulated_cluster(1, "1gbit", inside="100mbit") as cluster:
        assert 0.8 * RATE_BITS < measured_bits(cluster, 0, 0, "127.0.0.1") < 1.15 * RATE_BITS
    assert not any(name.startswith(f"{PREFIX}{os.getpid()}-") for name in namespaces())


@pytest.mark.emulated
def test_hosts_avoid_congestion_as_linux_does_by_default() -> None:
    with emulated_cluster(2, "100mbit") as cluster:
        for receiver in range(2):
            with subprocess.Popen(
                cluster.command(receiver, [sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE, text=True
            ) as server:
                assert server.stdout is not None and server.stdout.readline() == "ready\n"
                address = cluster.addresses()[receiver]
                told = subprocess.check_output(
                    cluster.command(0, [sys.executable, "-c", ALGORITHM, address]), text=True
                )
                assert told.strip() == "cubic"


def run(*argv: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "bench.emulated_cluster", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.emulated
def test_a_script_runs_as_under_torchrun(script: str) -> None:
    text, _ = (process := run("--hosts", "2", "--ranks", "2", "--rate", "1gbit", script)).communicate(timeout=300)
    assert process.returncode == 0, text
    lines = sorted(line for line in text.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 4 on host{rank // 2}: [4.0, 4.0, 4.0]" for rank in range(4)]


@pytest.mark.emulated
def test_a_module_runs_too() -> None:
    text, _ = (process := run("--hosts", "1", "-m", "platform")).communicate(timeout=300)
    assert process.returncode == 0 and "Linux" in text, text


@pytest.mark.emulated
def test_one_rank_that_fails_ends_all(script: str) -> None:
    start = time.monotonic()
    text, _ = (process := run("--hosts", "2", script, "fail")).communicate(timeout=300)
    assert process.returncode and "exitcode  : 7" in text, text
    assert time.monotonic() - start < 200


@pytest.mark.emulated
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_leaves_nothing(script: str, how: signal.Signals) -> None:
    process = run("--hosts", "2", script, "wait")
    assert process.stdout is not None and any(line.startswith("rank") for line in process.stdout)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode
    assert not any(name.startswith(f"{PREFIX}{process.pid}-") for name in namespaces())


@pytest.mark.emulated
def test_a_benchmark_that_is_ended_leaves_no_hosts_and_no_ranks(script: str) -> None:
    code = (
        "import sys; from bench.emulated_cluster import emulated_cluster\n"
        "with emulated_cluster(2, '1gbit') as cluster: cluster.torchrun(1, sys.argv[1:])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, script, "wait"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and any("rank" in line for line in process.stdout)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(name.startswith(f"{PREFIX}{process.pid}-") for name in namespaces())
    assert not subprocess.run(["pgrep", "-f", script], capture_output=True, text=True).stdout.split()


@pytest.mark.emulated
def test_what_a_killed_run_leaves_is_cleaned_by_the_next(script: str) -> None:
    process = run("--hosts", "2", script, "wait")
    assert process.stdout is not None and any(line.startswith("rank") for line in process.stdout)
    process.kill()
    process.wait()
    left = {name for name in namespaces() if name.startswith(f"{PREFIX}{process.pid}-")}
    assert len(left) == 3
    assert set(clean()) >= left and not left & namespaces()
    ranks = subprocess.run(["pgrep", "-f", script], capture_output=True, text=True)
    assert not ranks.stdout.split()


@pytest.mark.parametrize(("num_hosts", "rate"), [(0, "1gbit"), (2, "fast"), (2, "0mbit"), (2, "1 gbit")])
def test_what_is_no_cluster_is_refused(num_hosts: int, rate: str) -> None:
    with pytest.raises(ClusterError, match=r"at least one host|as tc writes it"), emulated_cluster(num_hosts, rate):
        pass
