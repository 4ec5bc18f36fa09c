"""The backward of a step in which gradients are reduced while earlier layers are computed: its time, and bounds of it.

Backward runs on lanes: compute, and one for each link level. Compute and the collectives that it waits for follow one
another in the order of the program. A reduction is issued when its bucket's last gradient is computed, and takes its
turn on the lane of the outermost link level that its group spans. A collective that compute waits for goes first, and
delays what is on its lane. While reductions are under way, compute loses 1 - `Cluster.overlap` of their seconds.

So the time is a longest path: along compute, and from some op on along one lane, or along compute to the end. For
weights of such paths that sum to 1, the weighted sum of their lengths is at most the time, for every plan, and a sum
over its choices (`path_weights.PathWeights`): what the exact search of such sums finds is a lower bound for plans with
overlap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from autopar.costmodel.cluster.hardware import LinkLevel

# Lane -> seconds.
BySeconds = dict[int, float]


@lru_cache(maxsize=2**12)
def lane_of(levels: tuple[LinkLevel, ...], mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """The lane of collectives on mesh axes `axes`: the number of the outermost link level that a group spans.

    >>> levels = LinkLevel(8, 1e-6, 1e11), LinkLevel(0, 1e-5, 1e10)
    >>> lane_of(levels, (4, 8), (1,)), lane_of(levels, (4, 8), (0,)), lane_of(levels, (3, 6), (1,))
    (0, 1, 1)
    """
    num_devices = math.prod(mesh_shape)
    others = [axis for axis in range(len(mesh_shape)) if axis not in axes]
    ranks = np.arange(num_devices).reshape(mesh_shape).transpose([*others, *axes])
    groups = ranks.reshape(-1, math.prod(mesh_shape[axis] for axis in axes))
    sizes = np.cumprod([level.size or num_devices for level in levels])
    within = (number for number, size in enumerate(sizes) if (groups // size == groups[:, :1] // size).all())
    return next(within, len(levels) - 1)


@dataclass(slots=True)
class AtOp:
    """The work of backward at an op: seconds of compute, and of collectives by lane.

    `blocking`: those that compute waits for; `put_off`: reductions of gradients that are complete after this op.
    """

    compute_s: float = 0.0
    blocking: BySeconds = field(default_factory=dict)
    put_off: BySeconds = field(default_factory=dict)

    @property
    def in_turn_s(self) -> float:
        """Seconds of all of it, one after the other."""
        return self.compute_s + sum(self.blocking.values()) + sum(self.put_off.values())


@dataclass(frozen=True, slots=True)
class Handover:
    """The op, by its position in the graph, from which on the longest path follows `lane`."""

    position: int
    lane: int


def path_length(ops: Sequence[AtOp], overlap: float, handover: Handover | None) -> float:
    """Seconds along compute up to the op of `handover`, and along its lane from there on; without it, to the end."""
    length_s = 0.0
    for position in range(len(ops) - 1, -1, -1):
        here = ops[position]
        if handover is not None and position < handover.position:
            length_s += here.blocking.get(handover.lane, 0.0) + here.put_off.get(handover.lane, 0.0)
            continue
        length_s += here.compute_s + sum(here.blocking.values())
        if handover is not None and position == handover.position:
            length_s += here.put_off.get(handover.lane, 0.0)
        else:
            length_s += (1 - overlap) * sum(here.put_off.values())
    return length_s


def backward_time(ops: Sequence[AtOp], overlap: float) -> tuple[float, Handover | None]:
    """Seconds of backward, and where its longest path leaves compute; None if it never does.

    `ops`: in the order of the graph, which backward runs from its end.
    """
    compute_s, lanes = 0.0, dict[int, float]()
    handed: dict[int, Handover] = {}
    for position in range(len(ops) - 1, -1, -1):
        here = ops[position]
        compute_s += here.compute_s
        for lane, time_s in here.blocking.items():
            compute_s += time_s
            if lane in lanes:
                lanes[lane] += time_s
        for lane, time_s in here.put_off.items():
            if lanes.get(lane, -1.0) < compute_s:
                lanes[lane], handed[lane] = compute_s, Handover(position, lane)
            lanes[lane] += time_s
            compute_s += (1 - overlap) * time_s
    last = max(lanes, key=lanes.__getitem__, default=None)
    if last is None or lanes[last] <= compute_s:
        return compute_s, None
    return lanes[last], handed[last]
