"""`moved_state`: what state moves between devices when one plan takes the place of another, and how long that takes."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autopar.answers.step_terms import AnyPlan
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.stage_transfer import pair_link
from autopar.errors import AutoparError
from autopar.plans.held_state import KINDS, Boxes, Held, boxes, held_state
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import sub_mesh

_AT_ONCE = 2**22  # elements of a matrix of (devices after, parts before)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of state of a device, or of several: what it needs after the change, and where that is before it.

    `held`: on the device itself; `received`: on other devices that stay; `read`: on none of these, so that only a
    checkpoint has it. needed = held + received + read.
    """

    needed: int = 0
    held: int = 0
    received: int = 0
    read: int = 0

    @property
    def moved(self) -> int:
        """Bytes that a device needs and does not hold."""
        return self.received + self.read


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device after the change. `rank`: its rank then, `was`: before, -1 of a new device; `before`: bytes of state
    that it holds before.
    """

    rank: int
    was: int
    before: int
    state: StateBytes


@dataclass(frozen=True)
class MovedState:
    """The state that a change of plan moves, of parameters, optimizer and buffers.

    `devices`: those after the change, by rank. `gone`: ranks before it that are not there any more, and `lost`: the
    bytes that these alone held, each counted once. `kinds`: kind of state -> bytes of all devices. `seconds`: of the
    messages between devices, those of one link level after those of another, each level as long as the device that
    sends or receives most; reading a checkpoint is not in it.
    """

    devices: tuple[DeviceState, ...]
    gone: tuple[int, ...]
    lost: int
    kinds: Mapping[str, StateBytes]
    seconds: float

    @property
    def total(self) -> StateBytes:
        """Bytes of all devices and kinds."""
        return _sum(self.kinds.values())

    @property
    def most_moved(self) -> int:
        """Bytes that a device needs and does not hold, of the one with the most."""
        return max(device.state.moved for device in self.devices)


def _sum(parts: Collection[StateBytes]) -> StateBytes:
    names = ("needed", "held", "received", "read")
    return StateBytes(*(sum(getattr(part, name) for part in parts) for name in names))


def moved_state(before: AnyPlan, after: AnyPlan, lost: Collection[int] = ()) -> MovedState:
    """The state that moves when `after` takes the place of `before`, of the same model.

    lost: ranks that are gone before the change. The others keep their order and take the first ranks of the new mesh;
    those for which it has no place go too, and its last ranks may be new devices, which hold nothing. AutoparError for
    a rank that there is not.
    """
    count = before.mesh.num_devices
    if unknown := sorted(rank for rank in lost if not 0 <= rank < count):
        raise AutoparError(f"rank {unknown[0]} cannot be gone: the plan before has ranks 0 to {count - 1}")
    stays = [rank for rank in range(count) if rank not in set(lost)][: after.mesh.num_devices]
    was = np.full(after.mesh.num_devices, -1)
    was[: len(stays)] = stays
    held = held_state(before), held_state(after)
    assert held[0].keys() == held[1].keys(), "both plans are of one model"
    meshes = [plan.mesh if isinstance(plan, Plan) else sub_mesh(plan.mesh) for plan in (before, after)]
    counted = _StateCount(was, count, after.cluster)
    for (old, new), times in Counter((held[0][fqn], held[1][fqn]) for fqn in held[1]).items():
        counted.add(new, boxes(old, count, meshes[0]), boxes(new, len(was), meshes[1]), times)
    return counted.result(tuple(sorted(set(range(count)) - set(stays))))


class _StateCount:
    """The sums over all tensors. `was`: int [devices after], the rank before of each, -1 of a new one."""

    def __init__(self, was: np.ndarray, num_before: int, cluster: Cluster) -> None:
        self.was, self.stays, self.cluster = was, was >= 0, cluster
        # the places of devices in the cluster: new ones come behind all that there were
        self.place = np.where(self.stays, was, num_before + np.cumsum(~self.stays) - 1)
        num_places = num_before + int((~self.stays).sum())
        self.blocks = np.cumprod([level.size or num_places for level in cluster.levels]).clip(max=num_places)
        self.bytes = {kind: np.zeros((3, len(was)), np.int64) for kind in KINDS}  # needed, held, received
        self.before, self.lost = np.zeros(num_before, np.int64), 0
        self.loads = np.zeros((len(cluster.levels), 2, num_places), np.int64)  # bytes sent, received

    def add(self, new: Held, old: Boxes, after: Boxes, times: int) -> None:
        """Add `times` tensors that are held alike."""
        low, high = (np.where(self.stays[:, None], each[self.was], 0) for each in (old.low, old.high))
        own = Boxes(low, high, self.stays & old.holds[self.was])
        parts = _parts(old)
        size = times * sum(num_bytes for _, num_bytes in new.element_bytes)
        pieces = list(_in_pieces(len(self.was), len(parts.low)))
        device, part = (np.concatenate(each) for each in zip(*(_having(own, rows, parts) for rows in pieces)))
        stay = np.zeros(len(parts.low), bool)
        stay[part] = True
        counted = np.zeros((3, len(self.was)), np.int64)
        for rows in pieces:
            shared, mine = _shared(after, rows, parts), np.zeros((rows.stop - rows.start, len(parts.low)), bool)
            inside = (device >= rows.start) & (device < rows.stop)
            mine[device[inside] - rows.start, part[inside]] = True
            counted[:, rows] = [(shared * which).sum(axis=1) for which in (True, mine, stay & ~mine)]
            self._load((device, part), np.where(stay & ~mine, shared, 0), rows.start, size)
        for kind, num_bytes in new.element_bytes:
            self.bytes[kind] += times * num_bytes * counted
        self.before += size * old.num_elements
        self.lost += size * int(parts.num_elements[~stay].sum())

    def _load(self, having: tuple[np.ndarray, np.ndarray], shared: np.ndarray, start: int, size: int) -> None:
        """Send each piece from the nearest device that has it, in turn if there are several.

        having: (device, part) of all that have one. shared: elements that are sent, [devices from `start`, parts].
        """
        device, part = shared.nonzero()
        num_bytes, device = size * shared[device, part], device + start
        for level, block in enumerate(self.blocks):
            num_blocks = self.place.max() // block + 1
            keys = having[1] * num_blocks + self.place[having[0]] // block  # of a part, within a block
            order = np.argsort(keys, kind="stable")
            asked = part * num_blocks + self.place[device] // block
            first, end = (np.searchsorted(keys[order], asked, side) for side in ("left", "right"))
            found = first < end
            sender = having[0][order][(first + device % np.maximum(end - first, 1))[found]]
            np.add.at(self.loads[level, 0], self.place[sender], num_bytes[found])
            np.add.at(self.loads[level, 1], self.place[device[found]], num_bytes[found])
            device, part, num_bytes = (each[~found] for each in (device, part, num_bytes))

    def result(self, gone: tuple[int, ...]) -> MovedState:
        """The sum of all that was added."""
        every = np.sum([*self.bytes.values()], axis=0)
        before = np.where(self.stays, self.before[self.was], 0)
        devices = zip(self.was.tolist(), before.tolist(), _states(every))
        return MovedState(
            tuple(DeviceState(rank, *each) for rank, each in enumerate(devices)),
            gone,
            self.lost,
            {kind: _sum(list(_states(counted))) for kind, counted in self.bytes.items() if counted.any()},
            sum(self._seconds()),
        )

    def _seconds(self) -> Iterator[float]:
        for level, loads in zip(self.cluster.levels, self.loads):
            yield pair_link(level).send_s(int(loads.max())) if loads.any() else 0.0


def _states(counted: np.ndarray) -> Iterator[StateBytes]:
    for needed, held, received in counted.T.tolist():
        yield StateBytes(needed, held, received, needed - held - received)


def _parts(held: Boxes) -> Boxes:
    """The different boxes of a tensor; where some overlap, which are buffers that stages lay out differently, the
    pieces into which they cut one another.
    """
    has = np.flatnonzero(held.num_elements)
    low, high = np.split(np.unique(np.concatenate((held.low[has], held.high[has]), axis=1), axis=0), 2, axis=1)
    if (high - low).prod(axis=1).sum() > high.max(axis=0, initial=0).prod():
        cuts = [np.unique(np.concatenate((low[:, dim], high[:, dim]))) for dim in range(low.shape[1])]
        low, high = (
            np.stack([each.ravel() for each in np.meshgrid(*ends, indexing="ij")], axis=1)
            for ends in ([cut[:-1] for cut in cuts], [cut[1:] for cut in cuts])
        )
    return Boxes(low, high, np.ones(len(low), bool))


def _having(own: Boxes, rows: slice, parts: Boxes) -> tuple[np.ndarray, np.ndarray]:
    """(devices, parts) of all pairs of `rows` in which the device has the part."""
    has = np.broadcast_to(own.holds[rows, None], (rows.stop - rows.start, len(parts.low)))
    for dim in range(own.low.shape[1]):
        has = has & (own.low[rows, None, dim] <= parts.low[:, dim]) & (parts.high[:, dim] <= own.high[rows, None, dim])
    device, part = has.nonzero()
    return device + rows.start, part


def _in_pieces(num_devices: int, num_parts: int) -> Iterator[slice]:
    step = max(1, _AT_ONCE // max(num_parts, 1))
    yield from (slice(start, min(start + step, num_devices)) for start in range(0, num_devices, step))


def _shared(after: Boxes, rows: slice, parts: Boxes) -> np.ndarray:
    """Elements that the devices `rows` need of each part, int64 [devices, parts]."""
    shared = np.broadcast_to(after.holds[rows, None], (rows.stop - rows.start, len(parts.low))).astype(np.int64)
    for dim in range(after.low.shape[1]):
        end = np.minimum(after.high[rows, None, dim], parts.high[None, :, dim])
        shared = shared * np.maximum(end - np.maximum(after.low[rows, None, dim], parts.low[None, :, dim]), 0)
    return shared
