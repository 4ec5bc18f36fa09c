"""Plans as files: what comes back, and what is refused."""

import json
import os
from dataclasses import replace

import pytest

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.plans import serialise
from autopar.plans.json_codec import parse_signature
from autopar.plans.plan import Plan
from autopar.sbp.placement import parse_layout
from autopar.sbp.signature import Signature, Strategy
from tests.planner.cases import MESH, hand_made, traced

S0, WHOLE = parse_layout("S(0)S(0)"), parse_layout("BB")


@pytest.fixture(scope="module")
def text():
    return hand_made("mlp").dumps()


def loads(text, name="mlp", mesh=MESH):
    return Plan.loads(text, traced(name), mesh)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "resnet"])
def test_a_plan_comes_back_as_it_was(name):
    plan = hand_made(name)
    assert loads(plan.dumps(), name) == replace(plan, timings={}, is_from_file=True)
    assert Plan.loads(plan.dumps(), traced(name), MESH, is_own=True) == replace(plan, timings={})


def test_a_plan_comes_back_from_its_file(tmp_path):
    plan = hand_made("mlp")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", traced("mlp"), MESH) == replace(plan, is_from_file=True)
    assert os.listdir(tmp_path) == ["plan.json"]


def test_axes_may_be_called_otherwise(text):
    renamed = Mesh(MESH.shape, ("x", "y"))
    assert loads(text, mesh=renamed).mesh == renamed


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        hand_made("mlp").save(path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]


def test_a_plan_of_another_model_is_refused(text):
    with pytest.raises(PlanError, match="another model"):
        loads(text, "vgg13")


