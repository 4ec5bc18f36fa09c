"""Terms of the cost model beyond the rates of a datasheet: shares of these rates, fixed costs, and their origin.

`autopar.costmodel.cluster.hardware.Cluster` has the terms as data. Each defaults to nothing: a share of 1, a cost of 0.
docs/cost_model.md tells how each is measured.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GroupRate:
    """The rate of collectives within groups of `size` children of a link level.

    `bandwidth_share`: reached bandwidth over that of the level, above 0; above 1 where the level's figure is that of
    larger groups. `base_latency_s`: fixed seconds of a collective, once, beside the latency of each hop. `least_s`: the
    seconds that a collective takes at least, in which so many bytes move as buffers on the way take at once. `kind`: of
    collective ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"), "p2p" for what a device sends to its peer
    (size 2), "" for every kind without rows of its own on this level.

    How to fill it: with all groups of `size` neighbours busy at once, time the collective for a range of bytes and fit
    `max(least_s, a + b * bytes)`. Then `base_latency_s` is `a` less the hops of the algorithm (`collective_time`), and
    `bandwidth_share` is the formula's seconds for each byte over `b`.
    """

    size: int
    bandwidth_share: float = 1.0
    base_latency_s: float = 0.0
    kind: str = ""
    least_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProductShare:
    """The share of `Cluster.flops_per_s` that products reach whose `reuse` is this.

    `reuse`: for a product of matrices the smallest of its three dims on one device; for any product, the fewest
    multiplications that an element of an operand or of the result takes part in (`roofline.least_reuse`). Between two
    rows the share is linear in the logarithm of the reuse, beyond them constant. `dtype`: "bfloat16", or "" for every
    dtype without rows of its own; `op`: family of the op ("aten.scaled_dot_product_attention"), or "" for every product
    without rows of its own. `backward`: the share that products of backward reach, 0 for that of forward.

    How to fill it: time the product for shapes with this smallest dim and the other dims large, less
    `Cluster.kernel_s`; the share is flops over seconds over flops_per_s.
    """

    share: float
    reuse: float = 1.0
    dtype: str = ""
    op: str = ""
    backward: float = 0.0

    @property
    def shares(self) -> tuple[float, float]:
        """Of forward and of backward."""
        return self.share, self.backward or self.share


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The share of `Cluster.memory_bandwidth_bytes_per_s` that an op reaches in forward and in backward.

    `op`: family of the op ("aten.gelu"), "update" for the optimizer's update (`forward` only), or "" for every op
    without a row of its own. `dtype`: of its first result ("bfloat16"), or "" for every dtype without rows of its own.
    Above 1 where the op moves fewer bytes than its operands and results have. `num_bytes`: moved by the op, or by the
    update of one parameter, which caches speed up if it is small; between two rows the share is linear in the
    logarithm of the bytes, beyond them constant.

    How to fill it: time the op on operands beyond the caches, less `Cluster.kernel_s`; the share is the bytes that
    `roofline.op_bytes` counts over seconds over the bandwidth. It stands for arithmetic too, as that of `gelu` on CPUs.
    """

    op: str
    forward: float = 1.0
    backward: float = 1.0
    dtype: str = ""
    num_bytes: float = 1.0


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Cores that neighbouring processes share, `num_ranks` of them: one computes `speedup` times as fast while the
    others wait as while all compute.

    How to fill it: time products on one rank while all compute, and while the others wait.
    """

    num_ranks: int
    speedup: float


@dataclass(frozen=True)
class Calibration:
    """The origin of a calibrated cluster.

    `date`: ISO 8601. `backend`: of collectives ("gloo", "nccl"), "" if none was measured. `versions`: package ->
    version. `fit_error`: mean of |fitted / measured - 1| over all points of all fits; `worst_error`: the largest.
    `hosts`: their names, in the order of ranks. `num_ranks`: processes that measured at once.
    """

    date: str
    backend: str
    fit_error: float
    worst_error: float
    versions: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    num_ranks: int = 1


def group_rate(rates: Sequence[GroupRate], kind: str, size: int) -> GroupRate:
    """The rate of groups of `size` for collective `kind`: between two rows linear in log2(size), beyond them constant.

    >>> group_rate((GroupRate(2, 0.25), GroupRate(8, 0.75)), "all_reduce", 4).bandwidth_share
    0.5
    """
    rows = [rate for rate in rates if rate.kind == kind] or [rate for rate in rates if not rate.kind]
    if not rows:
        return GroupRate(size)
    reached = {name: _between([(rate.size, getattr(rate, name)) for rate in rows], size) for name in _OF_GROUP}
    return GroupRate(size, kind=kind, **reached)


_OF_GROUP = ("bandwidth_share", "base_latency_s", "least_s")


def product_share(shares: Sequence[ProductShare], op: str, dtype: str, reuse: float) -> tuple[float, float]:
    """The shares that products of the family `op` reach in forward and in backward, 1 without a row for them; rows of
    the op precede its dtype's.

    >>> rows = ProductShare(0.5, reuse=4), ProductShare(1.0, reuse=64), ProductShare(0.7, op="aten.bmm", backward=0.6)
    >>> product_share(rows, "aten.linear", "float32", 16), product_share(rows, "aten.bmm", "float32", 16)
    ((0.75, 0.75), (0.7, 0.6))
    """
    for ops, dtypes in ((op, dtype), (op, ""), ("", dtype), ("", "")):
        if rows := [row for row in shares if (row.op, row.dtype) == (ops, dtypes)]:
            forward, backward = zip(*(row.shares for row in rows))
            at = [row.reuse for row in rows]
            return _between(list(zip(at, forward)), reuse), _between(list(zip(at, backward)), reuse)
    return 1.0, 1.0


def memory_share(shares: Sequence[MemoryShare], op: str, dtype: str = "", num_bytes: float = 1.0) -> MemoryShare:
    """The share that ops of the family `op` reach which move `num_bytes`; rows of the op precede its dtype's.

    >>> rows = MemoryShare("update", 0.5, num_bytes=100), MemoryShare("update", 0.25, num_bytes=10000)
    >>> memory_share(rows, "update", num_bytes=1e3).forward
    0.375
    """
    rows: dict[tuple[str, str], list[MemoryShare]] = defaultdict(list)
    for row in shares:
        rows[row.op, row.dtype].append(row)
    keys = (op, dtype), (op, ""), ("", dtype), ("", "")
    found = next((rows[key] for key in keys if key in rows), [MemoryShare(op)])
    if len(found) == 1:
        return found[0]
    forward, backward = (
        _between([(row.num_bytes, getattr(row, way)) for row in found], num_bytes) for way in ("forward", "backward")
    )
    return MemoryShare(op, forward, backward, found[0].dtype, num_bytes)


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at `at` of the function that is linear in log(x) between `points` (x, y), and constant beyond them."""
    points = sorted(points)
    right = bisect_left(points, at, key=lambda point: point[0])
    if right == 0 or right == len(points) or points[right][0] == at:
        return points[min(right, len(points) - 1)][1]
    (low, below), (high, above) = points[right - 1 : right + 1]
    return below + (above - below) * math.log(at / low) / math.log(high / low)
