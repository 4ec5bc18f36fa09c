"""A cluster on this machine: hosts are network namespaces whose links are really slow.

    python -m bench.emulated_cluster --hosts 4 --rate 1gbit SCRIPT [ARGUMENT ...]
    python -m bench.emulated_cluster --hosts 2 --ranks 2 --rate 1gbit --inside 20gbit -m bench.something
    python -m bench.emulated_cluster --clean

runs SCRIPT as `torchrun --nnodes HOSTS --nproc-per-node RANKS` does. Each host has one card, joined to the others by a
bridge, whose rate is limited in both directions by a token bucket (tc-tbf); ranks of one host talk over its loopback
device. Needs root and iproute2. The hosts share this machine's cores, so compute is no faster on more of them. They
avoid congestion by Linux's default algorithm, CUBIC (RFC 9438), whatever this machine uses.

All of it lies in namespaces named after this process: they are deleted when it ends, and those that a killed one left
behind when the next begins, or by `--clean`, their processes killed.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PREFIX = "autopar-"
CARD, SUBNET, PORT = "card", "10.77.0", 29400
# A bucket must hold what the card hands over at once, up to 64 KiB; more is let through faster than at the rate.
_LEAST_BURST_BYTES, _BURST_S = 128 * 2**10, 1e-3
# Below this rate a bucket holds one packet.
_STALLED_BITS, _PACKET_BYTES = 1e5, 2048
# The longest wait in a queue: packets that would wait longer are dropped.
_QUEUE_MS = 200
# Hosts that use BBR, which estimates a link's rate from what it let through lately, send at less than the rate where
# collectives of several kinds alternate: 1.3 times the time of each alone at 200mbit.
_CONGESTION_CONTROL = "cubic"
_POLL_S = 0.05
_END_S = 10.0  # between asking a process to end and killing it
_RATE = re.compile(r"([0-9.]+)(k|m|g)bit")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


class ClusterError(RuntimeError):
    """Raised if the hosts cannot be set up, or a command on one of them failed."""


@dataclass(frozen=True)
class EmulatedCluster:
    """Hosts that exist until the context that made them ends."""

    names: tuple[str, ...]  # their network namespaces
    files: Path  # a folder of this cluster
    switch: str  # the namespace of the bridge between them

    def addresses(self) -> tuple[str, ...]:
        """The address of each host."""
        return tuple(f"{SUBNET}.{number + 1}" for number in range(len(self.names)))

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that runs on `host`, which has a name of its own and knows those of the others."""
        own = f'mount --bind {self.files}/hosts /etc/hosts && hostname host{host} && exec "$@"'
        return ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c", own, "sh", *argv]

    def limit(self, host: int, rate: str) -> None:
        """From now on the card of a host has this rate, both ways."""
        _limit(self.names[host], CARD, rate)
        _limit(self.switch, f"port{host}", rate)

    def cut_off(self, host: int) -> None:
        """No packet reaches or leaves a host any more."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def connect(self, host: int) -> None:
        """The host's link is as before `cut_off`."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "up")

    def torchrun(self, num_ranks: int, argv: Sequence[str]) -> int:
        """Run `argv`, a script or `-m MODULE` and its arguments, on `num_ranks` ranks a host; the exit status.

        The first host that fails ends all, and its status is given.
        """
        started = []
        try:
            for host in range(len(self.names)):
                place = ["--master-addr", self.addresses()[0], "--master-port", str(PORT), "--node-rank", str(host)]
                size = ["--nnodes", str(len(self.names)), "--nproc-per-node", str(num_ranks)]
                own = [sys.executable, "-m", "torch.distributed.run", *size, *place, *argv]
                started.append(self._start(host, own))
            return _first_failure(started)
        finally:
            _end(started)

    def _start(self, host: int, argv: Sequence[str]) -> subprocess.Popen:
        card = CARD if len(self.names) > 1 else "lo"
        # c10d warns that no name server knows the hosts
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": card, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return subprocess.Popen(self.command(host, argv), env=os.environ | own, start_new_session=True)


