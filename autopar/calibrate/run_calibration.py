"""`calibrate`: the cluster of the ranks of this world, measured; its file is written whole or not at all."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.calibrate.fit_cluster import Fitted, fit_cluster
from autopar.calibrate.measure import FULL, Effort, measure
from autopar.costmodel.cluster.hardware import Cluster
from autopar.errors import AutoparError, warn
from autopar.plans.serialise import write
from autopar.runtime.pipeline.fail_together import Meeting, failing_together

STALL_S = 20.0  # a message that takes longer is one that does not come
_LEAST_STALL_S, _MOST_STALL_S = 0.1, 86400.0
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_numbers = itertools.count()  # of calibrations of this process
Tell = Callable[[str], None]


@contextmanager
def world(*, stall_s: float = STALL_S) -> Iterator[None]:
    """A context with a process group: the one there is, that of torchrun, or one of this process alone.

    AutoparError if the environment is not that of torchrun, or not all of its ranks come within `stall_s` seconds.
    """
    if not _LEAST_STALL_S <= stall_s <= _MOST_STALL_S:
        raise AutoparError(
            f"calibrate: expected from {_LEAST_STALL_S:g} to {_MOST_STALL_S:g} seconds as --stall, found {stall_s:g}"
        )
    if dist.is_initialized():
        yield
        return
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    backend = "nccl" if torch.cuda.is_available() and is_launched else "gloo"
    if is_launched:
        try:
            if backend == "nccl":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group(backend, timeout=timedelta(seconds=stall_s))
        except (ValueError, dist.DistError) as error:
            world = ", ".join(f"{name}={os.environ.get(name)}" for name in _OF_TORCHRUN)
            raise AutoparError(
                f"calibrate: the ranks of {world} do not meet: {str(error).splitlines()[0]}; start all of them with"
                " torchrun, or unset RANK for this process alone"
            ) from error
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def calibrate(
    *, links: Cluster | None = None, effort: Effort = FULL, stall_s: float = STALL_S, tell: Tell = lambda _: None
) -> Fitted:
    """The cluster of this world's devices and links; every rank calls this, within `world()`.

    `links`: the cluster whose link levels are taken where there is one rank, which has none to time. `tell` is called
    with what is measured. AutoparError, on all ranks with the first cause, if one fails, dies or does not answer within
    `stall_s` seconds. Warns of hosts that are slower than others.
    """
    num_ranks = dist.get_world_size()
    if num_ranks == 1 and links is None:
        raise AutoparError(
            "calibrate: one rank has no links to measure; start several (torchrun --nproc-per-node 4 -m autopar"
            " calibrate), or take the links of a preset or of a file (--links h100)"
        )
    if num_ranks > 1 and links is not None:
        raise AutoparError(
            f"calibrate: the links of these {num_ranks} ranks are measured; --links is for a single rank, leave it out"
        )
    backend = str(dist.get_backend())
    device = _device(backend)
    with failing_together(Meeting(f"autopar/calibrate/{next(_numbers)}", range(num_ranks))):
        mesh = init_device_mesh(device.type, (num_ranks,))
        measured = measure(mesh, device, effort, stall_s, tell)
        tell("fit")
        levels = links.levels if links is not None else ()
        fitted = fit_cluster(measured, device_name(device), device.type, backend, levels)
    _warn_of_slow(fitted)
    return fitted


def save(cluster: Cluster, path: str | os.PathLike) -> None:
    """Write the cluster's JSON to `path`, atomically; AutoparError if that fails."""
    try:
        write(path, cluster.to_json())
    except OSError as error:
        raise AutoparError(
            f"calibrate: the cluster cannot be written to {os.fspath(path)!r}: {error.strerror}; give the path of a new"
            " file in a folder that exists"
        ) from error


def _device(backend: str) -> torch.device:
    is_gpu = "nccl" in backend or (dist.get_world_size() == 1 and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The name of a device as its calibration has it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.uname().machine} CPU"


def _warn_of_slow(fitted: Fitted) -> None:
    if fitted.slow_hosts and dist.get_rank() == 0:
        error = fitted.cluster.calibration.fit_error if fitted.cluster.calibration else 0.0
        slow = ", ".join(f"{host} takes {times:.2f} times as long" for host, times in fitted.slow_hosts.items())
        warn(
            f"calibrate: hosts differ by more than the fit's error of {error:.0%}: {slow} as the fastest. In the file"
            " of autopar calibrate --out hosts that are alike are a group of devices, which gets rows by its speed;"
            " without a file plans are priced as if all were as slow as the slowest, which is what they wait for"
        )
