"""A plan's file is data: what it says is checked, computed again, or shown as what the file says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import main
from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.mesh import Devices, Mesh, parse_mesh
from autopar.plans import serialise, staged_plan
from autopar.plans.plan import Plan, plan_of
from autopar.plans.serialise import HandCosts
from autopar.plans.staged_plan import StagedPlan
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from tests.planner.cases import MESH, hand_made, traced
from tests.plans.fuzz import Case, cases
from tests.workers import Ranks, device_mesh
from tests.zoo import MLP

X = torch.zeros(8, 32)
EXPLOIT = "b,) = self.axes; open({!r}, 'w') #"


def forged(text: str, **changes: Any) -> str:
    """The plan with other content and a checksum that fits."""
    return serialise.signed({key: x for key, x in (json.loads(text) | changes).items() if key != "checksum"})


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def compile_with(path: str) -> str:
    """On every rank: what comes of a step under the plan of the file."""
    torch.manual_seed(0)
    try:
        model = autopar.compile(MLP(), 4, args=(X,), plan=path)
    except PlanError as error:
        return str(error)
    model(X).sum().backward()
    return model.plan.explain()


@pytest.mark.multirank
@pytest.mark.parametrize(
    "name", [EXPLOIT, "b;open({!r})", "b\n    open({!r}, 'w')\n    #"], ids=["exploit", "prints", "lines"]
)
def test_an_axis_name_of_a_file_is_never_run(ranks4: Ranks, tmp_path: Path, name: str) -> None:
    told = tmp_path / "ran"
    plan = autopar.plan(MLP(), (4, 1), cluster="free-links", args=(X,))
    axes = {"shape": [4, 1], "axis_names": [name.format(str(told)), "c"], "shares": []}
    texts = ranks4.run(compile_with, write(tmp_path / "plan.json", forged(plan.dumps(), mesh=axes)))
    assert not told.exists()
    assert all("From the plan's file" in text if name.startswith("b;") else "mesh axis" in text for text in texts)


def test_verify_refuses_a_file_with_code(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(8, 8), (torch.zeros(8, 8),), {}\n"
    )
    plan = autopar.plan(nn.Linear(8, 8), (4, 1), cluster="free-links", args=(torch.zeros(8, 8),))
    axes = {"shape": [4, 1], "axis_names": [EXPLOIT.format(str(tmp_path / "ran")), "c"], "shares": []}
    path = write(tmp_path / "plan.json", forged(plan.dumps(), mesh=axes))
    assert main(["verify", f"{tmp_path}/model.py:build", "--mesh", "4", "--plan", path]) == 2
    assert "separates axes" in capsys.readouterr().err and not (tmp_path / "ran").exists()


DEEP = "[" * 50_000
TEXTS = {
    "deep": (DEEP, "nested too deeply"),
    "deep object": ('{"format": ' + '{"a": ' * 50_000, "nested too deeply"),
    "twice": ('{"format": 2, "format": 2}', "'format' is given twice"),
    "nan": ('{"format": 2, "x": NaN}', "holds NaN"),
    "minus infinity": ('{"format": -Infinity}', "holds -Infinity"),
    "digits": ('{"format": ' + "9" * 5000 + "}", "no JSON"),
    "a number": ("3", "not a plan"),
    "true": ('{"format": true}', "not a plan"),
    "byte order mark": ("\ufeff{}", "no JSON"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=TEXTS[text][1]):
        staged_plan.loads(TEXTS[text][0], traced("mlp"), MESH)


def test_however_deep_it_nests_it_is_refused_as_a_plan_is() -> None:
    """Reading the text and computing its checksum come to the end of the stack at other depths."""
    content = {"format": serialise.FORMAT, "checksum": ""}
    for depth in range(1, 1100):
        text = json.dumps(content)[:-1] + ', "a": ' + "[" * depth + "]" * depth + "}"
        with pytest.raises(PlanError):
            staged_plan.loads(text, traced("mlp"), MESH)


@pytest.mark.parametrize("content", ["é".encode("latin-1"), "{}".encode("utf-16"), b"\xff\xfe"])
def test_other_encodings_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match="cannot read plan"):
        Plan.load(tmp_path / "plan.json", traced("mlp"), MESH)


def test_paths_that_are_none_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, f"{tmp_path}/a\x00b", tmp_path / "a" / "b"):
        with pytest.raises(PlanError, match="cannot read plan"):
            serialise.read(path)


CLUSTER = json.loads(hand_made("mlp").dumps())["cluster"]
TRAINING = {
    "optimizer": "adam",
    "num_microbatches": 1,
    "num_in_flight": 1,
    "num_waiting": 0,
    "reduce_dtype": "",
    "in_stages": False,
    "param_dtype": "",
    "trains": True,
}
MANY = [{"size": 2**62, "latency_s": 0.0, "bandwidth_bytes_per_s": 1.0}]
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "true as a number": ({"training": TRAINING | {"num_microbatches": True}}, "num_microbatches"),
    "text as a number": ({"lower_bound_s": "1"}, "lower_bound_s: expected a number"),
    "a bound below zero": ({"lower_bound_s": -1e-3}, "lower_bound_s: expected a number"),
    "an endless limit": ({"memory_limit_bytes": float("inf")}, "memory_limit_bytes: expected a number"),
    "a huge number": ({"peak_bytes": [10**400]}, "peak_bytes: expected a whole number"),
    "a huge rate": ({"cluster": CLUSTER | {"memory_bandwidth_bytes_per_s": 10**400}}, "memory_bandwidth_bytes_per_s"),
    "no rate": ({"cluster": CLUSTER | {"flops_per_s": {"float32": 1e-320}}}, "flops_per_s of 'float32'"),
    "a rate that is none": ({"cluster": CLUSTER | {"flops_per_s": {"float32": "fast"}}}, "flops_per_s"),
    "too many devices": ({"cluster": CLUSTER | {"levels": MANY}}, "link levels"),
    "names that are none": ({"mesh": {"shape": [2, 2], "axis_names": ["a", 3]}}, "axis_names: expected text"),
    "axes in a row": ({"mesh": {"shape": [2, 2], "axis_names": "ab"}}, "axis_names: expected a list"),
    "sizes that are none": ({"mesh": {"shape": [2.0, 2], "axis_names": ["a", "b"]}}, "shape: expected a whole number"),
    "stray fields": ({"hand": {"ddp": {"step_s": 1.0, "memory_bytes": 1, "\x1b[2J": 0}}}, r"no key '\\x1b\[2J'"),
    "a name of control characters": ({"regathered": ["\x1b[2J\n"]}, r"'\\x1b\[2J\\n'"),
    "a region of control characters": ({"recomputed": [["\x1b[2J"]]}, r"recomputes '\\x1b\[2J'"),
    "another version's text": ({"autopar": 3}, "autopar: expected text"),
    "microbatches without a schedule": ({"training": TRAINING | {"num_microbatches": 2}}, "no schedule"),
    "gradients that wait for nothing": ({"training": TRAINING | {"num_waiting": 1}}, "no schedule"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_fields_that_are_not_what_they_should_be_are_named(field: str) -> None:
    changes, told = FIELDS[field]
    with pytest.raises(PlanError, match=told) as error:
        staged_plan.loads(forged(hand_made("mlp").dumps(), **changes), traced("mlp"), MESH)
    assert str(error.value).isprintable()


# Claims.


def claiming() -> Plan:
    hand = {"ddp \x1b[2J\n": HandCosts(1.0, 2**30)}
    return replace(
        hand_made("mlp"), lower_bound_s=1e-9, found_by="se\narch", hand=hand, peak_bytes=(2**20,), bound_of="plan \x07"
    )


def test_what_a_file_claims_is_shown_as_its_claim() -> None:
    text = Plan.loads(claiming().dumps(), traced("mlp"), MESH).explain()
    assert (
        r"From the plan's file, not verified by this run: found by se\narch; no plan \x07 takes less than 0.001 us"
        in text
    )
    assert "From the plan's file, compared with hand plans:" in text and r"ddp \x1b[2J\n" in text
    assert "peak, in a dry run of the program (from the plan's file)" in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_what_this_run_planned_is_shown_as_proven() -> None:
    text = Plan.loads(claiming().dumps(), traced("mlp"), MESH, is_own=True).explain()
    assert "found by se" in text and "priced by the same cost model" in text and "the plan's file" not in text


def test_what_another_version_claims_is_dropped() -> None:
    plan = Plan.loads(forged(claiming().dumps(), autopar="0.0.9"), traced("mlp"), MESH, is_own=True)
    assert (plan.lower_bound_s, plan.found_by, plan.hand, plan.peak_bytes) == (0.0, "", {}, ())
    assert "no lower bound" in plan.explain() and plan.costs == hand_made("mlp").costs


def test_no_bound_exceeds_the_step() -> None:
    for case in cases():
        plan = staged_plan.loads(forged(case.text, lower_bound_s=1e9), case.graph, case.mesh)
        assert plan.lower_bound_s == plan.step_s and plan.gap == 0.0


def test_a_peak_that_a_file_claims_makes_no_plan_fit() -> None:
    limit = hand_made("mlp").costs.total_memory_bytes - 1
    plan = Plan.loads(forged(claiming().dumps(), memory_limit_bytes=limit, peak_bytes=[1]), traced("mlp"), MESH)
    assert ", exceeds the limit" in next(
        line for line in plan.explain().splitlines() if line.startswith("Memory per device")
    )


def whose_claims(path: str) -> list[bool]:
    """On every rank: whether the claims are a file's, of a plan just made, given, read from a file, given after that,
    planned then, kept for another size, and planned for another kind of call.
    """
    mesh = device_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    made = autopar.compile(MLP(), mesh, args=(X,), cluster="free-links")
    found = [made.plan.is_from_file, autopar.compile(MLP(), mesh, args=(X,), plan=made.plan).plan.is_from_file]
    read = autopar.compile(MLP(), mesh, args=(X,), plan=path)
    found += [read.plan.is_from_file, autopar.compile(MLP(), mesh, args=(X,), plan=read.plan).plan.is_from_file]
    found += [autopar.compile(MLP(), 4, args=(X,), cluster="free-links").plan.is_from_file]
    read(X[:4])  # of another size, which keeps the plan
    found.append(read.plan.is_from_file)
    read(X[None])  # of another number of dims, for which this run plans
    return [*found, read.plan.is_from_file]


@pytest.mark.multirank
def test_a_file_is_told_from_a_plan_just_made(ranks4: Ranks, tmp_path: Path) -> None:
    autopar.plan(MLP(), "dp=2,tp=2", cluster="free-links", args=(X,)).save(tmp_path / "plan.json")
    for found in ranks4.run(whose_claims, str(tmp_path / "plan.json")):
        assert found == [False, False, True, True, False, True, False]


# Stages.


def staged_case(schedule: str) -> Case:
    return next(case for case in cases() if f'"name": "{schedule}"' in case.text)


def test_stages_keep_the_callers_mesh() -> None:
    case = staged_case("1f1b")
    plan = staged_plan.loads(case.text, case.graph, Mesh((2, 2), ("pp", "dp-shard")))
    assert isinstance(plan, StagedPlan) and plan.mesh.axis_names == ("pp", "dp-shard")
    assert {stage.mesh.axis_names for stage in plan.stages} == {("dp-shard",)}
    opened = staged_plan.loads(case.text, case.graph, Devices(4))
    assert opened.mesh == case.mesh and opened.stages[0].mesh.axis_names == ("dp",)


@pytest.mark.parametrize("names", [("a", "b"), ("dp", "pp")])
def test_stages_need_the_callers_mesh_to_have_an_axis_for_them(names: tuple[str, str]) -> None:
    case = staged_case("1f1b")
    with pytest.raises(PlanError, match="along an outermost mesh axis 'pp', the mesh is"):
        staged_plan.loads(case.text, case.graph, Mesh((2, 2), names))


def test_a_plan_without_stages_is_none_for_a_pipeline() -> None:
    case = staged_case("accumulate")
    with pytest.raises(PlanError, match="on 1 ranks"):
        staged_plan.loads(case.text, case.graph, parse_mesh("pp=2,dp=2"))


def with_stage(case: Case, number: int, **changes: Any) -> str:
    stages = case.content["stages"]
    stages[number] |= changes
    return forged(case.text, stages=stages)


def test_what_stages_send_arrives_as_it_was_sent() -> None:
    case = staged_case("1f1b")
    layouts = case.content["stages"][1]["layouts"]
    (name,) = case.content["stages"][0]["outputs"]
    other = "B" if layouts[name] != "B" else "S(0)"
    with pytest.raises(PlanError, match=f"has {name} sent .* by stage 0"):
        staged_plan.loads(with_stage(case, 1, layouts=layouts | {name: other}), case.graph, case.mesh)


def test_stages_store_a_shared_parameter_alike() -> None:
    case = staged_case("1f1b")
    layouts = case.content["stages"][1]["layouts"]
    name = next(item.value.name for item in case.graph.inputs if item.fqn == "embed.weight")
    other = "B" if layouts[name] != "B" else "S(0)"
    with pytest.raises(PlanError, match=r"stores 'embed\.weight', which several stages have"):
        staged_plan.loads(with_stage(case, 1, layouts=layouts | {name: other}), case.graph, case.mesh)


def test_stages_are_for_the_microbatches_of_the_schedule() -> None:
    case = staged_case("1f1b")
    training = case.content["stages"][0]["training"]
    with pytest.raises(PlanError, match=r"expected Training.* of stage 0"):
        staged_plan.loads(with_stage(case, 0, training=training | {"num_in_flight": 1}), case.graph, case.mesh)
    with pytest.raises(PlanError, match="other clusters"):
        staged_plan.loads(with_stage(case, 0, cluster=CLUSTER | {"memory_bytes": 2**20}), case.graph, case.mesh)
    with pytest.raises(PlanError, match="1 plans of stages and 1 places"):
        staged_plan.loads(forged(case.text, stages=case.content["stages"][:1]), case.graph, case.mesh)


def test_a_plan_that_recomputes_its_loss_is_explained() -> None:
    """One microbatch's share of a mean is an op that the whole batch has not, beside which the plan is shown."""
    case = staged_case("1f1b")
    ops = list(case.content["stages"][1]["strategies"])
    plan = staged_plan.loads(with_stage(case, 1, recomputed=[ops[-3:]]), case.graph, case.mesh)
    assert "activation checkpointing" in plan.explain() and ops[-1] not in {op.name for op in case.graph.ops}


