"""What `explain` shows: text with its numbers masked, and that nothing is left out or counted twice."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from autopar.explain.report import report
from autopar.explain.text import format_report
from autopar.mesh import Mesh
from autopar.plans.plan import plan_of
from autopar.plans.serialise import HandCosts
from tests.planner.cases import CPU, MESH, by_hand, hand_made, traced
from tests.zoo import ZOO

GOLDEN = """\
Plan for mesh dp=2,tp=2 on cluster cpu (SOURCE), optimizer adamw.
Placements by mesh axis: S(d) split along dim d, P pending sum, B whole, B* whole with its gradient a pending sum.
Step #; no lower bound.
A call of model(...) gathers a split output, # on every device in #; train_step does not, nor does outputs="sharded".

Ops (0 views that follow their input without communication are left out):
op copies on dp=2 on tp=2 collectives per step source
%linear 1 S(0) B* B* -> S(0) B S(0) S(0) -> S(1) blocks.0.0 LINE
%gelu 1 S(0) -> S(0) S(1) -> S(1) blocks.0.1 LINE
%linear_1 1 S(0) B* B* -> S(0) S(1) S(1) P -> P forward 1 all_reduce tp #, # blocks.0.2 LINE
%add 1 S(0) S(0) -> S(0) B B -> B backward 1 all_reduce tp #, # LINE
%linear_2 1 S(0) B* B* -> S(0) B* S(0) S(0) -> S(1) blocks.1.0 LINE
%gelu_1 1 S(0) -> S(0) S(1) -> S(1) blocks.1.1 LINE
%linear_3 1 S(0) B* B* -> S(0) S(1) S(1) P -> P forward 1 all_reduce tp #, # blocks.1.2 LINE
%add_1 1 S(0) S(0) -> S(0) B B -> B backward 1 all_reduce tp #, # LINE
%linear_4 1 S(0) B* B* -> S(0) B* S(0) S(0) -> S(1) head LINE

Parameters, buffers, constants and arguments (a bucket of gradients is listed at its first parameter):
name copies kind value layout collectives per step
blocks.0.0.weight 1 parameter f64[128, 32] BS(0) backward 1 all_reduce dp #, #
blocks.0.0.bias 1 parameter f64[128] BS(0)
blocks.0.2.weight 1 parameter f64[32, 128] BS(1) backward 1 all_reduce dp #, #
blocks.0.2.bias 1 parameter f64[32] BS(0) backward 1 all_reduce dp #, #
blocks.1.0.weight 1 parameter f64[128, 32] BS(0)
blocks.1.0.bias 1 parameter f64[128] BS(0)
blocks.1.2.weight 1 parameter f64[32, 128] BS(1)
blocks.1.2.bias 1 parameter f64[32] BS(0) backward 1 all_reduce dp #, #
head.weight 1 parameter f64[16, 32] BS(0)
head.bias 1 parameter f64[16] BS(0)
x 1 argument f64[8, 32] S(0)B

Collectives per step:
phase axis kind number bytes time
forward tp all_reduce 2 # #
backward dp all_reduce 4 # #
backward tp all_reduce 2 # #

Memory per device:
kind bytes
parameters #
gradients #
optimizer #
arguments #
activations #
total #

Time per step:
kind time
compute forward #
compute backward #
communication forward #
communication backward #
optimizer #
step #

Every op has a sharding rule.

The size of every mesh axis divides every dim that it could split.

