"""Memory over a step, and what choices that save memory gain and cost, beside figures that are counted or priced in
another way.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import InfeasibleError
from autopar.explain.explain_plan import plan_trace
from autopar.explain.memory_over_time import memory_over_time
from autopar.explain.memory_savings import costs_without, memory_savings
from autopar.explain.staged_text import format_staged, staged_json
from autopar.schedule import simulate
from autopar.schedule.timeline import format_counts

SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "interleaved")


class Net(nn.Module):
    """Four blocks and a mean loss."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(x, y)


def planned(mesh="pp=2,dp=2", *, batch=16, **request):
    example = (torch.zeros(batch, 64), torch.zeros(batch, 64))
    return autopar.plan(Net(), mesh, args=example, **({"num_microbatches": 4, "cluster": "cpu"} | request))


@pytest.fixture(scope="module")
def plans():
    return {name: planned(schedule=name) for name in SCHEDULES}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_worst_moment_is_what_the_limit_is_compared_with(plans, name):
    plan = plans[name]
    for rank in range(2):
        worst = max(moment.total_bytes for moment in memory_over_time(plan, rank))
        if name == "interleaved":  # the stages of a rank have their worst at different times
            assert worst <= plan.memory_bytes[rank]
        else:
            assert worst == plan.memory_bytes[rank]


@pytest.mark.parametrize("name", SCHEDULES)
def test_microbatches_in_flight_are_those_begun_and_not_done(plans, name):
    plan = plans[name]
    last = "W" if name == "zero-bubble" else "B"
    for rank, row in enumerate(plan.timeline.rows):
        for moment in memory_over_time(plan, rank):
            begun = {span.action[1:] for span in row if span.action.kind == "F" and span.start_s <= moment.start_s}
            done = {span.action[1:] for span in row if span.action.kind == last and span.end_s < moment.start_s}
            late = {span.action[1:] for span in row if span.action.kind == last and span.end_s == moment.start_s}
            starting = {span.action[1:] for span in row if span.action.kind == "F" and span.start_s == moment.start_s}
            # at one time several things change, one after the other
            assert len(begun - done - late - starting) <= moment.in_flight <= len(begun - done)


def test_a_step_begins_and_ends_with_nothing_in_flight(plans):
    for rank in range(2):
        first, *_, last = memory_over_time(plans["1f1b"], rank)
        assert first.in_flight == last.in_flight == 0
        assert (
            first.bytes_by_kind["gradients"] == 0 < last.bytes_by_kind["gradients"] == last.bytes_by_kind["parameters"]
        )
        assert first.bytes_by_kind["activations"] == last.bytes_by_kind["activations"] == 0


def test_counts_are_drawn_in_the_middle_of_each_column():
    assert (
        format_counts([[(0.0, 0), (2.0, 1), (2.0, 3), (5.0, 12)], [(0.0, 40)]], 8.0, 8)
        == "rank 0 |00333ccc|\nrank 1 |++++++++|"
    )


def test_text_json_and_trace_say_the_same(plans):
    plan = plans["1f1b"]
    text, content = format_staged(plan), staged_json(plan)
    assert "peak, " in text and "Microbatches in flight over the step:\nrank 0 |" in text
    worst = [
        max(sum(moment["bytes"].values()) for moment in row)
        for row in json.loads(json.dumps(content))["memory_over_time"]
    ]
    assert worst == list(plan.memory_bytes)
    events = json.loads(plan_trace(plan))["traceEvents"]
    assert max(event["ts"] + event.get("dur", 0.0) for event in events if "ts" in event) == pytest.approx(
        1e6 * plan.step_s
    )
    assert {"update"} <= {event["name"] for event in events if event.get("cat") == "once a step"}
    counters = [event for event in events if event["ph"] == "C"]
    assert max(sum(event["args"].values()) for event in counters if "rank 1" in event["name"]) == plan.memory_bytes[1]


def test_microbatches_are_compared_with_the_plan_of_one_pass():
    plan = planned("dp=2")
    (found,) = (one for one in memory_savings(plan) if one.choice == "4 microbatches")
    whole = planned("dp=2", num_microbatches=1)
    kept = plan.stages[0].assignment
    strategies = {name: kept.strategies[name] for name in whole.assignment.strategies}
    same = replace(kept, strategies=strategies, outputs=whole.assignment.outputs)
    text = replace(whole, assignment=same)
    again = type(text).loads(text.dumps(), whole.graph, whole.mesh)
    assert found.step_s_without == pytest.approx(again.step_s, rel=1e-9)
    assert found.bytes_without == again.costs.total_memory_bytes


def test_recomputed_blocks_save_what_the_plan_without_them_takes_more():
    plan = planned("pp=2", batch=4096, schedule="1f1b", memory_limit_bytes=9.2e6)
    found = {int(one.where): one for one in memory_savings(plan) if one.choice == "activation checkpointing"}
    assert found and found.keys() == {number for number, stage in enumerate(plan.stages) if stage.assignment.recomputed}
    for number, one in found.items():
        stage = plan.stages[number]
        other = replace(stage, assignment=replace(stage.assignment, recomputed=()))
        again = type(stage).loads(other.dumps(), stage.graph, stage.mesh)
        assert one.bytes_without == again.costs.total_memory_bytes > stage.costs.total_memory_bytes
        assert one.step_s_without < one.step_s == plan.step_s


def test_the_least_memory_named_is_enough_and_less_is_not():
    """Where no optimizer state can go to the host: that does not lower the peak of so small a model, which is in the
    update.
    """
    asked = {"schedule": "1f1b", "cluster": replace(load_cluster("cpu"), host_bandwidth_bytes_per_s=0.0)}
    with pytest.raises(InfeasibleError) as found:
        planned(memory_limit_bytes=1e4, **asked)
    least = float(str(found.value).split("needs ")[1].split(" bytes")[0])
    assert max(planned(memory_limit_bytes=1.01 * least, **asked).memory_bytes) <= 1.01 * least
    with pytest.raises(InfeasibleError):
        planned(memory_limit_bytes=0.9 * least, **asked)


def test_the_schedule_is_put_in_order_once_for_all_choices(monkeypatch: pytest.MonkeyPatch):
    plan = planned("pp=2", batch=4096, schedule="1f1b", memory_limit_bytes=9.2e6)
    assert plan.step_s > 0  # the plan's own timeline is kept
    calls, original = [], simulate.generations
    monkeypatch.setattr(simulate, "generations", lambda schedule: calls.append(schedule) or original(schedule))
    found = [one for one in memory_savings(plan) if one.where != "all"]
    assert found and calls.count(plan.schedule) == 1
    for one in found:
        stage = plan.stages[int(one.where)]
        [costs] = [costs for choice, costs in costs_without(stage) if choice == one.choice]
        stages = [replace(each, costs=costs) if each is stage else each for each in plan.stages]
        assert one.step_s_without == replace(plan, stages=tuple(stages)).step_s
