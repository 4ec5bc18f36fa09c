"""Predicted peaks: by hand on a stack of layers, and beside real runs on gloo ranks, allocation by allocation."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.training import Training
from autopar.ir.folding.fold import fold
from autopar.ir.split_stages import cut_points
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.peak_memory.predict import predict_peak, predict_peaks, rank_peaks
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.plans.plan import plan_of
from autopar.plans.staged_plan import StagedPlan, stage_graphs
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import I
from autopar.schedule.orders import Schedule, num_in_flight
from autopar.schedule.timeline import Action
from bench.memory import TOLERANCE, measure, measure_on_rank, plan_called, sample_of
from bench.memory_stages import KINDS, MESHES, measure_stages, staged_plan
from tests.costmodel.build import layer_stack
from tests.costmodel.test_evaluate import ACTIVATION, LAYERS, MESH, NUM_LAYERS, WEIGHT, data_parallel
from tests.models.written.models import build_written
from tests.peak_memory.test_few_copies import with_prefetch
from tests.planner.cases import CPU, traced
from tests.planner.cases import folded as folded_graph
from tests.workers import Ranks

PART = ACTIVATION // 4  # of an activation
STATE = NUM_LAYERS * WEIGHT * 3  # parameters and AdamW's state
GRAPH = layer_stack(NUM_LAYERS)


def test_the_parts_of_a_step_by_hand():
    peak = predict_peak(GRAPH, MESH, data_parallel(GRAPH, I))
    phases = dict(peak.phases)
    assert peak.stored_bytes == STATE + 8 * 4 + ACTIVATION  # the batch is there whole
    # all that is saved: two activations a layer, less the batch; the last layer's sum and what it adds besides
    assert phases["0F0"] == peak.stored_bytes + (2 * NUM_LAYERS - 1) * PART + 2 * PART
    assert phases["update"] == peak.stored_bytes + NUM_LAYERS * WEIGHT + 2 * WEIGHT
    assert peak.total_bytes == max(phases.values()) == phases[peak.phase]


def test_microbatches_in_flight_hold_their_activations():
    graph = layer_stack(NUM_LAYERS, needs_grad=True)
    found = {}
    for most, order in ((2, "FFBFBB"), (3, "FFFBBB")):
        counts = {"F": iter(range(3)), "B": iter(range(3))}
        actions = [Action(kind, 0, next(counts[kind])) for kind in order]
        training = Training("adamw", 3, most)
        found[most] = dict(
            predict_peak(graph, MESH, data_parallel(graph, I), training=training, actions=actions).phases
        )
    each = (2 * NUM_LAYERS + 1) * PART  # saved, received and sent
    assert found[3]["0F1"] - found[3]["0F0"] == found[3]["0F2"] - found[3]["0F1"] == each
    # the first backward has let one go, and left gradients, also what it sends
    assert found[2]["0F1"] == found[3]["0F1"] and found[2]["0F2"] == found[2]["0F1"] + NUM_LAYERS * WEIGHT + PART


def test_a_backward_in_two_parts_lets_go_in_the_second_of_more():
    graph, training = layer_stack(NUM_LAYERS, needs_grad=True), Training("adamw", 2, 2)
    found = []
    for order in ("F0 B0 F1 B1", "F0 I0 F1 W0 I1 W1"):
        actions = [Action(kind, 0, int(number)) for kind, number in order.split()]
        found.append(predict_peak(graph, MESH, data_parallel(graph, I), training=training, actions=actions))
    at_once, in_two = (dict(peak.phases) for peak in found)
    # between them: the gradient that came, the one that goes, one of each product; but not the last layer's relu
    first = (2 * NUM_LAYERS + 1 + 2 + NUM_LAYERS - 1) * PART
    assert in_two["0F1"] - in_two["0F0"] == first and in_two["reduce"] == at_once["reduce"]


def test_the_first_stage_of_1f1b_holds_more_microbatches_than_the_last():
    schedule, training, submesh = Schedule("1f1b", 2, 2, 4), Training("adamw", 4, 2), Mesh((2,), ("dp",))
    graph, folded = traced("gpt2"), folded_graph("gpt2")
    starts = (cut_points(folded, graph)[1],)  # the second of two blocks
    stages = []
    for number, stage in enumerate(stage_graphs(graph, starts, schedule.num_microbatches)[1]):
        found = fold(stage.graph)
        assignment = hand_plan(
            parse_hand_plan("ddp", submesh), stage.graph, found, annotate(stage.graph, submesh, found), submesh
        )
        training = Training("adamw", 4, num_in_flight(schedule, number))
        stages.append(plan_of(stage.graph, assignment, submesh, CPU, training=training))
    plan = StagedPlan(
        Mesh((2, 2), ("pp", "dp")), CPU, Training("adamw", 4), math.inf, graph, schedule, starts, tuple(stages)
    )
    first, last = (dict(peak.phases) for peak in predict_peaks(plan))
    assert list(first)[:4] == ["gather", "0F0", "0F1", "0B0"] and list(last)[:4] == ["gather", "1F0", "1B0", "1F1"]
    assert first["0F1"] - first["0F0"] > 0.9 * stages[0].costs.memory_bytes["activations"] / 2
    # one after the other: no more than a second gradient on its way back is added
    sent = sum(value.num_bytes for value in stages[0].graph.outputs) // 2
    assert max(last[f"1F{i}"] for i in range(1, 4)) == last["1F1"] + sent


def test_a_recomputed_layer_keeps_what_enters_it():
    graph = layer_stack(NUM_LAYERS)
    plain, again = (predict_peak(graph, MESH, data_parallel(graph, I, recomputed=regions)) for regions in ((), LAYERS))
    # relu's results are dropped; the last is there while it is made
    assert dict(plain.phases)["0F0"] - dict(again.phases)["0F0"] == (NUM_LAYERS - 1) * PART


def test_an_offloaded_layer_keeps_nothing():
    graph = layer_stack(NUM_LAYERS)
    # a layer's last three results; what enters a region is there as long as it runs
    for again, transient in (((), 3), (LAYERS, 4)):
        assignment = replace(data_parallel(graph, I, recomputed=again), offloaded=LAYERS)
        found = predict_peak(graph, MESH, assignment)
        assert dict(found.phases)["0F0"] == found.stored_bytes + transient * PART


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).float().sum()


def test_what_is_fetched_from_the_host_is_where_the_kernels_of_a_gpu_are():
    """Backward runs outside of the default device; FlashAttention's refuses operands on another device."""
    graph = trace(_Attention().to("meta"), (torch.empty(4, 8, 32, dtype=torch.bfloat16, device="meta"),), {})
    assignment = hand_plan(parse_hand_plan("ddp", MESH), graph, fold(graph), annotate(graph, MESH), MESH)
    assignment = replace(assignment, offloaded=(tuple(op.name for op in graph.ops),))
    plan = plan_of(graph, assignment, MESH, PRESETS["h100"])
    assert rank_peaks(plan)[0] > 0


