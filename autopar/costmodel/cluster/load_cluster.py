"""`load_cluster`: a cluster by name or file."""

from os import PathLike
from pathlib import Path

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel, cluster_from_json
from autopar.costmodel.cluster.presets import PRESETS

__all__ = ["Cluster", "LinkLevel", "cluster_from_json", "load_cluster"]


def load_cluster(spec: Cluster | str | PathLike) -> Cluster:
    """The cluster of `spec`: a `Cluster`, the name of a preset, or the path of a JSON file.

    ValueError lists the presets if it is none of these.
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
    return cluster_from_json(path.read_text())
