"""`default_cluster`: the cluster that plans are made for where the user names none, his own machine as measured."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.calibrate.link_levels import host_id, host_name
from autopar.calibrate.measure import QUICK, Effort
from autopar.calibrate.run_calibration import calibrate, device_name, save
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.cluster.load_cluster import cluster_from_json, load_cluster, preset_of
from autopar.errors import AutoparError, PeerFailed, warn
from autopar.planner.status import status
from autopar.runtime.rank_agreement import gather, is_first, of_first_rank

CLUSTER = "AUTOPAR_CLUSTER"  # a preset's name or a file: the cluster where none is given
CACHE = "AUTOPAR_CACHE"  # the folder of saved calibrations


def default_cluster(mesh: DeviceMesh, *, effort: Effort = QUICK) -> Cluster:
    """The cluster of the mesh's devices, the same on all of its ranks, each of which calls this.

    It is the one that AUTOPAR_CLUSTER names on the first rank; else the calibration of these hosts, devices and backend
    in the cache folder; else a calibration with `effort`, which is saved there, and of which a line tells; else, where
    not all ranks of the world are in the mesh or the backend is neither gloo nor NCCL, the preset of the devices.
    AutoparError if a rank fails, or AUTOPAR_CLUSTER names nothing.
    """
    hosts = gather(mesh, host_id())  # also waits for ranks that are late, as no calibration does
    backend = str(dist.get_backend())
    can_measure = 1 < mesh.size() == dist.get_world_size() and ("gloo" in backend or "nccl" in backend)
    path = cache_folder() / f"{_key(hosts, backend, mesh.device_type)}.json"
    with of_first_rank(mesh, "reading the cluster") as shared:
        if shared.is_here:
            shared.value = _named() or (_saved(path) if can_measure else None)
    if shared.value is not None:
        return shared.value
    return _measured(mesh, effort, path) if can_measure else load_cluster(preset_of(mesh.device_type))


def cache_folder() -> Path:
    """The folder of saved calibrations: AUTOPAR_CACHE, or `autopar` in the user's cache folder."""
    if folder := os.environ.get(CACHE):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"


def _key(hosts: Sequence[str], backend: str, device_type: str) -> str:
    """A file's name for what a calibration depends on: hosts, ranks on each, devices, backend and torch's version."""
    of_ranks = [(host_name(host), sorted(set(hosts), key=hosts.index).index(host)) for host in hosts]
    device = device_name(torch.device(device_type))
    text = json.dumps([of_ranks, backend, device, torch.__version__])
    return f"{backend.split(':')[-1]}-{len(hosts)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _named() -> Cluster | None:
    if not (name := os.environ.get(CLUSTER)):
        return None
    try:
        return load_cluster(name)
    except (ValueError, OSError) as error:
        raise AutoparError(f"{CLUSTER}={name!r} cannot be used: {error}; set it to another one, or unset it") from error


def _saved(path: Path) -> Cluster | None:
    """The cluster of the file; None if there is none, or another version wrote it."""
    try:
        return cluster_from_json(path.read_text())
    except (ValueError, OSError):
        return None


def _measured(mesh: DeviceMesh, effort: Effort, path: Path) -> Cluster:
    """A calibration by all ranks of the world, saved by the first; the preset if the hosts cannot be calibrated."""
    if is_first(mesh):
        warn(
            f"no calibration of these {mesh.size()} ranks is saved: measuring them for some seconds, once; it is saved"
            f" in {path}. A preset, as cluster='h100', or the environment variable {CLUSTER} does without"
        )
    devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), status(after_s=2.0) as tell:
            fitted = calibrate(effort=effort, tell=tell)
    except PeerFailed:
        raise
    except AutoparError as error:
        warn(f"{error}; plans are made for the preset of these devices until then")
        return load_cluster(preset_of(mesh.device_type))
    if is_first(mesh):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save(fitted.cluster, path)
        except (AutoparError, OSError) as error:
            warn(f"the calibration is measured again next time: {error}; {CACHE} names another folder")
    return fitted.cluster
