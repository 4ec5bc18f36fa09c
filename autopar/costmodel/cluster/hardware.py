"""`Cluster`: the figures of the hardware: rates of a device, and link levels from the inside of a node outwards."""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from autopar.errors import MeshError, PlanError


@dataclass(frozen=True, slots=True)
class LinkLevel:
    """A link level that joins `size` children (devices, or blocks of the level inside).

    `size` 0: as many as needed, for the outermost level only.

    `bandwidth_bytes_per_s` is one direction of one device's fair share: a node's only network card of 12.5 GB/s that
    eight devices share gives each 1.56 GB/s.
    """

    size: int
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Cluster:
    """The hardware that a plan is made for.

    `levels`: from the inside out; ranks fill the innermost level first. `flops_per_s`: dtype name ("bfloat16") -> rate;
    it must have "float32", which is used for all missing dtypes. `kind_factors`: kind of collective -> measured time
    over formula, 1 if absent. `host_bandwidth_bytes_per_s`: one direction of one device's fair share of the link to the
    host's memory; 0: not known, nothing is offloaded. `source`: the origin of the figures. `device_type`: "cpu", or
    that of a GPU, by which ops choose kernels with other saved tensors.
    """

    name: str
    levels: tuple[LinkLevel, ...]
    flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    source: str
    kind_factors: Mapping[str, float] = field(default_factory=dict)
    host_bandwidth_bytes_per_s: float = 0.0
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_devices(self) -> float:
        """The number of devices; infinity if the outermost level is unbounded."""
        return math.prod(level.size or math.inf for level in self.levels)

    def peak_flops_per_s(self, dtype: torch.dtype) -> float:
        """Flop/s of products of `dtype`."""
        name = str(dtype).removeprefix("torch.")
        return self.flops_per_s.get(name, self.flops_per_s["float32"])

    @property
    def host_s_per_byte(self) -> float:
        """Seconds of copying a byte to the host's memory or back; PlanError if the bandwidth is not known."""
        if not self.host_bandwidth_bytes_per_s:
            raise PlanError(
                f"cluster {self.name!r}: the bandwidth to the host's memory is not known; give"
                " host_bandwidth_bytes_per_s"
            )
        return 1 / self.host_bandwidth_bytes_per_s

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


# Bounds of rates, beyond those of any device, within which times are finite numbers.
_LEAST, _MOST, _MOST_DEVICES = 1e-9, 1e30, 2**40


def _check(cluster: Cluster) -> None:
    for field_name in ("name", "source", "device_type"):
        if type(getattr(cluster, field_name)) is not str:
            raise ValueError(
                f"cluster: expected text as {field_name}, found {reprlib.repr(getattr(cluster, field_name))}"
            )
    sizes = [level.size for level in cluster.levels]
    is_whole = all(type(size) is int for size in sizes)
    if (
        not sizes
        or not is_whole
        or any(size < 1 for size in sizes[:-1])
        or sizes[-1] < 0
        or math.prod(sizes) > _MOST_DEVICES
    ):
        expected = f"link levels need positive sizes (the outermost may be 0, unbounded), up to {_MOST_DEVICES} devices"
        raise ValueError(f"cluster {cluster.name!r}: {expected}, found {reprlib.repr(sizes)}")
    for place, number, least, most in _numbers(cluster):
        if type(number) not in (int, float) or not (least <= number <= _MOST or number == most):
            expected = f"expected a number from {least:g} to {most:g}"
            raise ValueError(f"cluster {cluster.name!r}: {expected} as {place}, found {reprlib.repr(number)}")
    if "float32" not in cluster.flops_per_s:
        raise ValueError(
            f"cluster {cluster.name!r}: flops_per_s needs 'float32', found {reprlib.repr(dict(cluster.flops_per_s))}"
        )


def _numbers(cluster: Cluster) -> Iterator[tuple[str, Any, float, float]]:
    """(field, value, least, most) of every number; links may be infinitely fast."""
    for number, level in enumerate(cluster.levels):
        yield f"latency_s of level {number}", level.latency_s, 0.0, _MOST
        yield f"bandwidth_bytes_per_s of level {number}", level.bandwidth_bytes_per_s, _LEAST, math.inf
    yield from ((f"flops_per_s of {key!r}", rate, _LEAST, _MOST) for key, rate in cluster.flops_per_s.items())
    yield from ((f"kind_factors of {key!r}", factor, 0.0, _MOST) for key, factor in cluster.kind_factors.items())
    yield "memory_bandwidth_bytes_per_s", cluster.memory_bandwidth_bytes_per_s, _LEAST, _MOST
    yield "memory_bytes", cluster.memory_bytes, 1, _MOST
    way = cluster.host_bandwidth_bytes_per_s
    yield "host_bandwidth_bytes_per_s (0: unknown)", way, _LEAST if way else 0.0, _MOST


def cluster_from_json(text: str) -> Cluster:
    """The cluster that `Cluster.to_json` wrote; ValueError for other text."""
    try:
        fields = json.loads(text)
        levels = tuple(LinkLevel(**level) for level in fields.pop("levels"))
        return Cluster(levels=levels, **fields)
    except (json.JSONDecodeError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a cluster: expected the JSON that Cluster.to_json writes, found {error}") from error


def check_mesh(cluster: Cluster, num_devices: int) -> None:
    """MeshError if the mesh has more devices than the cluster."""
    if num_devices > cluster.num_devices:
        found = f"the mesh has {num_devices} devices, cluster {cluster.name!r} has {cluster.num_devices:.0f}"
        raise MeshError(f"{found}; take a smaller mesh or another cluster")
