"""What a user can get wrong, and what is said then: what, where, expected, found, remedy."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_module
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import AutoparError, InfeasibleError, MeshError, PinError, PlanError, TraceError
from tests.workers import Ranks, device_mesh
from tests.zoo import MLP

X = torch.zeros(8, 32)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # the marked line
            return y
        return x


def _plan(model: nn.Module | None = None, mesh: Any = "dp=2,tp=2", **options: Any) -> autopar.Plan:
    return autopar.plan(model or MLP(), mesh, **({"cluster": "cpu", "args": (X,)} | options))


def test_branch_on_values_is_told_with_its_line():
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "the marked line" in text)
    with pytest.raises(TraceError, match=rf"test_bad_input.py:{line}: `if y.sum\(\) > 0.*torch.where"):
        _plan(Branches())


WRONG: list[tuple[dict[str, Any], type[AutoparError], str]] = [
    ({"pins": {"head.weight": "ep:S(0)"}}, PinError, "no mesh axis 'ep'; the mesh has dp, tp"),
    ({"pins": {"head.wieght": "S(0)B"}}, PinError, "'head.wieght'.*close to it: head.weight"),
    ({"pins": {"head.weight": "S(0)"}}, PinError, "2 placements, found 1"),
    ({"pins": {"head.weight": "S(7)B"}}, PinError, r"head.weight=.S\(7\)B"),
    ({"pins": {"head.weight": "PB"}}, PinError, "stored split"),
    ({"pins": {"head.weight": ("S(0)", "B")}}, AutoparError, "pins= expects a mapping"),
    ({"pins": ["head.weight"]}, AutoparError, "pins= expects a mapping"),
    ({"memory_limit_bytes": -1}, AutoparError, "positive number of bytes"),
    ({"memory_limit_bytes": "16GiB"}, AutoparError, "positive number of bytes"),
    ({"cluster": "h1000"}, AutoparError, "no cluster 'h1000'.*h100"),
    ({"cluster": 3}, AutoparError, "cluster="),
    ({"cluster": None}, AutoparError, "give cluster="),
    ({"mesh": "2xx2"}, MeshError, "cannot read mesh"),
    ({"mesh": (0, 2)}, MeshError, "positive sizes"),
    ({"mesh": 4.0}, MeshError, "found 4.0"),
    ({"mesh": 0}, MeshError, "positive number of devices"),
    ({"mesh": 4, "pins": {"head.weight": "S(0)"}}, PinError, "left open"),
    ({"time_limit_s": "soon"}, AutoparError, "time_limit_s= expects a number of seconds"),
    ({"mesh": "dp=2,dp=2"}, MeshError, "distinct axis names"),
    ({"model": "gpt2"}, AutoparError, "model expects a torch.nn.Module, found builtins.str"),
    ({"args": X}, AutoparError, r"args=\(x,\)"),
    ({"kwargs": [X]}, AutoparError, "kwargs= expects a mapping"),
    ({"args": (X, X)}, TraceError, r"MLP cannot be called so: too many positional arguments; its forward takes \(x:"),
    ({"args": (torch.zeros(8, 31),)}, TraceError, r"zoo.py:\d+"),
]


@pytest.mark.parametrize(("options", "kind", "told"), WRONG, ids=lambda x: str(x)[:40] if isinstance(x, dict) else "")
def test_wrong_arguments_are_told(options: dict[str, Any], kind: type[AutoparError], told: str) -> None:
    with pytest.raises(kind, match=told):
        _plan(**options)


def test_too_little_memory_says_the_least_that_would_do():
    with pytest.raises(InfeasibleError) as error:
        _plan(memory_limit_bytes=10_000)
    least = max(float(number) for number in re.findall(r"\d+\.?\d*(?:e\+\d+)?", str(error.value)))
    assert least > 10_000, error.value
    assert _plan(memory_limit_bytes=1.5 * least).costs.total_memory_bytes <= 1.5 * least


def test_batch_that_no_axis_splits_is_run_whole_and_said_so():
    with pytest.warns(UserWarning, match="argument x has size 3 .*dp=4,tp=8") as record:
        plan = _plan(args=(torch.zeros(3, 32),), mesh="dp=4,tp=8")
    assert record[0].filename == __file__
    assert not any(placement.is_split and placement.dim == 0 for placement in plan.assignment.layouts["x"])
    told = [line for line in plan.explain().splitlines() if re.search(r"\bx\b.*\b3\b", line)]
    assert told, plan.explain()


@pytest.mark.parametrize("size", [6, 7])
def test_batch_that_an_axis_splits_is_not_complained_about(recwarn: pytest.WarningsRecorder, size: int):
    _plan(args=(torch.zeros(size, 32),), mesh="dp=2,tp=4")
    assert not [warning for warning in recwarn if "argument" in str(warning.message)]


def _saved(tmp_path: Path) -> Path:
    _plan(cluster="free-links").save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def _edited(path: Path) -> str:
    content = json.loads(path.read_text())
    content["layouts"] = {name: layout.replace("S(0)", "B") for name, layout in content["layouts"].items()}
    return json.dumps(content)


def compile_badly(case: str, path: str) -> str:
    """What a rank is told."""
    mesh = device_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    wrong = {
        "other model": lambda: autopar.compile(MLP(depth=3), mesh, args=(X,), plan=path),
        "other batch": lambda: autopar.compile(MLP(), mesh, args=(X[:7],), plan=path),
        "other mesh": lambda: autopar.compile(MLP(), device_mesh((4,), ("dp",)), args=(X,), plan=path),
        "damaged": lambda: autopar.compile(MLP(), mesh, args=(X,), plan=path),
        "plan and pins": lambda: autopar.compile(MLP(), mesh, args=(X,), plan=path, pins={"head.weight": "S(0)B"}),
        "plan of a wrong type": lambda: autopar.compile(MLP(), mesh, args=(X,), plan=7),
        "mesh too large": lambda: autopar.compile(MLP(), "4x2", args=(X,)),
        "untraceable": lambda: autopar.compile(Branches(), mesh, args=(X,)),
        "untraceable, later": lambda: autopar.compile(Branches(), mesh)(X),
        "no pin": lambda: autopar.compile(MLP(), mesh, args=(X,), pins={"nowhere": "BB"}),
        "no memory": lambda: autopar.compile(MLP(), mesh, args=(X,), memory_limit_bytes=10_000),
        "no cluster": lambda: autopar.compile(MLP(), mesh, args=(X,), cluster="h1000"),
        "sharded twice": lambda: autopar.compile(autopar.compile(MLP(), mesh, args=(X,)), mesh),
        "distributed": lambda: autopar.compile(distribute_module(MLP(), mesh, lambda name, module, mesh: None), mesh),
        "replicated": lambda: autopar.compile(DistributedDataParallel(MLP()), mesh),
        "a call of another kind": lambda: autopar.compile(MLP(), mesh, args=(X,))(X, X),
    }
    with pytest.raises(AutoparError) as error:
        wrong[case]()
    return f"{type(error.value).__name__}: {error.value}"


TOLD = {
    "other model": "PlanError: .*another model",
    "other batch": "PlanError: .*other input shapes",
    "other mesh": r"PlanError: .*\(2, 2\), this mesh is dp=4",
    "plan and pins": "cannot be combined",
    "plan of a wrong type": "expects a Plan or the path of its file, found builtins.int",
    "mesh too large": "MeshError: .*needs 8 ranks, the world has 4",
    "untraceable": r"TraceError: test_bad_input.py:\d+: `if y.sum",
    "untraceable, later": r"TraceError: test_bad_input.py:\d+: `if y.sum",
    "no pin": "PinError: .*'nowhere'",
    "no memory": "InfeasibleError",
    "no cluster": "no cluster 'h1000'",
    "sharded twice": "is a DTensor already",
    "distributed": "is a DTensor already",
    "replicated": "DistributedDataParallel",
    "a call of another kind": "TraceError: .*too many positional arguments",
}


@pytest.mark.multirank
@pytest.mark.parametrize("case", TOLD)
def test_every_rank_is_told(ranks4: Ranks, tmp_path: Path, case: str) -> None:
    texts = ranks4.run(compile_badly, case, str(_saved(tmp_path)) if "other" in case or "plan" in case else "")
    assert len(set(texts)) == 1 and re.search(TOLD[case], texts[0], re.DOTALL), texts


@pytest.mark.multirank
@pytest.mark.parametrize("damage", ["missing", "cut off", "edited", "not text"])
def test_damaged_plan_files_are_refused_on_every_rank(ranks4: Ranks, tmp_path: Path, damage: str) -> None:
    path = _saved(tmp_path)
    text = {"cut off": path.read_text()[:-100], "edited": _edited(path), "not text": "", "missing": ""}[damage]
    path.write_bytes(b"\xff\xfe\x00" if damage == "not text" else text.encode())
    if damage == "missing":
        path.unlink()
    told = {
        "missing": "cannot read plan",
        "cut off": "cut off",
        "edited": "changed after it was written",
        "not text": "cannot read plan",
    }
    texts = ranks4.run(compile_badly, "damaged", str(path))
    assert len(set(texts)) == 1 and texts[0].startswith(PlanError.__name__) and told[damage] in texts[0], texts


def plan_file_is_taken(path: str) -> bool:
    torch.manual_seed(0)
    model = autopar.compile(MLP(), device_mesh((2, 2), ("dp", "tp")), args=(X,), plan=path)
    unlike = [x for x in model.parameters() if x.placements != (Replicate(), Replicate())]
    model(X[:4])  # another batch: planned for the cluster of the file
    return bool(unlike) and model.plan.cluster.name == "free-links"


@pytest.mark.multirank
def test_a_good_plan_file_is_taken(ranks4: Ranks, tmp_path: Path) -> None:
    assert all(ranks4.run(plan_file_is_taken, str(_saved(tmp_path))))