def test_groups_of_channels_are_not_split_further_than_they_are() -> None:
    """Each axis alone may split the two groups; text does not say that both together may not."""
    graph = trace(skeleton(nn.Conv1d(8, 8, 3, groups=2)), (torch.zeros(8, 8, 8),), {})
    candidates = annotate(graph, MESH)
    (op,) = graph.ops
    split = next(s for s in candidates.strategies[op.name] if s.signatures[0].role and not s.signatures[1].role)
    both = replace(split, signatures=(split.signatures[0],) * 2)
    layouts = {name: found[0] for name, found in candidates.layouts.items()}
    outputs = {name: found[0] for name, found in candidates.outputs.items()}
    plan = plan_of(graph, Assignment({op.name: split}, layouts, {}, outputs), MESH, hand_made("mlp").cluster)
    text = plan.dumps()
    assert Plan.loads(text, graph, MESH).assignment == plan.assignment
    with pytest.raises(PlanError, match=r"is no valid strategy of aten\.conv1d"):
        Plan.loads(forged(text, strategies={op.name: [str(s) for s in both.signatures]}), graph, MESH)


@pytest.mark.parametrize("layout", ["S(0)BB", "S(0)BS(7)", "B"])
def test_a_parameter_is_stored_on_the_axes_that_there_are(layout: str) -> None:
    """By one placement for each axis; no more, whether the parameter has the dim or not, and no fewer."""
    text = hand_made("mlp").dumps()
    layouts = json.loads(text)["layouts"]
    name = next(item.value.name for item in traced("mlp").of_kind("parameter"))
    with pytest.raises(PlanError, match=f"{name} cannot be in layout"):
        staged_plan.loads(forged(text, layouts=layouts | {name: layout}), traced("mlp"), MESH)


def test_a_long_name_of_an_axis_is_shortened() -> None:
    case = staged_case("1f1b")
    mesh = case.content["mesh"] | {"axis_names": ["a" * 4000, "dp"]}
    with pytest.raises(PlanError, match="along an outermost mesh axis 'pp'") as error:
        staged_plan.loads(forged(case.text, mesh=mesh), case.graph, Devices(4))
    assert len(str(error.value)) < 1000
