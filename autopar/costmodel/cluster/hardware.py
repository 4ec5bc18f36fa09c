"""`Cluster`: the figures of the hardware: rates of a device, and link levels from the inside of a node outwards."""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from autopar.costmodel.cluster.attention_kernel import ANY, FUSED
from autopar.costmodel.cluster.measured_terms import Calibration, GroupRate, MemoryShare, ProductShare, SharedCores
from autopar.errors import MeshError, PlanError

# Of the JSON that `Cluster.to_json` writes; text without a version is of the first.
VERSION = 1
ALGORITHMS = ("ring", "nested", "tree")
_KINDS = ("", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


@dataclass(frozen=True, slots=True)
class LinkLevel:
    """A link level that joins `size` children (devices, or blocks of the level inside).

    `size` 0: as many as needed, for the outermost level only.

    `bandwidth_bytes_per_s` is one direction of one device's fair share: a node's only network card of 12.5 GB/s that
    eight devices share gives each 1.56 GB/s. `latency_s`: of one hop. `group_rates`: what groups of some sizes reach
    on this level where that differs, as a pair in a hybrid NVLink mesh, joined by one or two of a device's six links.
    """

    size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    group_rates: tuple[GroupRate, ...] = ()


@dataclass(frozen=True)
class DeviceGroups:
    """The groups of a cluster whose devices differ: (number of devices, their cluster), in the order of ranks.

    `link`: of a device of one group to one of another; its size is 0. `seen`: the index of the group whose devices the
    cluster's own figures are of; -1: none is chosen, and nothing can be priced. `reordered_from`: the name of the
    cluster whose ranks have the groups in another order (`device_groups.orders`); "": this is the order of the ranks.
    """

    members: tuple[tuple[int, "Cluster"], ...]
    link: LinkLevel
    seen: int = -1
    reordered_from: str = ""


@dataclass(frozen=True)
class Cluster:
    """The hardware that a plan is made for.

    `levels`: from the inside out; ranks fill the innermost level first. `flops_per_s`: dtype name ("bfloat16") -> rate;
    it must have "float32", which is used for all missing dtypes. `kind_factors`: kind of collective -> measured time
    over formula, 1 if absent. `host_bandwidth_bytes_per_s`: one direction of one device's fair share of the link to the
    host's memory; 0: not known, nothing is offloaded. `source`: the origin of the figures. `device_type`: "cpu", or
    that of a GPU, by which ops choose kernels with other saved tensors.

    Rates are what all ranks of a host reach at the same time: of processes that share cores each has its part, and more
    while others wait (`shared_cores`), as the ranks of a pipeline do. Terms that are nothing unless they were measured:
    `kernel_s`, fixed seconds of a kernel (launch, dispatch); `update_s`, fixed seconds of updating one parameter;
    `fresh_s_per_byte`, seconds for each byte of a new tensor that is too large for the host's allocator to keep
    (`fresh_s`); `algorithms`, of which the backend takes the fastest ("nested": level by level); `product_shares` of
    flops_per_s and `memory_shares` of the memory bandwidth that ops reach; `unaligned_shares`, dtype name -> share that
    products of matrices reach of that if rows of an operand or of the result are no whole units of 16 bytes, as tensor
    cores read them (NVIDIA, Matrix Multiplication Background); `LinkLevel.group_rates`; `calibration`, the origin of
    measured terms. `attention_kernels`: the fused ones that the device has ("flash", "efficient"); attention that none
    takes is written out. (): not known, all is fused. `overlap`: the share of a collective's time in which devices
    compute at their full rate meanwhile, if nothing waits for it.
    `groups`: of devices that differ (`device_groups.joined`); all other figures are then those of one of the groups.
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
    kernel_s: float = 0.0
    update_s: float = 0.0
    fresh_s_per_byte: float = 0.0
    algorithms: tuple[str, ...] = ALGORITHMS
    product_shares: tuple[ProductShare, ...] = ()
    memory_shares: tuple[MemoryShare, ...] = ()
    unaligned_shares: Mapping[str, float] = field(default_factory=dict)
    calibration: Calibration | None = None
    attention_kernels: tuple[str, ...] = ()
    overlap: float = 0.0
    shared_cores: SharedCores | None = None
    groups: DeviceGroups | None = None

    def __post_init__(self) -> None:
        _check(self)

    def __hash__(self) -> int:  # mappings have none; numbers have the same in every process
        return hash((self.memory_bytes, self.memory_bandwidth_bytes_per_s, self.kernel_s, self.overlap))

    @property
    def num_devices(self) -> float:
        """The number of devices; infinity if the outermost level is unbounded."""
        if self.groups is not None:
            return sum(count for count, _ in self.groups.members)
        return math.prod(level.size or math.inf for level in self.levels)

    def peak_flops_per_s(self, dtype: torch.dtype) -> float:
        """Flop/s of products of `dtype`; where it was not measured that of float32, of float8 that of bfloat16.

        PlanError for float8 on GPUs that are not known to have such products.
        """
        name = str(dtype).removeprefix("torch.")
        if name.startswith("float8") and name not in self.flops_per_s:
            if self.device_type == "cuda" and self.calibration is None:
                raise PlanError(
                    f"cluster {self.name!r}: the model has products of {name}, found rates of"
                    f" {', '.join(self.flops_per_s)}; take devices that have such products (h100), give"
                    f" flops_per_s[{name!r}] in the cluster's file, or keep the layers in bfloat16"
                )
            name = "bfloat16"
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

    def fresh_s(self, num_bytes: float) -> float:
        """Seconds that the system takes to give a new tensor of so many bytes its memory, page by page.

        Of `FRESH_BYTES` or more glibc gives memory back at once, and asks for it anew (mallopt(3), M_MMAP_THRESHOLD);
        of less, and on GPUs, allocators keep it.
        """
        return num_bytes * self.fresh_s_per_byte if num_bytes >= FRESH_BYTES else 0.0

    def at_best(self) -> "Cluster":
        """The cluster whose ops reach, at any size, the largest share that their family reaches at some size.

        Attention is fused or written out, whichever is faster, and rows of any size are whole units.

        No split of an op is faster on it than an equal part of the whole op; new memory takes no time.
        """
        best: dict[tuple[str, str], ProductShare] = {}
        for row in self.product_shares:
            others = best.get((row.op, row.dtype), row)
            forward, backward = map(max, zip(row.shares, others.shares))
            best[row.op, row.dtype] = replace(row, share=forward, backward=backward)
        in_memory: dict[tuple[str, str], MemoryShare] = {}
        for row in self.memory_shares:
            others = in_memory.get((row.op, row.dtype), row)
            forward, backward = max(row.forward, others.forward), max(row.backward, others.backward)
            in_memory[row.op, row.dtype] = replace(row, forward=forward, backward=backward)
        return replace(
            self,
            product_shares=tuple(best.values()),
            memory_shares=tuple(in_memory.values()),
            unaligned_shares={},
            attention_kernels=(ANY,) if self.attention_kernels else (),
            fresh_s_per_byte=0.0,
        )

    def to_json(self) -> str:
        """The cluster as JSON that `cluster_from_json` reads; terms that are nothing are left out."""
        if self.groups is not None:
            return json.dumps(self._groups_content(self.groups), indent=2)
        content: dict[str, Any] = {"version": VERSION, **asdict(self)}
        levels = [{key: item for key, item in level.items() if item != ()} for level in content["levels"]]
        nothing: tuple[Any, ...] = (0.0, (), {}, None, ALGORITHMS)
        kept = {key: item for key, item in content.items() if key not in _TERMS or item not in nothing}
        return json.dumps(kept | {"levels": levels}, indent=2)

    def _groups_content(self, groups: DeviceGroups) -> dict[str, Any]:
        """The content that `device_groups.groups_from` reads: the figures of all groups, whichever is seen."""
        members = [{"num_devices": count, "cluster": json.loads(one.to_json())} for count, one in groups.members]
        link = {key: item for key, item in asdict(groups.link).items() if key != "size" and item != ()}
        content = {"version": VERSION, "name": self.name, "groups": members, "link": link}
        return content | ({"reordered_from": groups.reordered_from} if groups.reordered_from else {})


# The fields that `to_json` leaves out if they are nothing.
_TERMS = ("kernel_s", "update_s", "fresh_s_per_byte", "overlap", "algorithms", "product_shares", "memory_shares") + (
    "unaligned_shares",
    "groups",
    "shared_cores",
    "calibration",
    "attention_kernels",
)

# The bytes from which on glibc's allocator keeps no memory on hosts of 64 bits: DEFAULT_MMAP_THRESHOLD_MAX.
FRESH_BYTES = 2**25
# Bounds of rates, beyond those of any device, within which times are finite numbers.
_LEAST, _MOST, _MOST_DEVICES = 1e-9, 1e30, 2**40


def _check(cluster: Cluster) -> None:
    for field_name in ("name", "source", "device_type"):
        if type(getattr(cluster, field_name)) is not str:
            raise ValueError(
                f"cluster: expected text as {field_name}, found {reprlib.repr(getattr(cluster, field_name))}"
            )
    _check_terms(cluster)
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


def _check_terms(cluster: Cluster) -> None:
    """ValueError for a text of a term that is none, or an unknown kind of collective."""
    origin, known = cluster.calibration, set(cluster.algorithms) <= set(ALGORITHMS)
    if not known or not {"ring", "nested"} & set(cluster.algorithms):  # a tree is of all-reduces alone
        expected = f"some of {', '.join(ALGORITHMS)} as algorithms, ring or nested among them"
        found = reprlib.repr(cluster.algorithms)
        raise ValueError(f"cluster {cluster.name!r}: expected {expected}, found {found}")
    if not set(cluster.attention_kernels) <= {*FUSED, ANY}:
        found = reprlib.repr(cluster.attention_kernels)
        raise ValueError(
            f"cluster {cluster.name!r}: expected some of {', '.join(FUSED)} as attention_kernels, found {found}"
        )
    texts = {"dtype of product_shares": [row.dtype for row in cluster.product_shares]}
    texts |= {"op of product_shares": [row.op for row in cluster.product_shares]}
    texts |= {"op of memory_shares": [row.op for row in cluster.memory_shares]}
    texts |= {"dtype of memory_shares": [row.dtype for row in cluster.memory_shares]}
    if origin is not None:
        texts |= {"date and backend of calibration": [origin.date, origin.backend], "hosts": list(origin.hosts)}
        texts |= {"versions of calibration": [*origin.versions, *origin.versions.values()]}
    for place, items in texts.items():
        if wrong := [item for item in items if type(item) is not str]:
            raise ValueError(f"cluster {cluster.name!r}: expected text as {place}, found {reprlib.repr(wrong[0])}")
    for number, level in enumerate(cluster.levels):
        for rate in level.group_rates:
            if rate.kind not in _KINDS or type(rate.size) is not int:
                expected = f"a whole size and a kind of {', '.join(map(repr, _KINDS))}"
                place = f"group_rates of level {number}"
                raise ValueError(
                    f"cluster {cluster.name!r}: expected {expected} in {place}, found {reprlib.repr(rate)}"
                )


def _numbers(cluster: Cluster) -> Iterator[tuple[str, Any, float, float]]:
    """(field, value, least, most) of every number; links may be infinitely fast."""
    for number, level in enumerate(cluster.levels):
        yield f"latency_s of level {number}", level.latency_s, 0.0, _MOST
        yield f"bandwidth_bytes_per_s of level {number}", level.bandwidth_bytes_per_s, _LEAST, math.inf
    yield from ((f"flops_per_s of {key!r}", rate, _LEAST, _MOST) for key, rate in cluster.flops_per_s.items())
    yield from ((f"kind_factors of {key!r}", factor, 0.0, _MOST) for key, factor in cluster.kind_factors.items())
    yield from ((f"unaligned_shares of {key!r}", x, _LEAST, _MOST) for key, x in cluster.unaligned_shares.items())
    yield "memory_bandwidth_bytes_per_s", cluster.memory_bandwidth_bytes_per_s, _LEAST, _MOST
    yield "memory_bytes", cluster.memory_bytes, 1, _MOST
    way = cluster.host_bandwidth_bytes_per_s
    yield "host_bandwidth_bytes_per_s (0: unknown)", way, _LEAST if way else 0.0, _MOST
    yield from _numbers_of_terms(cluster)


def _numbers_of_terms(cluster: Cluster) -> Iterator[tuple[str, Any, float, float]]:
    yield "kernel_s", cluster.kernel_s, 0.0, _MOST
    yield "update_s", cluster.update_s, 0.0, _MOST
    yield "fresh_s_per_byte", cluster.fresh_s_per_byte, 0.0, _MOST
    yield "overlap", cluster.overlap, 0.0, 1.0
    for number, level in enumerate(cluster.levels):
        for rate in level.group_rates:
            place = f"group_rates of level {number}"
            yield f"size of {place}", rate.size, 2, _MOST_DEVICES
            yield f"bandwidth_share of {place}", rate.bandwidth_share, _LEAST, _MOST
            yield f"base_latency_s of {place}", rate.base_latency_s, 0.0, _MOST
            yield f"least_s of {place}", rate.least_s, 0.0, _MOST
    for product in cluster.product_shares:
        yield "share of product_shares", product.share, _LEAST, _MOST
        yield "reuse of product_shares", product.reuse, _LEAST, _MOST
        yield "backward of product_shares", product.backward, _LEAST if product.backward else 0.0, _MOST
    for row in cluster.memory_shares:
        yield f"forward of memory_shares {row.op!r}", row.forward, _LEAST, _MOST
        yield f"backward of memory_shares {row.op!r}", row.backward, _LEAST, _MOST
        yield f"num_bytes of memory_shares {row.op!r}", row.num_bytes, _LEAST, _MOST
    if cluster.shared_cores is not None:
        yield "num_ranks of shared_cores", cluster.shared_cores.num_ranks, 1, _MOST_DEVICES
        yield "speedup of shared_cores", cluster.shared_cores.speedup, 1.0, _MOST
    if cluster.calibration is not None:
        yield "fit_error of calibration", cluster.calibration.fit_error, 0.0, _MOST
        yield "worst_error of calibration", cluster.calibration.worst_error, 0.0, _MOST
        yield "num_ranks of calibration", cluster.calibration.num_ranks, 1, _MOST_DEVICES


def cluster_from_json(text: str) -> Cluster:
    """The cluster that `Cluster.to_json` wrote; ValueError for other text, or that of another version."""
    try:
        fields = json.loads(text)
        if type(fields) is not dict:
            raise TypeError(f"{reprlib.repr(fields)} in place of an object")
        version = fields.pop("version", VERSION)
        if version == VERSION:
            levels = tuple(map(level_of, fields.pop("levels")))
            fields |= _rows(fields, product_shares=ProductShare, memory_shares=MemoryShare)
            fields |= {"algorithms": tuple(fields.get("algorithms", ALGORITHMS))}
            fields |= {"attention_kernels": tuple(fields.get("attention_kernels", ()))}
            if origin := fields.get("calibration"):
                hosts = origin.get("hosts", [])
                if type(hosts) is not list:
                    raise TypeError(f"{reprlib.repr(hosts)} in place of a list as hosts of calibration")
                fields["calibration"] = Calibration(**origin | {"hosts": tuple(hosts)})
            if cores := fields.get("shared_cores"):
                fields["shared_cores"] = SharedCores(**cores)
            return Cluster(levels=levels, **fields)
    except (json.JSONDecodeError, RecursionError, TypeError, KeyError, AttributeError) as error:
        found = f"no field {error}" if isinstance(error, KeyError) else error if text.strip() else "nothing"
        raise ValueError(f"not a cluster: expected the JSON that Cluster.to_json writes, found {found}") from error
    raise ValueError(
        f"a cluster of another version: expected {VERSION}, found {reprlib.repr(version)}; calibrate again with this"
        " autopar"
    )


def level_of(fields: dict[str, Any]) -> LinkLevel:
    """The link level of its JSON object; TypeError for other fields."""
    rates: dict[str, Any] = _rows(fields, group_rates=GroupRate)
    return LinkLevel(**fields | rates)


def _rows(fields: Mapping[str, Any], **kinds: type) -> dict[str, tuple]:
    """The lists among `fields` that are named by `kinds`, as tuples of rows of that kind."""
    return {name: tuple(kind(**row) for row in fields[name]) for name, kind in kinds.items() if name in fields}


def check_mesh(cluster: Cluster, num_devices: int) -> None:
    """MeshError if the mesh has more devices than the cluster, or is not of all its groups as one of them sees it."""
    if cluster.groups is not None and (num_devices != cluster.num_devices or cluster.groups.seen < 0):
        raise MeshError(
            f"cluster {cluster.name!r} has groups of devices that differ, {cluster.num_devices:.0f} devices together;"
            f" found a mesh of {num_devices}: take a mesh of all, in a plan that is searched or a hand plan without"
            " stages and microbatches"
        )
    if num_devices > cluster.num_devices:
        found = f"the mesh has {num_devices} devices, cluster {cluster.name!r} has {cluster.num_devices:.0f}"
        raise MeshError(f"{found}; take a smaller mesh or another cluster")
