"""Runs under torchrun on hosts one of whose links stalls or is cut, for `bench.elastic`; needs root and iproute2.

Three hosts of the emulated cluster have an agent of torchrun with a rank each; the store in which they meet is on the
first. The link of the last one is spoilt while they train, so that the others go on without it, and is well again after
that: what is left of the run has all three. An agent that ended with an error is started again, as a job manager does.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.elastic_log import RENDEZVOUS, ROOT, lines_of, resumed, tail, wait_for, whole
from bench.emulated_cluster import EmulatedCluster, emulated_cluster
from bench.report import Row

NUM_HOSTS, RATE, STALLED, STORE_PORT = 3, "1gbit", "1kbit", 29500
STEPS_EACH, SAVE_EVERY, PAUSE_S = 25, 5, 0.5
STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(1e6)
"""

Fault = Callable[[EmulatedCluster, int], None]
FAULTS: dict[str, tuple[Fault, Fault]] = {
    "stalled link": (
        lambda cluster, host: cluster.limit(host, STALLED),
        lambda cluster, host: cluster.limit(host, RATE),
    ),
    "partition that heals": (EmulatedCluster.cut_off, EmulatedCluster.connect),
}


def links(columns: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """The rows of both faults, and those of their whole runs."""
    found = [_run(name, columns) for name in FAULTS]
    return [row for row, _ in found], [row for _, row in found]


def _run(name: str, columns: Sequence[str]) -> tuple[Row, Row]:
    spoil, mend = FAULTS[name]
    num_steps, last = 5 * STEPS_EACH, NUM_HOSTS - 1
    with emulated_cluster(NUM_HOSTS, RATE) as cluster, tempfile.TemporaryDirectory() as folder_name:
        folder, start, started = Path(folder_name), time.time(), []
        store = _start(cluster, 0, [sys.executable, "-c", STORE, str(STORE_PORT)], folder)

        def join(host: int) -> subprocess.Popen:
            return _start(cluster, host, _agent(cluster, folder, num_steps), folder)

        try:
            started = [join(host) for host in range(NUM_HOSTS)]
            again = lambda: _again(started, join)  # noqa: E731
            step = wait_for(folder, STEPS_EACH, NUM_HOSTS, again)
            spoilt_at = time.time()
            spoil(cluster, last)
            without = wait_for(folder, 0, NUM_HOSTS - 1, again)
            wait_for(folder, without + SAVE_EVERY, NUM_HOSTS - 1, again)
            mended_at = time.time()
            mend(cluster, last)
            wait_for(folder, num_steps - 1, NUM_HOSTS, again)
            for agent in started[:-1]:
                if agent.wait(60):
                    raise RuntimeError(tail(folder))
        finally:
            for each in (*started, store):
                with suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
        lines = lines_of(folder)
        fewer, all_again = resumed(lines, spoilt_at, NUM_HOSTS - 1), resumed(lines, mended_at, NUM_HOSTS)
        row = dict(zip(columns, (name, step, *fewer.values(), *all_again.values())))
        return row, whole(name, lines, num_steps, time.time() - start)


def _agent(cluster: EmulatedCluster, folder: Path, num_steps: int) -> list[str]:
    options = ["--nnodes", f"{NUM_HOSTS - 1}:{NUM_HOSTS}", "--nproc-per-node", "1", "--max-restarts", "20"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{cluster.addresses()[0]}:{STORE_PORT}"]
    options += ["--rdzv-id", "bench", "--rdzv-conf", RENDEZVOUS]
    script = [str(ROOT / "bench" / "elastic_script.py"), str(folder), "--steps", str(num_steps)]
    script += ["--save-every", str(SAVE_EVERY), "--pause", str(PAUSE_S)]
    return [sys.executable, "-m", "torch.distributed.run", *options, *script]


def _start(cluster: EmulatedCluster, host: int, argv: Sequence[str], folder: Path) -> subprocess.Popen:
    own: dict[str, Any] = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "AUTOPAR_CLUSTER": "cpu"}
    own |= {"GLOO_SOCKET_IFNAME": "card", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with (folder / "printed").open("a") as printed:
        streams: dict[str, Any] = {"stdout": printed, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(cluster.command(host, argv), env=os.environ | own, **streams)


def _again(started: list[subprocess.Popen], join: Callable[[int], subprocess.Popen]) -> None:
    for host, agent in enumerate(started):
        if agent.poll():
            started[host] = join(host)
