"""`load_cluster`: a cluster by name or file; `given_cluster`: of a caller; `preset_of`: the name of what is here."""

import json
from os import PathLike
from pathlib import Path

import torch

from autopar.costmodel.cluster.device_groups import groups_from, parse_groups
from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.hardware import cluster_from_json as one_kind_from_json
from autopar.costmodel.cluster.presets import PRESETS
from autopar.errors import AutoparError

__all__ = ["Cluster", "LinkLevel", "cluster_from_json", "given_cluster", "load_cluster", "preset_of"]


def load_cluster(spec: Cluster | str | PathLike) -> Cluster:
    """The cluster of `spec`: a `Cluster`, the name of a preset, the path of a JSON file, or groups of these whose
    devices differ, "8 v100-25g + 8 p100", with "over 3.1GB/s" at the end to say what joins a device of one to that of
    another.

    ValueError lists the presets if it is none of these, and names a file that `Cluster.to_json` has not written.
    """
    if isinstance(spec, Cluster):
        return spec
    if str(spec) in PRESETS:
        return PRESETS[str(spec)]
    path = Path(spec)
    if not path.is_file():
        if (groups := parse_groups(str(spec), load_cluster)) is not None:
            return groups
        raise ValueError(
            f"no cluster {str(spec)!r}: expected the path of a JSON file or one of {', '.join(sorted(PRESETS))}"
        )
    try:
        return cluster_from_json(path.read_text())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a cluster: expected JSON text, found other bytes ({error.reason})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def cluster_from_json(text: str) -> Cluster:
    """The cluster that `Cluster.to_json` wrote, or {"groups": [{"num_devices": 8, "cluster": "v100-25g"}, ...], "link":
    {"latency_s": ..., "bandwidth_bytes_per_s": ...}} with clusters as objects or names; ValueError for other text.
    """
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        fields = None  # which the reader of one kind refuses
    if isinstance(fields, dict) and "groups" in fields:
        return groups_from(fields, _member)
    return one_kind_from_json(text)


def _member(spec: object) -> Cluster:
    """The cluster of a group in JSON."""
    if isinstance(spec, str) and spec in PRESETS:
        return PRESETS[spec]
    if not isinstance(spec, dict):
        raise ValueError(f"a group's cluster is an object or one of {', '.join(sorted(PRESETS))}, found {spec!r}")
    return one_kind_from_json(json.dumps(spec))


def preset_of(device_type: str) -> str:
    """The name of the preset of this process's devices; AutoparError if there is none."""
    if device_type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name()
    for key, preset in {"H100": "h100", "H200": "h100", "A100": "a100", "V100": "v100", "P100": "p100"}.items():
        if key in name:
            return preset
    raise AutoparError(f"no cluster preset for {name!r}; pass cluster= (a preset's name, a JSON file or a Cluster)")


def given_cluster(cluster: Cluster | str | PathLike | None, device_type: str | None) -> Cluster:
    """The cluster of a caller's `cluster=`, by default the preset of the devices of this type at hand; AutoparError if
    it cannot be used.
    """
    if cluster is None:
        if device_type is None:
            raise AutoparError(
                "the devices of this mesh are not known: give cluster= (a preset's name, a JSON file or a Cluster), or"
                " a DeviceMesh as mesh"
            )
        cluster = preset_of(device_type)
    try:
        return load_cluster(cluster)
    except (ValueError, TypeError, OSError) as error:
        raise AutoparError(f"cluster= cannot be used: {error}") from error
