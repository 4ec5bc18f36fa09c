"""`Lanes`: the process groups by which the ranks of a pipeline send to one another beside computing."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.mesh import PIPELINE
from autopar.runtime.process_groups import joint_group
from autopar.runtime.rank_agreement import peers_alive
from autopar.schedule.orders import Schedule

Lane = tuple[str, int]  # kind of what is sent, "F" values or "B" gradients, and the sender's rank modulo 2


@dataclass(frozen=True, eq=False)
class Lanes:
    """`group`: the ranks along the pipeline axis, for collectives; `of_lane`: a group of the same ranks for each lane.

    NCCL runs what two ranks of a group send one after the other, in both directions: a receive that is posted ahead
    would hold up what comes after it. Within a lane a rank has one neighbour and one direction, so that only messages
    that arrive in this order wait for one another.
    """

    group: dist.ProcessGroup
    of_lane: Mapping[Lane, dist.ProcessGroup]

    def by(self, kind: str, sender: int) -> dist.ProcessGroup:
        """The group by which rank `sender` of the pipeline sends values ("F") or gradients ("B")."""
        return self.of_lane[kind, sender % 2]


def lanes_of(schedule: Schedule) -> dict[Lane, list[tuple[int, int]]]:
    """Lane -> the (sender, receiver) pairs of ranks that use it."""
    pairs: dict[Lane, list[tuple[int, int]]] = {}
    for stage in range(schedule.num_stages - 1):
        before, after = schedule.rank_of(stage), schedule.rank_of(stage + 1)
        for kind, pair in (("F", (before, after)), ("B", (after, before))):
            known = pairs.setdefault((kind, pair[0] % 2), [])
            if pair not in known:
                known.append(pair)
    return pairs


def make_lanes(mesh: DeviceMesh, schedule: Schedule) -> Lanes:
    """The lanes of this rank's pipeline; all ranks of the mesh, which has an axis for stages, call this."""
    axis = (mesh.mesh_dim_names or ()).index(PIPELINE)
    group, device = mesh.get_group(axis), torch.device(mesh.device_type)
    of_lane: dict[Lane, dist.ProcessGroup] = {}
    for lane, pairs in sorted(lanes_of(schedule).items()):
        own = joint_group(mesh, (axis,), copy=1 + 2 * (lane[0] == "B") + lane[1])
        with peers_alive():
            _connect(own, sorted(pairs), device)
        of_lane[lane] = own
    return Lanes(group, of_lane)


def _connect(group: dist.ProcessGroup, pairs: list[tuple[int, int]], device: torch.device) -> None:
    """Send a number between each pair, in this order on all ranks: NCCL makes a communicator of two ranks when they
    first send, and holds up both until it is made.
    """
    here, number = dist.get_rank(group), torch.zeros(1, device=device)
    for sender, receiver in pairs:
        if here == sender:
            dist.send(number, group=group, group_dst=receiver)
        elif here == receiver:
            dist.recv(number, group=group, group_src=sender)
