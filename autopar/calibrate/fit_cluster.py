"""`fit_cluster`: the `Cluster` that timings show, and how far its prices are from each of them.

Each term is fitted as docs/cost_model.md says, by the formulas that price plans: `shapes_time` for ops,
`collective_times` for collectives, both with the term left out.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from statistics import mean, median

import numpy as np

from autopar.calibrate.line_fit import Line, fit_bent
from autopar.calibrate.link_levels import host_name
from autopar.calibrate.measure import Measured, OnRank
from autopar.calibrate.probe_ops import OpTime, UpdateTime
from autopar.calibrate.slowest_host import runs_alike, slow_hosts, slowest_of
from autopar.calibrate.time_links import CollectiveTime, Groups
from autopar.costmodel.cluster.device_groups import joined
from autopar.costmodel.cluster.hardware import ALGORITHMS, Cluster, LinkLevel
from autopar.costmodel.cluster.measured_terms import Calibration, GroupRate, MemoryShare, ProductShare
from autopar.costmodel.collective_time import collective_times
from autopar.costmodel.memory import update_time
from autopar.costmodel.roofline import is_aligned, least_reuse, op_flops, shapes_time
from autopar.costmodel.stage_transfer import transfer
from autopar.ir.graph import Op
from autopar.ir.op_facts import family

_LEAST_REST = 0.2  # of a time, once the fixed cost of its kernels is taken off
_OFFSET_BYTES = 2.0**30  # where a formula's latency no longer shows
_LEAST_BETA = 1e-13  # seconds a byte, fewer than any link's: a line whose slope noise hides has this
# Of collectives over several link levels: NCCL's own (its documentation, NCCL_ALGO); gloo's ring, or level by level by
# the runtime (`sbp.nested`).
_ALGORITHMS_OF = {"gloo": ("ring", "nested"), "nccl": ("ring", "tree")}
_WITHOUT_LINKS = (LinkLevel(0, 0.0, float("inf")),)


@dataclass(frozen=True, slots=True)
class Point:
    """A measured time and the fitted cluster's price of it. `term`: what was timed; `at`: bytes or flops of it."""

    term: str
    at: float
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        """|fitted / measured - 1|."""
        return abs(self.fitted_s / self.measured_s - 1)


@dataclass(frozen=True)
class Fitted:
    """A cluster, whose devices are all as fast as the slowest host's, and the points that it was fitted to.

    `slow_hosts`: host -> its compute times over the fastest one's, of those slower by more than the fit's error.
    `groups`: where there are some, the cluster of a group of devices for each run of hosts that are alike.
    """

    cluster: Cluster
    points: tuple[Point, ...]
    slow_hosts: Mapping[str, float]
    groups: Cluster | None = None


def fit_cluster(measured: Measured, name: str, device_type: str, backend: str, levels: tuple[LinkLevel, ...]) -> Fitted:
    """The cluster of these timings; `levels` are those of its links where none were timed."""
    devices = _devices(slowest_of(measured), name, device_type, backend)
    levels = _levels(measured, devices) if measured.links else levels
    num_ranks = len(measured.hosts)
    cluster, points = _with_origin(devices, levels, measured, num_ranks, backend)
    assert cluster.calibration is not None, "the cluster has its origin"
    error = cluster.calibration.fit_error
    members, of_hosts = [], list(dict.fromkeys(measured.hosts))
    for part in runs_alike(measured, error):
        own = _devices(slowest_of(part), f"{name} of host {of_hosts.index(part.hosts[0])}", device_type, backend)
        members.append((len(part.hosts), _with_origin(own, levels, part, num_ranks, backend)[0]))
    groups = joined(members, levels[-1]) if len(members) > 1 else None
    return Fitted(cluster, points, slow_hosts(measured, error), groups)


def _devices(ranks: OnRank, name: str, device_type: str, backend: str) -> Cluster:
    """The cluster of devices of these timings, without links."""
    bare = replace(_bare(name, device_type, ranks), algorithms=_ALGORITHMS_OF.get(backend, ALGORITHMS))
    devices = replace(bare, product_shares=_product_shares(ranks, bare), memory_shares=_memory_shares(ranks, bare))
    devices = replace(devices, unaligned_shares=_unaligned_shares(ranks, devices))
    update_s, updates = _update_shares(ranks.updates, bare)
    return replace(devices, memory_shares=(*devices.memory_shares, *updates), update_s=update_s)


