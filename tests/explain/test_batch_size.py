"""Batches that are too small for the devices are said to be, with one that is not."""

from dataclasses import replace

import pytest

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.explain.batch_size import _LITTLE, too_small
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.mesh import parse_devices
from autopar.models.catalogue import build_model
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from autopar.schedule.simulate import simulate


def planned(mesh: str, batch: int, cluster: str = "h100", model: str = "gpt-39b", **asked: object):
    example = build_model(model, layers=16, batch=batch)
    graph = trace(skeleton(example.model), example.args, dict(example.kwargs))
    request = PlanRequest(**{"time_limit_s": 3.0} | asked)
    return choose_plan(graph, parse_devices(mesh), load_cluster(cluster), request)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_batch_that_is_named_keeps_the_ranks_busy(schedule: str):
    # Without time for a search, which would cut for few microbatches: its plan's own bubble of many says little then.
    plan = planned("pp=8", 8, schedule=schedule, num_microbatches=8, time_limit_s=0.0)
    said = too_small(plan)
    assert said.batch == 8 and f"batch of {said.enough}" in plan.explain()

    def step_s(num: int) -> float:
        return simulate(replace(plan.schedule, num_microbatches=num), plan.times).step_s

    steady_s = (step_s(512) - step_s(256)) / 256  # what a microbatch takes where there are many

    def wasted(num: int) -> float:
        return 1 - num * steady_s / step_s(num)

    assert said.wasted == pytest.approx(wasted(8), abs=0.01)
    assert wasted(said.enough) <= _LITTLE + 1e-6 < wasted(said.enough - 8)


def test_a_batch_that_is_large_enough_is_not_mentioned():
    plan = planned("pp=4", 64, schedule="1f1b", num_microbatches=64)
    assert too_small(plan) is None and "too small" not in plan.explain()


def test_devices_that_repeat_each_others_work_are_named():
    plan = planned("64", 2, "cpu", "gpt2", num_microbatches=1)
    said = too_small(plan)
    assert said.enough == 64 and "repeat each other's work" in plan.explain()
    enough = planned("64", 64, "free-links", "gpt2", num_microbatches=1)
    assert too_small(enough) is None