@contextmanager
def emulated_cluster(num_hosts: int, rate: str, inside: str | None = None) -> Iterator[EmulatedCluster]:
    """A cluster of `num_hosts` whose cards have the `rate`, and whose loopback devices have the rate `inside`: as tc
    writes them, such as 200mbit. ClusterError if that is impossible; nothing of it is left then,
    nor where SIGTERM ends the process. From the main thread.
    """
    if num_hosts < 1:
        raise ClusterError(f"a cluster has at least one host, {num_hosts} were asked for")
    for given in (rate, *filter(None, (inside,))):
        bits_of(given)
    clean()
    prefix = f"{PREFIX}{os.getpid()}-"
    switch, names = f"{prefix}switch", tuple(f"{prefix}host{number}" for number in range(num_hosts))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as files:
        cluster = EmulatedCluster(names, Path(files), switch)
        known = [f"{address} host{number}" for number, address in enumerate(cluster.addresses())]
        (cluster.files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        handler = signal.signal(signal.SIGTERM, _stop)
        try:
            _make(cluster, rate, inside)
            yield cluster
        finally:
            signal.signal(signal.SIGTERM, handler)
            for name in (*names, switch):
                _delete(name)


def bits_of(rate: str) -> float:
    """Bits a second of a rate.

    >>> bits_of("1gbit"), bits_of("0.2gbit")
    (1000000000.0, 200000000.0)
    """
    match = _RATE.fullmatch(rate)
    if match is None or float(match[1]) <= 0:
        raise ClusterError(f"a rate is written as tc writes it, such as 200mbit or 1gbit; found {rate!r}")
    return float(match[1]) * _UNITS[match[2]]


def clean() -> list[str]:
    """Delete the namespaces of processes that are no more; their names. ClusterError where there can be none."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise ClusterError("network namespaces need root and iproute2 (ip and tc): run as root, apt install iproute2")
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]
    left = [name for name in names if not Path(f"/proc/{name.removeprefix(PREFIX).split('-')[0]}").exists()]
    for name in left:
        _delete(name)
    return left


def _make(cluster: EmulatedCluster, rate: str, inside: str | None) -> None:
    """The namespaces and their links. All lie in namespaces, so that deleting these is all there is to clean up."""
    switch = cluster.switch
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for number, (name, address) in enumerate(zip(cluster.names, cluster.addresses())):
        port = f"port{number}"
        _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", CARD, "netns", name)
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", CARD)
        _ip("-n", name, "link", "set", CARD, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _avoid_congestion(name)
        cluster.limit(number, rate)
        if inside is not None:
            _limit(name, "lo", inside)


def _avoid_congestion(namespace: str) -> None:
    """Set the algorithm of all IPv4 connections, route by route: a namespace's default may be none that its machine
    does not allow every user.
    """
    for route in _ip("-n", namespace, "-4", "route", "show", "table", "all").splitlines():
        if not route.startswith("broadcast"):
            _ip("-n", namespace, "route", "change", *route.split(), "congctl", _CONGESTION_CONTROL)


def _limit(namespace: str, device: str, rate: str) -> None:
    """Limit what a device sends; a link that is hardly one lets no packet more through than at its rate."""
    least = _LEAST_BURST_BYTES if bits_of(rate) > _STALLED_BITS else _PACKET_BYTES
    burst = max(least, int(bits_of(rate) / 8 * _BURST_S))
    bits = f"{bits_of(rate):.0f}"
    bucket = ["tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms"]
    _run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket])


def _ip(*argv: str) -> str:
    return _run(["ip", *argv])


def _run(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _delete(name: str) -> None:
    """Delete a namespace and kill what runs in it; nothing if there is none."""
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in inside.stdout.split() if inside.returncode == 0 else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _first_failure(started: Sequence[subprocess.Popen]) -> int:
    """Wait until one of them failed or all are done; the status of the one that failed, else 0."""
    while True:
        codes = [process.poll() for process in started]
        failed = next((code for code in codes if code), None)
        if failed is not None or None not in codes:
            return failed or 0
        time.sleep(_POLL_S)


def _end(started: Sequence[subprocess.Popen]) -> None:
    """End all that still run, with their children, first by asking."""
    for asked in (signal.SIGTERM, signal.SIGKILL):
        running = [process for process in started if process.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, asked)
        deadline = time.monotonic() + _END_S
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--hosts", type=int, default=2)
    arguments.add_argument("--ranks", type=int, default=1, help="of each host")
    arguments.add_argument("--rate", default="1gbit", help="of each host's card, both ways")
    arguments.add_argument("--inside", help="rate of each host's loopback device, by default without limit")
    arguments.add_argument("--clean", action="store_true", help="delete what killed runs left behind, and end")
    arguments.add_argument("-m", dest="module", help="run this module instead of a script")
    arguments.add_argument("argv", nargs=argparse.REMAINDER, metavar="SCRIPT ...")
    given = arguments.parse_args()
    argv = ["-m", given.module, *given.argv] if given.module else given.argv
    if not argv and not given.clean:
        arguments.error("expected a script, or -m MODULE, and its arguments")
    try:
        if given.clean:
            print("\n".join(f"deleted {name}" for name in clean()) or "nothing was left behind")
            return
        with emulated_cluster(given.hosts, given.rate, given.inside) as cluster:
            status = cluster.torchrun(given.ranks, argv)
    except ClusterError as error:
        raise SystemExit(f"error: {error}") from None
    raise SystemExit(status)


if __name__ == "__main__":
    main()
