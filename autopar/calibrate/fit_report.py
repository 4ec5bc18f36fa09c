"""`report`: a calibration as text for people."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from autopar.calibrate.fit_cluster import Fitted, Point, telling
from autopar.costmodel.cluster.hardware import FRESH_BYTES
from autopar.units import format_bytes, format_seconds

_NUM_WORST = 3


def report(fitted: Fitted) -> str:
    """Rates, links and the error of the fit: of all points, of each term, and the worst points."""
    return "\n".join(_lines(fitted))


def _lines(fitted: Fitted) -> Iterator[str]:
    cluster, origin = fitted.cluster, fitted.cluster.calibration
    assert origin is not None, "a fitted cluster tells its origin"
    yield f"{cluster.name}: {cluster.source}" + (f", links by {origin.backend}" if origin.backend else "")
    rates = ", ".join(f"{dtype} {rate / 1e9:.4g} Gflop/s" for dtype, rate in cluster.flops_per_s.items())
    yield f"  products {rates}; memory {cluster.memory_bandwidth_bytes_per_s / 1e9:.3g} GB/s"
    yield (
        f"  a kernel costs {format_seconds(cluster.kernel_s)}, updating a parameter {format_seconds(cluster.update_s)};"
        f" {format_bytes(cluster.memory_bytes)} of memory a rank"
    )
    if cluster.fresh_s_per_byte:
        large, gib_s = format_bytes(FRESH_BYTES), cluster.fresh_s_per_byte * 2**30
        yield f"  memory of new tensors of {large} or more: {format_seconds(gib_s)} a GiB"
    for number, level in enumerate(cluster.levels):
        if level.group_rates:
            latency = format_seconds(level.latency_s + level.group_rates[0].base_latency_s)
            rate = f"{level.bandwidth_bytes_per_s / 1e9:.3g} GB/s"
            yield f"  link level {number}: {level.size} x {rate}, a send {latency}"
    if fitted.groups is not None and fitted.groups.groups is not None:
        for count, one in fitted.groups.groups.members:
            rate, memory = one.flops_per_s["float32"] / 1e9, one.memory_bandwidth_bytes_per_s / 1e9
            error = one.calibration.fit_error if one.calibration else 0.0
            rates = f"products {rate:.4g} Gflop/s, memory {memory:.3g} GB/s"
            yield f"  group of {count}, {one.name}: {rates}, fit {error:.1%} mean error"
    points = telling(fitted.points)
    yield f"  fit: {origin.fit_error:.1%} mean error over {len(points)} points, {origin.worst_error:.0%} worst"
    for term, of_term in by_term(points).items():
        yield f"    {term}: {sum(point.error for point in of_term) / len(of_term):.1%}"
    for point in sorted(fitted.points, key=lambda point: -point.error)[:_NUM_WORST]:
        times = f"{format_seconds(point.measured_s)} measured, {format_seconds(point.fitted_s)} fitted"
        yield f"  worst: {point.term} at {point.at:.3g}: {times}"


def by_term(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each term, in order."""
    terms: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        terms[point.term].append(point)
    return terms