Whole although large, and what a split would save at most (--why NAME tells why):
tensor or op copies whole on memory of each device repeated time of a step
blocks.0.0.weight 1 dp # #
blocks.0.2.weight 1 dp # #
blocks.1.0.weight 1 dp # #
blocks.1.2.weight 1 dp # #
head.weight 1 dp # #
"""


def masked(text):
    """Without numbers of seconds and bytes, sources, lines and column widths, which depend on them."""
    text = re.sub(r"\([^()]*(\([^()]*\))*[^()]*\), optimizer", "(SOURCE), optimizer", text)
    text = re.sub(r"[\d.e+-]+ (s|ms|us|B|KiB|MiB|GiB)\b|[\d.]+%", "#", text)
    text = re.sub(r"\S*\.py:\d+", "LINE", text)
    return re.sub(r"\n[- ]+\n", "\n", re.sub(r" +", " ", re.sub(r" +\n", "\n", text)))


def test_sections_come_in_order():
    text = format_report(report(hand_made("mlp")))
    starts = [
        text.index(title)
        for title in (
            "Plan for",
            "Ops (",
            "Parameters,",
            "Collectives per",
            "Memory per",
            "Time per",
            "Every op",
            "The size of every mesh",
        )
    ]
    assert starts == sorted(starts)


def test_equal_plans_give_equal_text():
    graph = traced("gpt2")
    again = plan_of(graph, by_hand("gpt2", "megatron"), MESH, CPU)
    assert again.explain() == hand_made("gpt2").explain()


@pytest.mark.parametrize("name", ZOO)
def test_every_collective_is_in_exactly_one_row(name):
    plan = hand_made(name)
    found = report(plan)
    rows = Counter()
    for owner in (*found.ops, *found.inputs):
        for row in owner.collectives:
            rows[row.phase, row.kind, row.axis, row.num_bytes] += row.count
    collectives = [planned.collective for planned in plan.costs.collectives]
    assert rows == Counter((c.phase, c.kind, plan.mesh.name_of(c.axes), c.num_bytes) for c in collectives)
    assert sum(row.num_bytes for row in found.totals) == sum(c.num_bytes for c in collectives)
    assert sum(found.time_s.values()) == pytest.approx(found.step_s) == pytest.approx(plan.costs.step_s)


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_every_op_and_input_is_counted(name):
    found, graph = report(hand_made(name)), traced(name)
    assert sum(row.count for row in found.ops) == len(graph.ops)
    assert sum(row.count for row in found.inputs) == len(graph.inputs)


def test_views_are_left_out_of_the_text_and_not_of_the_data():
    found = report(hand_made("gpt2"))
    quiet = [row for row in found.ops if row.is_quiet_view]
    text = format_report(found)
    assert quiet and f"({len(quiet)} views that follow" in text
    assert not any(re.search(rf"^%{row.name}\b", text, re.MULTILINE) for row in quiet)
    assert all(re.search(rf"^%{row.name}\b", text, re.MULTILINE) for row in found.ops if not row.is_quiet_view)


def test_json_is_the_same_content():
    found = report(hand_made("resnet"))
    data = json.loads(json.dumps(found.as_json()))
    assert data["step_s"] == found.step_s and len(data["ops"]) == len(found.ops)
    assert data["memory_limit_bytes"] is None


def test_ops_without_rule_are_listed_with_their_cost():
    plan = hand_made("mlp")
    graph = replace(
        plan.graph,
        ops=tuple(replace(op, target="aten.unheard.of") if "gelu" in op.target else op for op in plan.graph.ops),
    )
    unruled = next(op.name for op in graph.ops if op.target == "aten.unheard.of")
    changed = replace(plan, graph=graph)
    vars(changed)["without_rule"] = {unruled: 0.002}
    text = format_report(report(changed))
    assert re.search(rf"discovered by running samples:\n.*\n.*\n%{unruled} +aten\.unheard\.of +2 ms +whole", text)


def test_dims_an_axis_does_not_divide_are_listed():
    text = hand_made("mlp", "ddp", Mesh((64,), ("many",))).explain()
    assert re.search(r"many +head\.weight +0 +16 +16 *\n", text)
    plan = hand_made("mlp", "ddp", Mesh((3,), ("odd",)))
    assert "parts that differ" in plan.explain() and "a step longer than on equal parts" in plan.explain()
    # 8 rows in parts of 3, 3 and 2
    assert report(plan).uneven_s == pytest.approx((plan.costs.compute_forward_s + plan.costs.compute_backward_s) / 9)


def test_hand_plans_are_compared():
    plan = hand_made("mlp")
    text = format_report(report(replace(plan, hand={"ddp": HandCosts(2 * plan.costs.step_s, 2**20)})))
    assert re.search(r"this plan .* 1\.00 .*\nddp .* 2\.00 +1 MiB", text) and "exceeds the limit" not in text


def test_what_does_not_fit_says_so():
    plan = hand_made("mlp")
    most = plan.costs.total_memory_bytes
    text = format_report(report(replace(plan, memory_limit_bytes=most, hand={"ddp": HandCosts(1.0, most + 1)})))
    assert re.search(r"\nddp .* exceeds the limit", text) and text.count("exceeds the limit") == 1
    assert re.search(
        r"Memory per device \(limit .*, exceeds the limit\)",
        format_report(report(replace(plan, memory_limit_bytes=most - 1))),
    )


def test_golden_text():
    assert masked(hand_made("mlp").explain()) == GOLDEN.removesuffix("\n")
