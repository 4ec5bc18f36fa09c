"""Predicted peaks: by hand on a stack of layers, and beside real runs on gloo ranks, allocation by allocation."""

from dataclasses import replace

import pytest

from autopar.codegen.peak import predict_peak
from autopar.costmodel.training import Training
from autopar.sbp.placement import I
from bench.memory import TOLERANCE, measure
from tests.costmodel.build import layer_stack
from tests.costmodel.test_evaluate import ACTIVATION, LAYERS, MESH, NUM_LAYERS, WEIGHT, data_parallel
from tests.workers import Ranks

PART = ACTIVATION // 4  # of an activation
STATE = NUM_LAYERS * WEIGHT * 3  # parameters and AdamW's state
GRAPH = layer_stack(NUM_LAYERS)


def test_the_parts_of_a_step_by_hand():
    peak = predict_peak(GRAPH, MESH, data_parallel(GRAPH, I))
    phases = dict(peak.phases)
    assert peak.stored_bytes == STATE + 8 * 4 + ACTIVATION  # the batch is there whole
    # all that is saved: two activations a layer, less the batch; the last layer's sum and what it adds besides
    assert phases["F0"] == peak.stored_bytes + (2 * NUM_LAYERS - 1) * PART + 2 * PART
    assert phases["update"] == peak.stored_bytes + NUM_LAYERS * WEIGHT + 2 * WEIGHT
    assert peak.total_bytes == max(phases.values()) == phases[peak.phase]


def test_microbatches_in_flight_hold_their_activations():
    graph = layer_stack(NUM_LAYERS, needs_grad=True)
    found = {}
    for num_in_flight, order in ((2, "FFBFBB"), (3, "FFFBBB")):
        counts = {"F": iter(range(3)), "B": iter(range(3))}
        actions = [(kind, next(counts[kind])) for kind in order]
        training = Training("adamw", 3, num_in_flight)
        found[num_in_flight] = dict(predict_peak(graph, MESH, data_parallel(graph, I), training=training, actions=actions).phases)
    each = (2 * NUM_LAYERS + 1) * PART  # saved, received and sent
    assert found[3]["F1"] - found[3]["F0"] == found[3]["F2"] - found[3]["F1"] == each
    # the first backward has let one go, and left gradients
    assert found[2]["F1"] == found[3]["F1"] and found[2]["F2"] == found[2]["F1"] + NUM_LAYERS * WEIGHT


def test_a_recomputed_layer_keeps_what_enters_it():
    graph = layer_stack(NUM_LAYERS)
    plain, again = (predict_peak(graph, MESH, data_parallel(graph, I, recomputed=regions)) for regions in ((), LAYERS))
    # relu's results are dropped; the last is there while it is made
    assert dict(plain.phases)["F0"] - dict(again.phases)["F0"] == (NUM_LAYERS - 1) * PART


def test_an_offloaded_layer_keeps_nothing():
    graph = layer_stack(NUM_LAYERS)
    for again, transient in (((), 3), (LAYERS, 4)):  # a layer's last three results; what enters a region is there as long as it runs
        assignment = replace(data_parallel(graph, I, recomputed=again), offloaded=LAYERS)
        found = predict_peak(graph, MESH, assignment)
        assert dict(found.phases)["F0"] == found.stored_bytes + transient * PART


def test_the_optimizer_counts():
    plain = predict_peak(GRAPH, MESH, data_parallel(GRAPH, I), training=Training("sgd"))
    master = predict_peak(GRAPH, MESH, data_parallel(GRAPH, I), training=replace(Training(), optimizer="adamw-master"))
    assert master.stored_bytes - plain.stored_bytes == 3 * NUM_LAYERS * WEIGHT


@pytest.mark.multirank
@pytest.mark.parametrize(("name", "kind"), [("mlp", "zero3"), ("llama", "recomputed"), ("gpt2", "4 microbatches")])
def test_a_prediction_is_what_ranks_measure(ranks4: Ranks, name: str, kind: str):
    row = measure(ranks4, name, kind)
    assert abs(row.error) < TOLERANCE, (row.predicted, row.measured)
    assert row.predicted.phase in row.measured[0]