def test_the_optimizer_counts():
    plain = predict_peak(GRAPH, MESH, data_parallel(GRAPH, I), training=Training("sgd"))
    master = predict_peak(GRAPH, MESH, data_parallel(GRAPH, I), training=replace(Training(), optimizer="adamw-master"))
    assert master.stored_bytes - plain.stored_bytes == 3 * NUM_LAYERS * WEIGHT


@pytest.mark.parametrize("name", ["pinn", "energy-based"])
def test_models_whose_forward_takes_gradients_have_plans_in_stages(name: str):
    model, kwargs = build_written(f"by-hand:{name}")
    plan = autopar.plan(model, "pp=2,dp=2", cluster="free-links", kwargs=kwargs, num_microbatches=2, time_limit_s=3)
    assert all(peak.total_bytes > 0 for peak in predict_peaks(plan))


@pytest.mark.parametrize(
    ("name", "mesh", "schedule"), [("mlp", *KINDS[0]), ("gpt2", *KINDS[1]), ("llama", *KINDS[5]), ("gpt2", *KINDS[6])]
)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_stages_replayed_take_what_they_take_when_run(name: str, mesh: str, schedule: str, device_type: str):
    plan = staged_plan(sample_of(name), mesh, schedule)
    plan = replace(plan, cluster=replace(plan.cluster, device_type=device_type))
    assert predict_peaks(plan) == predict_peaks(plan, is_whole=True)


@pytest.mark.multirank
@pytest.mark.parametrize(("name", "kind"), [("mlp", "zero3"), ("llama", "recomputed"), ("gpt2", "4 microbatches")])
def test_a_prediction_is_what_ranks_measure(ranks4: Ranks, name: str, kind: str):
    row = measure(ranks4, name, kind)
    assert abs(row.error) < TOLERANCE, (row.predicted, row.measured)
    assert row.predicted.phase in row.measured[0]


@pytest.mark.multirank
@pytest.mark.parametrize(("name", "kind"), [("gpt2", "ddp"), ("gpt2", "zero3"), ("llama", "4 microbatches")])
def test_a_prediction_in_bfloat16_over_float32_is_what_ranks_measure(ranks4: Ranks, name: str, kind: str):
    row, stored = measure(ranks4, name, kind, "bfloat16"), measure(ranks4, name, kind)
    assert abs(row.error) < TOLERANCE, (row.predicted, row.measured)
    assert row.predicted.phase in row.measured[0]
    assert row.measured_bytes < stored.measured_bytes


@pytest.mark.multirank
@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_what_is_gathered_ahead_counts(ranks4: Ranks, name: str):
    plan = plan_called(name, "zero3")
    plan = replace(plan, assignment=with_prefetch(plan.graph, plan.assignment))
    predicted = predict_peak(plan.graph, plan.mesh, plan.assignment)
    for measured in ranks4.run(measure_on_rank, name, plan):
        assert max(measured.values()) == pytest.approx(predicted.total_bytes, rel=TOLERANCE)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "mesh", "schedule"), [("mlp", MESHES[0], "zero-bubble"), ("gpt2", MESHES[1], "interleaved")]
)
def test_ranks_of_a_pipeline_take_what_is_predicted(ranks4: Ranks, name: str, mesh: str, schedule: str):
    rows = measure_stages(ranks4, name, sample_of(name), mesh, schedule)
    assert [row.rank for row in rows] == [0, 1]
    for row in rows:
        assert abs(row.error) < TOLERANCE, (row.predicted, row.measured)
        assert row.predicted.phase in row.measured
