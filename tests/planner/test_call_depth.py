"""The functions on the call stack between the public call and the search: a reader of a traceback sees the stages."""

import math
import sys
import traceback
from pathlib import Path

import pytest
import torch

import autopar
from autopar.mesh import Devices, Mesh, as_mesh, parse_mesh
from autopar.planner import problem
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from bench.simulated import one_rank_of
from tests.costmodel.build import layer_stack
from tests.planner.cases import CPU, traced
from tests.zoo import build

MOST, MOST_WITH_STAGES = 8, 13
PACKAGE = Path(autopar.__file__).parent


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The functions of the package on the stack at each call of `solve`, outermost first, `solve` included."""
    found, solve = [], problem.solve

    def recorded(*args: object, **kwargs: object) -> object:
        frames = traceback.extract_stack(sys._getframe(1))
        found.append([*(frame.name for frame in frames if PACKAGE in Path(frame.filename).parents), "solve"])
        return solve(*args, **kwargs)

    monkeypatch.setattr(problem, "solve", recorded)
    return found


@pytest.mark.parametrize("mesh", ["2x2", "4"])
def test_compile_is_few_functions_above_the_search(stacks: list[list[str]], mesh: str) -> None:
    with torch.device("meta"):
        case = build("mlp")
    with one_rank_of(parse_mesh(mesh) if "x" in mesh else Mesh((4,), ("devices",))) as devices:
        autopar.compile(
            case.model,
            devices if "x" in mesh else 4,
            args=case.args,
            kwargs=case.kwargs,
            cluster="cpu",
            num_microbatches=1,
            check=False,
        )
    assert stacks and all(stack[0] == "compile" and len(stack) <= MOST for stack in stacks), stacks


@pytest.mark.parametrize(
    ("name", "mesh", "share", "most"),
    [
        ("layers", "2x2", 0.6, MOST),  # two groups of layers, and optimizer state on the host
        ("mlp", "2x2x2x2", 1.0, MOST),  # around the plan of a coarser mesh
        ("mlp", "16", 1.0, MOST),
        ("gpt2", "pp=2,dp=2", 0.8, MOST_WITH_STAGES),
    ],
)
def test_all_searches_are_few_functions_below_the_choice_of_a_plan(
    stacks: list[list[str]], name: str, mesh: str, share: float, most: int
) -> None:
    graph, num = layer_stack(6) if name == "layers" else traced(name), None if "pp" in mesh else 1

    def planned(limit: float) -> Plan | StagedPlan:
        request = PlanRequest(memory_limit_bytes=limit, num_microbatches=num, time_limit_s=5.0)
        return choose_plan(graph, as_mesh(mesh), CPU, request, predict=lambda plan: plan.memory_bytes)

    planned(share * max(planned(math.inf).memory_bytes) if share < 1.0 else math.inf)
    depth = max(len(stack[stack.index("choose_plan") :]) for stack in stacks)
    above = 2 if isinstance(as_mesh(mesh), Devices) else 3  # functions of `compile`, as the test above shows
    assert depth + above <= most, max(stacks, key=len)