def _with_origin(
    devices: Cluster, levels: tuple[LinkLevel, ...], measured: Measured, num_ranks: int, backend: str
) -> tuple[Cluster, tuple[Point, ...]]:
    """The cluster with its links and its origin, and the points of `measured`. `num_ranks`: on the links."""
    cluster = replace(devices, levels=levels, overlap=measured.overlap, shared_cores=measured.shared_cores)
    of_links = _points_of_links(measured.links, cluster, num_ranks)
    points = (*_points_of_ops(slowest_of(measured), cluster), *of_links)
    origin = _origin(measured, points, backend)
    return replace(cluster, calibration=origin, source=_source(origin)), points


def _bare(name: str, device_type: str, ranks: OnRank) -> Cluster:
    """The cluster with the fixed cost of a kernel and the rates of the largest products and of `add`."""
    start = Cluster(
        name, _WITHOUT_LINKS, {"float32": 1.0}, 1.0, ranks.memory_bytes, "measured", device_type=device_type
    )
    kernel_s = median(
        [timed.forward_s for timed in ranks.tiny] + [timed.backward_s for timed in ranks.tiny if timed.backward_s]
    )
    start = replace(start, kernel_s=kernel_s, fresh_s_per_byte=ranks.fresh_s_per_byte, flops_per_s={"float32": 1e30})
    family_of_all = family(ranks.memory_bound[0].op.target)
    adds = [timed for timed in ranks.memory_bound if family(timed.op.target) == family_of_all]
    bandwidth = median(_formula(timed.op, start)[0] / _rest(timed.forward_s, kernel_s) for timed in adds)
    start = replace(start, memory_bandwidth_bytes_per_s=bandwidth, host_bandwidth_bytes_per_s=ranks.copy_bytes_per_s)
    rates = {dtype: _rate(timed, start) for dtype, timed in ranks.products.items()}
    if ranks.float8_flops_per_s:
        rates |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), ranks.float8_flops_per_s)
    return replace(start, flops_per_s=rates)


def _formula(op: Op, cluster: Cluster) -> tuple[float, float]:
    """Seconds of forward and backward by the roofline, without the cost of kernels."""
    shapes = tuple(value.shape for value in op.inputs), tuple(value.shape for value in op.outputs)
    return shapes_time(op, *shapes, replace(cluster, kernel_s=0.0))


