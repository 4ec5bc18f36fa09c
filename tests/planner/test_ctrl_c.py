"""Ctrl-C where planning has a plan already."""

import os
import signal
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Mesh, parse_devices
from autopar.models.catalogue import build_model
from autopar.planner.choose import choose_plan
from autopar.planner.layouts import search_mesh, search_meshes
from autopar.planner.pipeline import sweep
from autopar.planner.request import PlanRequest


@cache
def gpt2() -> Graph:
    example = build_model("gpt2", layers=4)
    return trace(skeleton(example.model), example.args, dict(example.kwargs))


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Python's own; a shell that runs tests in the background has the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def strike() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("place", ["tuned", "hand_plans"])
def test_ctrl_c_after_a_plan_in_stages_leaves_what_looks_at_no_deadline(monkeypatch: pytest.MonkeyPatch, place: str):
    """llama3-405b on 16384 devices went on for 10 s, in pricing hand plans whose rings have hundreds of ranks."""

    def endless(*_: Any, **__: Any) -> None:
        strike()
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            pass
        pytest.fail("was not left")

    monkeypatch.setattr(search_meshes if place == "tuned" else search_mesh, place, endless)
    found = choose_plan(gpt2(), parse_devices("8"), load_cluster("v100"))
    assert found.found_by.endswith("ended by Ctrl-C") and found.step_s > 0


def test_ctrl_c_in_the_second_mesh_keeps_the_plan_of_the_first(monkeypatch: pytest.MonkeyPatch):
    meshes: list[Mesh] = []

    def hand_plans(graph: Graph, folded: Any, everything: Any, mesh: Mesh) -> Any:
        meshes.append(mesh)
        if len(meshes) > 1:
            strike()
            time.sleep(60.0)
            pytest.fail("was not left")
        return search_mesh_hand_plans(graph, folded, everything, mesh)

    search_mesh_hand_plans = search_mesh.hand_plans
    monkeypatch.setattr(search_mesh, "hand_plans", hand_plans)
    request = PlanRequest(num_microbatches=1)  # no stages
    found = choose_plan(gpt2(), parse_devices("8"), load_cluster("v100"), request)
    assert len(meshes) == 2 and found.mesh == meshes[0]
    assert found.found_by.endswith("ended by Ctrl-C") and max(found.memory_bytes) <= found.memory_limit_bytes


def test_ctrl_c_ends_the_sweep_of_stages_once_a_few_more_points_were_tried(monkeypatch: pytest.MonkeyPatch):
    """What is late by the time limit is tried for half that time more; after Ctrl-C nobody waits for that."""
    tried: list[Mesh] = []

    def profiled(model: Any, plans: Any, num: int, mesh: Mesh, *rest: Any) -> Any:
        tried.append(mesh)
        if len(tried) == 2:
            strike()
        return real(model, plans, num, mesh, *rest)

    real = sweep.profiled
    monkeypatch.setattr(sweep, "profiled", profiled)
    found = choose_plan(gpt2(), parse_devices("16"), load_cluster("v100"))
    assert found.found_by.endswith("ended by Ctrl-C") and len(tried) == 4
