"""A saved plan made anew for other devices: what moves, what that costs, and what cannot be."""

import json
import math
import time
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.answers.moved_state import moved_state
from autopar.answers.replan import Replanned, Successor, replanned, request_like
from autopar.answers.replan_text import format_replanned
from autopar.cli import main
from autopar.cli.replan_command import ClosestBeside, parse_ranks
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.elastic import replan
from autopar.elastic.replan_plan import closest
from autopar.errors import AutoparError, InfeasibleError, MeshError
from autopar.mesh import Devices, as_mesh
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from autopar.plans.serialise import FORMAT
from tests.answers.asked_plans import FILE, graph

TOO_LITTLE = 8 * 2**20  # bytes in which no one device holds the state, and eight do


@cache
def plan(mesh, limit=None, **pins):
    return choose_plan(graph(), as_mesh(mesh), load_cluster("cpu"), PlanRequest(pins=pins, memory_limit_bytes=limit))


def test_the_plan_made_anew_stands_beside_the_one_that_keeps_the_layouts():
    before = plan("dp=2,tp=4")
    found = replan(before, 6)
    assert found.after.plan.mesh.num_devices == found.closest.plan.mesh.num_devices == 6
    assert found.closest.plan.mesh.shape in ((3, 2), (2, 3)) or found.closest.plan.mesh.axis_names == ("dp", "tp")
    old = {item.fqn: before.assignment.layouts[item.value.name] for item in before.graph.of_kind("parameter")}
    now = found.closest.plan
    assert old == {item.fqn: now.assignment.layouts[item.value.name] for item in now.graph.of_kind("parameter")}
    assert found.after.state == moved_state(before, found.after.plan)
    assert found.after.plan.training == before.training and found.after.plan.cluster == before.cluster
    text = format_replanned(found)
    assert "8 devices before, 6 after" in text and "Gone: ranks 6-7" in text and "gap to the lower bound" in text


@pytest.mark.parametrize(
    ("gain_s", "more_s", "steps"),
    [(0.5, 2.0, 4), (0.5, -1.0, 0), (0.0, 0.0, 0), (0.0, 1.0, math.inf), (-0.5, 1.0, math.inf), (-0.5, -1.0, math.inf)],
)
def test_the_gain_pays_for_the_move_after_as_many_steps_as_it_takes(gain_s, more_s, steps):
    """Of two plans the one is chosen with which the move and all steps take less time."""
    made, kept = (
        Successor(SimpleNamespace(step_s=step_s), SimpleNamespace(seconds=seconds - 0.25), read_s=0.25)
        for step_s, seconds in ((1.0, 2.0 + more_s), (1.0 + gain_s, 2.0))
    )
    found = Replanned(None, made, kept, "", None)
    assert found.weighed.paid_after_steps == steps
    for num_steps in (0, 1, 3, 5, 1000):
        times = [each.move_s + num_steps * each.plan.step_s for each in (made, kept)]
        assert times[found.chosen(num_steps) is kept] == min(times)


def test_devices_that_do_not_hold_the_model_are_refused_with_how_many_do():
    before = plan("8", TOO_LITTLE)
    with pytest.raises(InfeasibleError, match=r"; (\d) devices holds it, in .*") as caught:
        replan(before, 1)
    fits = int(str(caught.value).rsplit("; ", 1)[1][0])
    assert 1 < fits <= 8
    assert replan(before, fits).after.plan.mesh.num_devices == fits
    with pytest.raises(InfeasibleError, match=r"dp=[2-8] holds it"):
        replan(before, "dp=1")


def test_what_there_is_not_is_named():
    before = plan("dp=2,tp=4")
    with pytest.raises(AutoparError, match="rank 8 cannot be gone: the plan before has ranks 0 to 7"):
        replan(before, "dp=2,tp=3", lost=[8])
    with pytest.raises(MeshError):
        replan(before, "dp=2,tp=three")


def test_ranks_are_read():
    assert parse_ranks("3,8-10, 20") == (3, 8, 9, 10, 20) and parse_ranks("") == ()
    for text in ("a", "3-", "9-3", "1,,2", "-1"):
        with pytest.raises(AutoparError, match="expected ranks such as 8-15,20"):
            parse_ranks(text)


def test_the_command_reads_a_plan_and_refuses_another_model_and_another_format(tmp_path, capsys):
    (tmp_path / "net.py").write_text(FILE)
    file, made = tmp_path / "a.json", tmp_path / "b.json"
    plan("dp=2,tp=2").save(file)
    target = f"{tmp_path}/net.py"
    assert main(["replan", str(file), "--model", f"{target}:build", "--mesh", "3", "--json", "--save", str(made)]) == 0
    found = json.loads(capsys.readouterr().out)
    state = found["after"]["state"]
    assert state["gone"] == [3] and len(state["devices"]) == 3
    assert sum(device["state"]["needed"] for device in state["devices"]) == sum(
        kind["needed"] for kind in state["kinds"].values()
    )
    assert json.loads(made.read_text())["mesh"]["shape"] and found["before"]["mesh"] == "dp=2,tp=2"
    assert main(["replan", str(file), "--model", f"{target}:deeper", "--mesh", "3"]) == 2
    assert "the plan is for another model" in capsys.readouterr().err
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": FORMAT + 1}))
    assert main(["replan", str(file), "--model", f"{target}:build", "--mesh", "3"]) == 2
    assert f"the plan has format {FORMAT + 1}, this autopar reads {FORMAT}" in capsys.readouterr().err


