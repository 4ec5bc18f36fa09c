"""Moved bytes are those that brute force over the elements of every tensor counts."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from autopar.answers.moved_state import moved_state
from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.training import Training
from autopar.errors import AutoparError
from autopar.ir.trace import trace
from autopar.mesh import as_mesh
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.sbp.placement import S


class Tiny(nn.Module):
    """Sizes that no axis divides, a buffer that is written, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)
        self.last.bias.requires_grad_(False)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.last(self.norm(self.first(x)).relu()), y)


class Blocks(nn.Module):
    """Enough blocks for stages, with a weight that the first and the last of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x).relu()
        return nn.functional.mse_loss(x, y)


SIZES = {Tiny: (24, 10, 5), Blocks: (24, 8, 8)}
PINS = {
    "split": {"first.weight": "S(0)", "last.weight": "S(1)"},
    "other": {"first.weight": "S(1)", "norm.running_mean": "S(0)"},
    "twice": {"first.weight": "S(0)S(0)", "last.weight": "S(1)S(0)"},
    "whole": {},
    "stages": {"blocks.0.weight": "S(1)"},
}


@cache
def graph(model):
    rows, width, out = SIZES[model]
    with torch.device("meta"):
        return trace(model(), (torch.zeros(rows, width), torch.zeros(rows, out)), {})


@cache
def plan(model, mesh, pins="whole", optimizer="adamw"):
    counts = {"num_microbatches": 4, "schedule": "1f1b"} if "pp" in mesh else {"num_microbatches": 1}
    request = PlanRequest(pins=PINS[pins], training=Training(optimizer), **counts)
    return choose_plan(graph(model), as_mesh(mesh), load_cluster("cpu"), request)


def cells_of(plan):
    """For each rank the set of (name, index) that it holds, by splitting arrays of indices as torch splits tensors."""
    stages = [plan] if isinstance(plan, Plan) else plan.stages
    held = [set() for _ in range(plan.mesh.num_devices)]
    for number, stage in enumerate(stages):
        inner = math.prod(stage.mesh.shape)
        first = 0 if isinstance(plan, Plan) else plan.schedule.rank_of(number) * inner
        for item in stage.graph.inputs:
            if item.kind not in ("parameter", "buffer"):
                continue
            whole = torch.arange(math.prod(item.value.shape)).reshape(item.value.shape)
            for rank in range(inner):
                part, place = whole, np.unravel_index(rank, stage.mesh.shape)
                for at, size, placement in zip(place, stage.mesh.shape, stage.assignment.layouts[item.value.name]):
                    if placement.is_split:
                        chunks = part.chunk(size, placement.dim)
                        part = chunks[at] if at < len(chunks) else part.narrow(placement.dim, 0, 0)
                held[first + rank].update((item.fqn, index) for index in part.flatten().tolist())
    return held


def bytes_of(plan, cells):
    """Bytes of parameters, optimizer state and buffers of a set of elements."""
    items = {item.fqn: item for item in plan.graph.inputs}
    state = plan.training.state_bytes(torch.float32.itemsize)
    found = {"parameters": 0, "optimizer": 0, "buffers": 0}
    for fqn, _ in cells:
        found[items[fqn].kind + "s"] += items[fqn].value.dtype.itemsize
        found["optimizer"] += state * (items[fqn].kind == "parameter" and items[fqn].value.needs_grad)
    return found


CHANGES = [
    (Tiny, "dp=4", "split", "dp=3", "split", ()),
    (Tiny, "dp=4", "split", "dp=3", "split", (1,)),
    (Tiny, "dp=4", "split", "dp=4", "other", ()),
    (Tiny, "dp=4", "split", "dp=4", "other", (0, 3)),  # two new devices
    (Tiny, "dp=3", "other", "dp=2,tp=2", "twice", ()),
    (Tiny, "dp=2,tp=3", "twice", "dp=5", "split", (2,)),
    (Tiny, "dp=2", "whole", "dp=4", "split", ()),
    (Tiny, "dp=4", "split", "dp=1", "whole", (0, 1, 2)),
    (Blocks, "pp=2,dp=2", "stages", "dp=3", "whole", (0,)),
    (Blocks, "pp=4,dp=1", "stages", "pp=2,dp=2", "whole", ()),
    (Blocks, "dp=4", "stages", "pp=2,dp=2", "stages", (3,)),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change[1]} to {change[3]}")
def test_moved_bytes_are_counted_bytes(change):
    model, mesh, pins, new_mesh, new_pins, lost = change
    optimizer = "momentum-master" if lost else "adamw"
    compare_with_cells(plan(model, mesh, pins, optimizer), plan(model, new_mesh, new_pins, optimizer), lost)


def test_a_tensor_that_stages_lay_out_differently_is_counted_once():
    """As buffers may be; here a weight that two stages share, which lies in columns on one and in rows on the other."""
    before = plan(Blocks, "pp=2,dp=2", "stages")
    first, last = before.stages
    (name,) = (item.value.name for item in last.graph.of_kind("parameter") if item.fqn == "blocks.0.weight")
    assert last.assignment.layouts[name] == (S(1),)
    changed = replace(last.assignment, layouts={**last.assignment.layouts, name: (S(0),)})
    before = replace(before, stages=(first, replace(last, assignment=changed)))
    for lost in [(), (0,), (3,), (0, 2)]:
        compare_with_cells(before, plan(Blocks, "dp=3"), lost)


def compare_with_cells(before, after, lost):
    state = moved_state(before, after, lost)
    old, new = cells_of(before), cells_of(after)
    stays = [rank for rank in range(len(old)) if rank not in lost][: len(new)]
    assert state.gone == tuple(sorted(set(range(len(old))) - set(stays)))
    there = set().union(*(old[rank] for rank in stays))
    assert state.lost == sum(bytes_of(before, set().union(*old) - there).values())
    total = {"needed": [], "held": [], "received": [], "read": []}
    for rank, needed in enumerate(new):
        own = old[stays[rank]] if rank < len(stays) else set()
        cells = (needed, needed & own, (needed - own) & there, needed - there)
        device = state.devices[rank]
        assert (device.rank, device.was) == (rank, stays[rank] if rank < len(stays) else -1)
        assert device.before == sum(bytes_of(before, own).values())
        for name, each in zip(total, cells):
            assert getattr(device.state, name) == sum(bytes_of(after, each).values()), (rank, name)
            total[name].append(bytes_of(after, each))
    for kind, found in state.kinds.items():
        assert {name: getattr(found, name) for name in total} == {
            name: sum(each[kind] for each in parts) for name, parts in total.items()
        }


def test_nothing_moves_between_equal_plans():
    state = moved_state(plan(Tiny, "dp=4", "split"), plan(Tiny, "dp=4", "split"))
    assert (state.total.moved, state.lost, state.gone, state.seconds) == (0, 0, (), 0.0)
    assert state.total.held == state.total.needed > 0


def test_seconds_are_those_of_the_busiest_device_of_each_level():
    """Two devices that have everything give it to two new ones, which stand in a node of their own."""
    node, network = LinkLevel(2, 1e-6, 1e9), LinkLevel(0, 1e-5, 1e8)
    levels = Cluster("two nodes", (node, network), {"float32": 1e12}, 1e12, 2**34, "by hand")
    before, after = plan(Tiny, "dp=2"), replace(plan(Tiny, "dp=4"), cluster=levels)
    state = moved_state(before, after)
    whole = state.total.needed // 4
    assert state.total.received == 2 * whole and state.total.read == 0
    assert state.seconds == pytest.approx(1e-5 + whole / 1e8)
    inside = moved_state(plan(Tiny, "dp=1"), replace(plan(Tiny, "dp=2"), cluster=levels))
    assert inside.seconds == pytest.approx(1e-6 + whole / 1e9)


def test_pieces_come_from_devices_in_turn():
    """One of four that have a tensor does not send it to all others."""
    level = LinkLevel(0, 0.0, 1e9)
    cluster = Cluster("one level", (level,), {"float32": 1e12}, 1e12, 2**34, "by hand")
    state = moved_state(plan(Tiny, "dp=4"), replace(plan(Tiny, "dp=8"), cluster=cluster))
    assert state.seconds == pytest.approx(state.total.received / 4 / 1e9)


def test_a_rank_that_there_is_not_is_named():
    with pytest.raises(AutoparError, match="rank 7 cannot be gone: the plan before has ranks 0 to 3"):
        moved_state(plan(Tiny, "dp=4", "split"), plan(Tiny, "dp=3", "split"), (7,))