def test_a_plan_of_another_mesh_is_refused(text):
    with pytest.raises(PlanError, match=r"shape \(2, 2\), this mesh is a=4"):
        loads(text, mesh=Mesh((4,), ("a",)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.json"):
        Plan.load(tmp_path / "nowhere.json", traced("mlp"), MESH)


@pytest.mark.parametrize("damaged", ["", "{", "[]", "null", '{"format": "1"}', "\x00"])
def test_what_is_no_plan_is_refused(damaged):
    with pytest.raises(PlanError):
        loads(damaged)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_plan_is_refused(text, share):
    with pytest.raises(PlanError, match="cut off"):
        loads(text[: int(len(text) * share)])


def test_an_edited_plan_is_refused(text):
    edited = text.replace('"S(0)S(1)"', '"BB"')
    assert edited != text
    with pytest.raises(PlanError, match="changed after it was written"):
        loads(edited)


@pytest.mark.parametrize("format_number", [0, 1, 99])
def test_a_plan_of_another_format_is_refused(text, format_number):
    with pytest.raises(PlanError, match=f"format {format_number}"):
        loads(json.dumps(json.loads(text) | {"format": format_number}))


def forged(text, without="", **changes):
    """The plan with other content and a checksum that fits."""
    content = {key: value for key, value in (json.loads(text) | changes).items() if key not in ("checksum", without)}
    return json.dumps(content | {"checksum": serialise._checksum(content)})


@pytest.mark.parametrize(
    "key",
    [
        "fingerprint",
        "mesh",
        "cluster",
        "training",
        "lower_bound_s",
        "hand",
        "strategies",
        "layouts",
        "kept",
        "outputs",
        "regathered",
    ],
)
def test_a_plan_without_a_key_is_refused(text, key):
    with pytest.raises(PlanError, match=key):
        loads(forged(text, without=key))


@pytest.mark.parametrize(
    "change", [{"layouts": {"x": "Q"}}, {"strategies": []}, {"mesh": 3}, {"cluster": {}}, {"hand": {"ddp": 1}}]
)
def test_nonsense_is_refused(text, change):
    with pytest.raises(PlanError, match="cannot be read"):
        loads(forged(text, **change))


def test_a_plan_without_checksum_is_refused(text):
    content = json.loads(text)
    del content["checksum"]
    with pytest.raises(PlanError, match="lacks 'checksum'"):
        loads(json.dumps(content))


def changed(field, **entries):
    """Text of the MLP's plan with entries of its assignment changed; None removes."""
    plan = hand_made("mlp")
    found = {name: value for name, value in (getattr(plan.assignment, field) | entries).items() if value is not None}
    return replace(plan, assignment=replace(plan.assignment, **{field: found})).dumps()


def first_op():
    return next(op for op in traced("mlp").ops if op.target == "aten.linear.default")


def test_a_strategy_that_is_no_candidate_is_refused():
    wrong = Signature(S0[:1] * 3, S0[:1])  # a product's rows cannot all be split at once
    with pytest.raises(PlanError, match=f"%{first_op().name} .* is no valid strategy of aten.linear"):
        loads(changed("strategies", **{first_op().name: Strategy((wrong, wrong))}))


def test_a_missing_op_is_named():
    with pytest.raises(PlanError, match=f"nothing about op '{first_op().name}'"):
        loads(changed("strategies", **{first_op().name: None}))


def test_an_unknown_op_is_named():
    with pytest.raises(PlanError, match="has op 'stranger'"):
        loads(changed("strategies", stranger=hand_made("mlp").assignment.strategies[first_op().name]))


def test_a_layout_that_does_not_divide_is_refused():
    name = next(item.value.name for item in traced("mlp").of_kind("parameter"))
    with pytest.raises(PlanError, match=f"{name} cannot be in layout S"):
        loads(changed("layouts", **{name: parse_layout("S(7)B")}))


def test_a_kept_layout_is_checked():
    name = next(iter(hand_made("mlp").assignment.kept))
    with pytest.raises(PlanError, match=f"%{name}.* cannot be kept"):
        loads(changed("kept", **{name: parse_layout("S(5)B")}))
    with pytest.raises(PlanError, match="keeps 'stranger'"):
        loads(changed("kept", stranger=WHOLE))


def with_regions(*positions):
    """The MLP's plan with the ops at each of `positions` recomputed."""
    plan, ops = hand_made("mlp"), traced("mlp").ops
    regions = tuple(tuple(ops[i].name for i in region) for region in positions)
    return replace(plan, assignment=replace(plan.assignment, recomputed=regions))


def test_recomputed_regions_come_back():
    plan = with_regions((0, 1), (2, 3, 4))
    assert loads(plan.dumps()).assignment == plan.assignment


def test_a_region_that_is_offloaded_in_part_is_refused():
    plan, ops = with_regions((0, 1, 2)), traced("mlp").ops
    within = replace(plan.assignment, offloaded=(tuple(op.name for op in ops[:4]),))
    assert loads(replace(plan, assignment=within).dumps()).assignment == within
    with pytest.raises(PlanError, match="offloads a part of that"):
        loads(replace(plan, assignment=replace(within, offloaded=((ops[2].name, ops[3].name),))).dumps())
    with pytest.raises(PlanError, match=r"offloads .* which are no consecutive ops"):
        loads(replace(plan, assignment=replace(within, offloaded=((ops[0].name, ops[2].name),))).dumps())


@pytest.mark.parametrize("positions", [[(0, 2)], [(1, 0)], [(0, 1, 1)], [(0, 1), (1, 2)], [()]])
def test_recomputed_regions_that_are_no_stretches_are_refused(positions):
    with pytest.raises(PlanError, match="no consecutive ops of their own"):
        loads(with_regions(*positions).dumps())


def test_a_recomputed_op_that_is_none_is_refused():
    plan = hand_made("mlp")
    plan = replace(plan, assignment=replace(plan.assignment, recomputed=(("stranger",),)))
    with pytest.raises(PlanError, match="recomputes 'stranger'"):
        loads(plan.dumps())


@pytest.mark.parametrize("line", ["S(0) B* -> S(0)", "B -> P P [role]", " -> B", "P S(11) -> S(2)"])
def test_signatures_are_read_as_they_print(line):
    assert str(parse_signature(line)) == line


@pytest.mark.parametrize("line", ["", "B", "B -> Q", "B B", "B -> B [", "-> ->"])
def test_what_is_no_signature_is_refused(line):
    with pytest.raises(ValueError):
        parse_signature(line)