def test_the_plan_that_keeps_the_layouts_is_made_by_another_process_once_it_has_begun():
    before, began = plan("dp=2,tp=4"), time.monotonic()
    with ClosestBeside() as beside:
        assert beside.answer() is None  # it has not begun
        beside.begin(before, 6, None, 30.0)
        while (found := beside.answer()) is None:
            assert time.monotonic() < began + 100
    made, why_none = closest(before, 6, None, 30.0)
    assert found[1] == why_none == "" and found[0].dumps() == made.dumps()
    with ClosestBeside() as beside:
        beside.begin("no plan", 6, None, 30.0)
        beside.process.wait(100)
        assert beside.answer() is None


def test_no_plan_keeps_the_layouts_where_no_mesh_has_the_axes():
    request = request_like(plan("dp=2,tp=4"))

    def planner(mesh, request):
        return choose_plan(graph(), mesh, load_cluster("cpu"), request)

    found = replanned(plan("dp=2,tp=4"), Devices(5), planner, request)
    assert found.closest is None and found.why_none == "no mesh of 5 devices has the axes of dp=2,tp=4"
    assert found.chosen(10) is found.after and found.weighed.paid_after_steps == 0
    assert "No plan keeps the layouts" in format_replanned(found)


class Counting(DefaultLoadPlanner):
    """What torch.distributed.checkpoint reads for this rank: (name, global box) of each piece."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        self.pieces = []
        for item in plan.items:
            chunk = item.storage_index.offset
            low = [a + b for a, b in zip(chunk, item.storage_offsets)]
            self.pieces.append((item.storage_index.fqn, low, [a + b for a, b in zip(low, item.lengths)]))
        return plan


def resharded(before, after, lost, folder):  # runs on each rank
    """(bytes read, bytes read that this rank did not hold, whether the content is right), by torch alone."""
    whole = {name: _whole(item) for item in before.graph.of_kind("parameter") for name in _names(item)}
    old = _sharded(before, whole, range(before.mesh.num_devices))
    dcp.save(old, checkpoint_id=folder)
    stays = [rank for rank in range(before.mesh.num_devices) if rank not in lost][: after.mesh.num_devices]
    group = dist.new_group(stays)
    new = _sharded(after, {name: torch.zeros_like(x) for name, x in whole.items()}, stays)
    if dist.get_rank() not in stays:
        return None
    planner = Counting()
    dcp.load(new, checkpoint_id=folder, planner=planner, process_group=group)
    read = moved = 0
    for name, low, high in planner.pieces:
        held = torch.zeros(whole[name].shape, dtype=torch.bool)
        shape, offset = dcp_part(old[name])
        held[tuple(slice(a, a + n) for a, n in zip(offset, shape))] = True
        piece = held[tuple(slice(a, b) for a, b in zip(low, high))]
        read += piece.numel() * whole[name].itemsize
        moved += int((~piece).sum()) * whole[name].itemsize
    is_right = all(torch.equal(_local_of(whole[name], x), x.to_local()) for name, x in new.items())
    return stays.index(dist.get_rank()), read, moved, is_right


def _names(item):
    return [item.fqn, f"{item.fqn}.exp_avg", f"{item.fqn}.exp_avg_sq"]


def _whole(item):
    return torch.randn(item.value.shape, generator=torch.Generator().manual_seed(len(item.fqn)))


def _sharded(plan, whole, ranks):
    mesh = DeviceMesh("cpu", torch.tensor(list(ranks)).reshape(plan.mesh.shape))
    if dist.get_rank() not in ranks:
        return {}
    made = {}
    for item in plan.graph.of_kind("parameter"):
        layout = plan.assignment.layouts[item.value.name]
        placements = [Shard(each.dim) if each.is_split else Replicate() for each in layout]
        made |= {name: distribute_tensor(whole[name], mesh, placements, src_data_rank=None) for name in _names(item)}
    return made


def _local_of(whole: torch.Tensor, x: DTensor) -> torch.Tensor:
    shape, offset = dcp_part(x)
    return whole[tuple(slice(a, a + n) for a, n in zip(offset, shape))]


def dcp_part(x: DTensor):
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)


@pytest.mark.multirank
def test_moved_bytes_are_those_that_ranks_read_and_did_not_hold(ranks4, tmp_path):
    before = split("dp=2,tp=2", "S(0)S(0)")
    for number, (after, lost) in enumerate([(split("dp=3", "S(1)"), (1,)), (split("dp=4", "S(0)"), ())]):
        results = ranks4.run(resharded, before, after, lost, str(tmp_path / str(number)))
        state = moved_state(before, after, lost)
        found = [result for result in results if result is not None]
        assert [rank for rank, *_ in found] == list(range(after.mesh.num_devices))
        for rank, read, moved, is_right in found:
            device = state.devices[rank].state
            assert is_right and (read, moved) == (device.needed, device.moved), rank


def split(mesh, layout):
    pins = {f"blocks.{n}.{k}.weight": layout for n in range(4) for k in (0, 2)}
    return plan(mesh, None, **pins)