def _kernels(op: Op, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the kernels of forward and backward."""
    shapes = tuple(value.shape for value in op.inputs), tuple(value.shape for value in op.outputs)
    both = zip(shapes_time(op, *shapes, cluster), _formula(op, cluster))
    forward_s, backward_s = (with_kernels - without for with_kernels, without in both)
    return forward_s, backward_s


def _rest(seconds: float, kernels_s: float) -> float:
    return max(seconds - kernels_s, _LEAST_REST * seconds)


def _product_s(timed: OpTime, cluster: Cluster) -> float:
    """Seconds of a product, forward and backward, without the cost of kernels."""
    return _rest(timed.forward_s + timed.backward_s, sum(_kernels(timed.op, cluster)))


def _product_formula(timed: OpTime, cluster: Cluster) -> float:
    """Seconds of a product by its flops alone, forward and backward."""
    return sum(_formula(timed.op, replace(cluster, memory_bandwidth_bytes_per_s=1e30)))


def _reuse(op: Op) -> float:
    inputs, outputs = tuple(value.shape for value in op.inputs), tuple(value.shape for value in op.outputs)
    return least_reuse(inputs, outputs, op_flops(op, inputs, outputs))


def _rate(timed: Sequence[OpTime], cluster: Cluster) -> float:
    """Flop/s of the products of matrices with the largest smallest dim."""
    plain = [each for each in timed if family(each.op.target) == "aten.linear" and _has_whole_rows(each.op)]
    largest = max(_reuse(each.op) for each in plain)
    at_one = replace(cluster, flops_per_s={"float32": 1.0})
    return median(
        _product_formula(each, at_one) / _product_s(each, cluster) for each in plain if _reuse(each.op) == largest
    )


def _product_shares(ranks: OnRank, bare: Cluster) -> tuple[ProductShare, ...]:
    shares: dict[tuple[str, str, float], list[tuple[float, float]]] = defaultdict(list)
    no_bytes = replace(bare, memory_bandwidth_bytes_per_s=1e30)
    for dtype, products in ranks.products.items():
        for timed in filter(lambda each: _has_whole_rows(each.op), products):
            kind = family(timed.op.target)
            measured_s = zip((timed.forward_s, timed.backward_s), _kernels(timed.op, bare))
            rest_s = [_rest(seconds, kernels_s) for seconds, kernels_s in measured_s]
            forward, backward = (by_flops / by_time for by_flops, by_time in zip(_formula(timed.op, no_bytes), rest_s))
            shares["" if kind == "aten.linear" else kind, dtype, _reuse(timed.op)].append((forward, backward))
    return tuple(
        ProductShare(median(x for x, _ in of), reuse, dtype, op, median(x for _, x in of))
        for (op, dtype, reuse), of in sorted(shares.items())
    )


def _unaligned_shares(ranks: OnRank, devices: Cluster) -> dict[str, float]:
    """Of each dtype the time of a product if its rows were whole units of 16 bytes over its time."""
    return {
        dtype: min(1.0, median(_product_formula(timed, devices) / _product_s(timed, devices) for timed in odd))
        for dtype, products in ranks.products.items()
        if (odd := [timed for timed in products if not _has_whole_rows(timed.op)])
    }


def _has_whole_rows(op: Op) -> bool:
    return is_aligned(op, tuple(value.shape for value in op.inputs), tuple(value.shape for value in op.outputs))


def _memory_shares(ranks: OnRank, bare: Cluster) -> tuple[MemoryShare, ...]:
    """Shares by op, and by dtype where several were timed: those of the last are of all dtypes without rows."""
    by_op: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    usual_dtype = ranks.memory_bound[-1].op.inputs[0].dtype
    for timed in ranks.memory_bound:
        forward_s, backward_s = _formula(timed.op, bare)
        forward_k, backward_k = _kernels(timed.op, bare)
        forward = forward_s / _rest(timed.forward_s, forward_k)
        backward = backward_s / _rest(timed.backward_s, backward_k) if timed.backward_s else 1.0
        dtype = timed.op.outputs[0].dtype
        name = "" if dtype == usual_dtype else str(dtype).removeprefix("torch.")
        by_op[family(timed.op.target), name].append((forward, backward))
    rows = [
        MemoryShare(op, median(forward for forward, _ in of), median(backward for _, backward in of), dtype)
        for (op, dtype), of in by_op.items()
    ]
    usual = MemoryShare("", median(row.forward for row in rows), median(row.backward for row in rows))
    return (usual, *rows)


def _update_shares(updates: Iterable[UpdateTime], bare: Cluster) -> tuple[float, list[MemoryShare]]:
    """(the fixed seconds of updating a parameter, those of the smallest; the shares that the larger ones reach)."""
    points = sorted((_updated_bytes(update), update.seconds / update.num_parameters) for update in updates)
    (_, update_s), *larger = points
    shares = []
    for num_bytes, seconds in larger:
        share = num_bytes / bare.memory_bandwidth_bytes_per_s / _rest(seconds, update_s)
        shares.append(MemoryShare("update", share, num_bytes=num_bytes))
    return update_s, shares


def _updated_bytes(update: UpdateTime) -> float:
    """Reads and writes the parameter and two states, reads the gradient."""
    return 7.0 * update.num_bytes


def _levels(measured: Measured, devices: Cluster) -> tuple[LinkLevel, ...]:
    """The link levels with their rates: those of sends, then what each kind of collective reaches beside them."""
    lines: dict[tuple[str, Groups], Line] = {}
    for kind, groups in dict.fromkeys((timed.kind, timed.groups) for timed in measured.links):
        of = [timed for timed in measured.links if (timed.kind, timed.groups) == (kind, groups)]
        line = fit_bent([t.num_bytes for t in of], [t.seconds for t in of])
        lines[kind, groups] = replace(line, beta_s_per_byte=max(line.beta_s_per_byte, _LEAST_BETA))
    levels, inside = [], 1
    for size in measured.level_sizes:
        on_level = {
            key: line for key, line in lines.items() if key[1].stride == inside and key[1].block == inside * size
        }
        levels.append(_level(size, inside, on_level, devices, len(measured.hosts)))
        inside *= size
    return tuple(levels)


def _level(
    size: int, inside: int, lines: Mapping[tuple[str, Groups], Line], devices: Cluster, num_ranks: int
) -> LinkLevel:
    if size == 1:
        return LinkLevel(1, 0.0, float("inf"))
    sent = next(line for (kind, _), line in lines.items() if kind == "p2p")
    bandwidth = 1 / sent.beta_s_per_byte
    # the latency of a hop, as small as that of any collective, so that what is left is a base latency and not below 0
    unit = (LinkLevel(inside, 0.0, float("inf")),) * (inside > 1) + (LinkLevel(size, 1.0, float("inf")),)
    at_one = replace(devices, levels=unit)
    hops = {key: 1.0 if key[0] == "p2p" else _price(at_one, key[0], key[1], 0.0, num_ranks) for key in lines}
    latency_s = min(line.alpha_s / hops[key] for key, line in lines.items())
    reach = replace(devices, levels=(*unit[:-1], LinkLevel(size, 0.0, bandwidth)))
    rates = []
    for (kind, groups), line in lines.items():
        beta = 1 / bandwidth if kind == "p2p" else _price(reach, kind, groups, _OFFSET_BYTES, num_ranks) / _OFFSET_BYTES
        base_s = max(0.0, line.alpha_s - latency_s * hops[kind, groups])  # rounding may leave less than nothing
        rates.append(GroupRate(groups.size, beta / line.beta_s_per_byte, base_s, kind, line.least_s))
    return LinkLevel(size, latency_s, bandwidth, tuple(rates))


def _price(cluster: Cluster, kind: str, groups: Groups, num_bytes: float, num_ranks: int) -> float:
    """Seconds that the cluster's prices give the collective in these groups."""
    if kind == "p2p":
        return transfer(cluster, 2, groups.stride).send_s(num_bytes) if groups.block > groups.stride else 0.0
    mesh_shape = num_ranks // (groups.size * groups.stride), groups.size, groups.stride
    return float(collective_times(cluster, mesh_shape, (1,), kind, np.float64(num_bytes)))


def _points_of_ops(ranks: OnRank, cluster: Cluster) -> Iterator[Point]:
    timed_ops = [*(timed for products in ranks.products.values() for timed in products), *ranks.memory_bound]
    for timed in timed_ops:
        shapes = tuple(value.shape for value in timed.op.inputs), tuple(value.shape for value in timed.op.outputs)
        flops = op_flops(timed.op, *shapes)
        work = flops or float(sum(value.num_bytes for value in (*timed.op.inputs, *timed.op.outputs)))
        dtype = f" {timed.op.outputs[0].dtype}".replace("torch.", "") if flops else ""
        reuse = f" of reuse {_reuse(timed.op):g}" if flops else ""
        fitted = shapes_time(timed.op, *shapes, cluster)
        yield Point(f"{family(timed.op.target)}{dtype}{reuse}", work, timed.forward_s + timed.backward_s, sum(fitted))
    for update in ranks.updates:
        total, one_s = update.num_parameters * _updated_bytes(update), update_time(_updated_bytes(update), cluster)
        yield Point("update", total, update.seconds, update.num_parameters * one_s)


def _points_of_links(links: Iterable[CollectiveTime], cluster: Cluster, num_ranks: int) -> Iterator[Point]:
    for timed in links:
        fitted = _price(cluster, timed.kind, timed.groups, float(timed.num_bytes), num_ranks)
        where = f"{timed.groups.size} ranks, {timed.groups.stride} apart"
        yield Point(f"{timed.kind} among {where}", float(timed.num_bytes), timed.seconds, fitted)


def telling(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that can be off: a term timed at one point alone is fitted to it and shows no error."""
    counts = Counter(point.term for point in points)
    return tuple(point for point in points if counts[point.term] > 1)


def _origin(measured: Measured, points: Sequence[Point], backend: str) -> Calibration:
    errors = [point.error for point in telling(points)]
    return Calibration(
        measured.date,
        backend if measured.links else "",
        mean(errors),
        max(errors),
        {name: version(name) for name in ("autopar", "torch")},
        tuple(dict.fromkeys(map(host_name, measured.hosts))),
        len(measured.hosts),
    )


def _source(origin: Calibration) -> str:
    where = ", ".join(origin.hosts[:3]) + (f" and {len(origin.hosts) - 3} more" if len(origin.hosts) > 3 else "")
    return f"calibrated {origin.date} on {where} with {origin.num_ranks} rank{'s' * (origin.num_ranks > 1)}"
