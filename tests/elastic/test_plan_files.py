"""The plan that a run goes on with when the number of ranks has changed: moving is weighed against what steps gain."""

import json
from math import prod
from pathlib import Path

import pytest

from autopar.answers.step_terms import AnyPlan
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.elastic.cached_plans import asked_request, plan_successors
from autopar.elastic.checkpoints import Manifest, commit, newest_rate
from autopar.elastic.plan_files import PlanFiles, name_of
from autopar.mesh import Devices, as_mesh
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from autopar.plans.staged_plan import loads, mesh_in
from autopar.sbp.placement import Placement
from tests.answers.asked_plans import graph

RATE = 1000.0  # bytes a second


@pytest.fixture
def files(tmp_path: Path) -> PlanFiles:
    return PlanFiles(tmp_path, "key")


def checkpoint(folder: Path, step: int) -> None:
    """A checkpoint of 1000 bytes, written and read back at `RATE`."""
    (partial := folder / ".saving-x").mkdir()
    (partial / "a").write_bytes(bytes(1000))
    commit(partial, folder, Manifest(step, 4, "job", None, {}, {"a": [1000, ""]}, seconds=1000 / RATE))


def started(files: PlanFiles, num_ranks: int, **pins: str) -> Path:
    """A start of so many ranks in data parallelism; the file of its plan."""
    mesh, request = as_mesh(f"dp={num_ranks}"), PlanRequest(pins=pins)
    files.save(choose_plan(graph(), mesh, load_cluster("cpu"), request), files.anew(num_ranks))
    files.use(num_ranks, files.anew(num_ranks))
    return files.anew(num_ranks)


@pytest.mark.parametrize(
    ("changes", "step", "is_kept"),  # 0.5 s a step and 10 s more to read
    [(0, 19, True), (0, 21, False), (1, 39, True), (1, 41, False), (2, 59, True), (2, 61, False)],
)
def test_the_plan_made_anew_is_taken_where_steps_to_the_next_change_pay_for_moving(
    files: PlanFiles, changes: int, step: int, is_kept: bool
) -> None:
    (files.folder / "plans").mkdir()
    for number in range(changes):  # of the number of ranks, before
        files.anew(8 + number).write_text(str(number))
        files.use(8 + number, files.anew(8 + number))
    files.anew(4).write_text("of four")
    before = files.use(4, files.anew(4))
    files.anew(3).write_text("made anew")
    files.kept(3, before).write_text("with the layouts of before")
    files.successors(3, before).write_text(json.dumps({"gain_s": 0.5, "more_bytes": 10 * RATE}))
    assert files.chosen(3) == files.anew(3)  # there is nothing to move
    checkpoint(files.folder, step)
    assert newest_rate(files.folder) == RATE
    assert files.chosen(3) == (files.kept(3, before) if is_kept else files.anew(3))
    assert files.chosen(4) == files.anew(4) and files.chosen(2) is None
    files.use(3, files.kept(3, before))
    assert files.chosen(3) == files.kept(3, before)  # a start with as many ranks moves nothing


def read(path: Path) -> AnyPlan:
    text = path.read_text()
    return loads(text, graph(), mesh_in(text), is_own=True)


def state_bytes(plan: AnyPlan) -> int:
    """Bytes of parameters and optimizer state on all devices: each axis that does not split one has it once a rank."""
    total = 0
    for item in plan.graph.of_kind("parameter"):
        layout = plan.assignment.layouts[item.value.name]
        copies = prod(size for size, own in zip(plan.mesh.shape, layout) if not own.is_split)
        total += copies * prod(item.value.shape) * (4 + plan.training.state_bytes(4))
    return total


def test_successors_are_planned_and_weighed_by_the_bytes_that_all_ranks_read(files: PlanFiles) -> None:
    path = started(files, 4, **{"head.weight": "S(1)"})
    plan_successors(files, path, graph(), PlanRequest(), {3: Devices(3), 2: as_mesh("dp=2")})
    for size in (3, 2):
        saved = json.loads(files.successors(size, name_of(path)).read_text())
        made, kept = (read(each) for each in (files.anew(size), files.kept(size, name_of(path))))
        assert made.mesh.num_devices == kept.mesh.num_devices == size
        assert saved["gain_s"] == pytest.approx(kept.step_s - made.step_s)
        assert saved["gain_s"] > 0 and saved["more_bytes"] > 0
        assert saved["more_bytes"] == state_bytes(made) - state_bytes(kept)


def test_plans_made_ahead_have_what_the_user_asked_of_plans(files: PlanFiles) -> None:
    """They were made without it: a start on another number of ranks ran other layouts than those that were pinned."""
    pins = {"head.weight": "S(0)"}
    path = started(files, 4)
    request = asked_request(read(path), {"pins": pins, "num_microbatches": None, "cluster": "cpu"})
    plan_successors(files, path, graph(), request, {3: as_mesh("dp=3"), 2: as_mesh("dp=2")})
    for size in (3, 2):
        made = read(files.anew(size))
        weight = next(item for item in made.graph.of_kind("parameter") if item.fqn == "head.weight")
        assert made.assignment.layouts[weight.value.name] == (Placement("S", 0),)
