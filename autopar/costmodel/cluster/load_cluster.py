"""`load_cluster`: a cluster by name or file; `preset_of`: the name for the devices at hand."""

from os import PathLike
from pathlib import Path

import torch

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel, cluster_from_json
from autopar.costmodel.cluster.presets import PRESETS
from autopar.errors import AutoparError

__all__ = ["Cluster", "LinkLevel", "cluster_from_json", "load_cluster", "preset_of"]


def load_cluster(spec: Cluster | str | PathLike) -> Cluster:
    """The cluster of `spec`: a `Cluster`, the name of a preset, or the path of a JSON file.

    ValueError lists the presets if it is none of these, and names a file that `Cluster.to_json` has not written.
    """
    if isinstance(spec, Cluster):
        return spec
    if str(spec) in PRESETS:
        return PRESETS[str(spec)]
    path = Path(spec)
    if not path.is_file():
        raise ValueError(
            f"no cluster {str(spec)!r}: expected the path of a JSON file or one of {', '.join(sorted(PRESETS))}"
        )
    try:
        return cluster_from_json(path.read_text())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a cluster: expected JSON text, found other bytes ({error.reason})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def preset_of(device_type: str) -> str:
    """The name of the preset of this process's devices; AutoparError if there is none."""
    if device_type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name()
    for key, preset in {"H100": "h100", "H200": "h100", "A100": "a100", "V100": "v100", "P100": "p100"}.items():
        if key in name:
            return preset
    raise AutoparError(f"no cluster preset for {name!r}; pass cluster= (a preset's name, a JSON file or a Cluster)")
