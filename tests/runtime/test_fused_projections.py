"""Models with fused projections under plans that compute a share of each section: they train as on one device."""

from typing import Any

import pytest

from autopar.mesh import Mesh
from autopar.verify.check_placements import check
from tests.fused_projections import BLOCKS, case_of, plan_in_sections
from tests.runtime.training import LEAST, issued, planned, state_of, traced, train, under, worst
from tests.workers import Ranks, device_mesh
from tests.zoo import Case, build

pytestmark = pytest.mark.multirank

# mesh, is each axis split in sections, are weights stored in runs of the dim that is read so
SETTINGS = [((2, 2), False, False), ((2, 2), True, True), ((4,), True, False)]


def case_called(name: str) -> Case:
    return case_of(name) if name in BLOCKS else build(name)


def train_in_sections(names: list[str], shape: tuple[int, ...], is_on_all: bool, is_stored_alike: bool) -> list[Any]:
    """Three steps of AdamW, on ranks and on one device; whole state is given out, and taken back."""
    mesh, found = Mesh(shape, ("dp", "tp")[-len(shape) :]), []
    devices = device_mesh(shape, mesh.axis_names)
    for name in names:
        case, truth = case_called(name), train(case_called(name), 3)
        plan = plan_in_sections(traced(case), mesh, is_on_all=is_on_all, is_stored_alike=is_stored_alike)
        assert sum("|" in str(one.output_layout(0)) for one in plan.assignment.strategies.values()) >= 2
        case = under(plan, case, devices)
        made = train(case, 3)
        distances = [worst(made[when], truth[when], least)[0] for when, least in LEAST.items()]
        counted = dict(issued(case, devices)), {}
        for collective in planned(plan):
            counted[1][collective] = counted[1].get(collective, 0) + 1
        check(case.model._autopar.current().program, devices)
        whole = case.model.full_state_dict()
        given_out = worst({key: whole[key] for key in truth["last"]}, truth["last"], LEAST["last"])[0]
        other = case_called(name).model.state_dict()
        case.model.load_state_dict(other)
        taken = worst(state_of(case.model), other, LEAST["last"])[0]
        found.append((name, [*distances, given_out, taken], counted[0] == counted[1]))
    return found


@pytest.mark.parametrize(("shape", "is_on_all", "is_stored_alike"), SETTINGS, ids=str)
def test_they_train_like_one_device(
    ranks4: Ranks, shape: tuple[int, ...], is_on_all: bool, is_stored_alike: bool
) -> None:
    """Loss, gradients, what three steps of AdamW make of them, the collectives, and whole state out and in."""
    names = [*BLOCKS, *(["gpt2"] if not is_on_all else [])]  # of four heads
    for of_rank in ranks4.run(train_in_sections, names, shape, is_on_all, is_stored_alike):
        for name, distances, is_as_priced in of_rank:
            assert max(distances) < (1e-4 if name == "gpt2" else 1e-9) and is_as_priced, (name, distances)


def test_a_plan_is_saved_and_read(tmp_path) -> None:
    case = case_of("Sliced")
    graph = traced(case)
    plan = plan_in_sections(graph, Mesh((2, 2), ("dp", "tp")), is_on_all=False, is_stored_alike=False)
    plan.save(tmp_path / "plan.json")
    again = type(plan).load(tmp_path / "plan.json", graph, plan.mesh)
    assert again.assignment == plan.assignment and again.costs.step_s == pytest.approx(plan.costs.step_s)
    assert "S(2|2+2x1)" in (tmp_path / "plan.json").read_text()
