"""What microbatches and recomputed regions do to a step, worked out by hand on a stack of layers."""

from dataclasses import replace

import pytest

from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.evaluate import Costs, evaluate
from autopar.costmodel.training import Training
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.mesh import parse_mesh
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import I, R, S
from autopar.sbp.signature import Signature, Strategy
from tests.costmodel.build import layer_stack

NUM_LAYERS, ACTIVATION, WEIGHT = 3, 16 * 8 * 4, 8 * 8 * 4
MESH = parse_mesh("4")
LAYERS = tuple(tuple(f"{name}{i}" for name in ("mm", "relu", "mul", "add")) for i in range(NUM_LAYERS))


def data_parallel(graph: Graph, stored: object, **fields: object) -> Assignment:
    """The batch split, weights read whole, from where they are stored."""
    read = {"mm": ((S(0), R), S(0)), "relu": ((S(0),), S(0)), "mul": ((S(0), R), S(0)), "add": ((S(0), S(0)), S(0))}
    strategies = {}
    for op in graph.ops:
        inputs, output = read[op.name.rstrip("0123456789")]
        inputs = tuple(I if p == R and not v.needs_grad else p for p, v in zip(inputs, op.inputs))
        strategies[op.name] = Strategy((Signature(inputs, (output,)),))
        assert strategies[op.name] in annotate(graph, MESH).strategies[op.name]
    layouts = {"x": (S(0),), "scale": (I,)} | {f"w{i}": (stored,) for i in range(NUM_LAYERS)}
    kept = {"x": (S(0),), "scale": (I,)} | {f"add{i}": (S(0),) for i in range(NUM_LAYERS - 1)}
    return Assignment(strategies, layouts, kept, {f"add{NUM_LAYERS - 1}": (S(0),)}, **fields)


def costs_of(stored: object, training: Training, host: float | None = None, **fields: object) -> Costs:
    graph, cluster = layer_stack(NUM_LAYERS, needs_grad=True), PRESETS["cpu"]
    cluster = cluster if host is None else replace(cluster, host_bandwidth_bytes_per_s=host)
    return evaluate(graph, data_parallel(graph, stored, **fields), MESH, cluster, training=training)


def issued(costs: Costs) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for planned in costs.collectives:
        key = planned.collective.phase, planned.collective.kind
        found[key] = found.get(key, 0) + costs.num_issued(planned)
    return found


def test_gradients_of_whole_parameters_are_reduced_once_whatever_the_microbatches():
    one, four = costs_of(I, Training()), costs_of(I, Training("adamw", 4, 2))
    assert issued(one) == issued(four) == {("backward", "all_reduce"): 1}
    assert four.compute_forward_s == 4 * one.compute_forward_s and four.optimizer_s == one.optimizer_s
    assert four.step_s == pytest.approx(
        4 * (four.microbatch_s("forward") + four.microbatch_s("backward")) + four.once_s
    )
    # relu saves its result, mm its input: two activations a layer, but the first input is what another stage sends
    assert one.memory_bytes["activations"] == (2 * NUM_LAYERS - 1) * ACTIVATION // 4
    assert four.memory_bytes["activations"] == 2 * one.memory_bytes["activations"]
    assert four.memory_bytes["arguments"] == 2 * one.memory_bytes["arguments"] and "gathered" not in four.memory_bytes


def test_what_is_gathered_once_is_there_for_the_whole_step_and_so_are_its_gradients():
    kept, four = costs_of(S(0), Training()), costs_of(S(0), Training("adamw", 4, 2))
    assert (
        issued(kept)
        == issued(four)
        == {("forward", "all_gather"): NUM_LAYERS, ("backward", "reduce_scatter"): NUM_LAYERS}
    )
    assert kept.memory_bytes["gathered"] == NUM_LAYERS * WEIGHT
    assert four.memory_bytes["gathered"] == NUM_LAYERS * (WEIGHT + WEIGHT - WEIGHT // 4)


def test_what_is_regathered_is_gathered_twice_in_every_microbatch():
    costs = costs_of(S(0), Training("adamw", 4, 2), regathered=frozenset(f"w{i}" for i in range(NUM_LAYERS)))
    each = 4 * NUM_LAYERS
    assert issued(costs) == {
        ("forward", "all_gather"): each,
        ("backward", "all_gather"): each,
        ("backward", "reduce_scatter"): each,
    }
    assert "gathered" not in costs.memory_bytes


def test_a_recomputed_layer_keeps_what_enters_it_and_the_inside_of_one():
    plain, again = costs_of(I, Training("adamw", 4, 2)), costs_of(I, Training("adamw", 4, 2), recomputed=LAYERS)
    # what enters the first is an argument
    assert again.memory_bytes["activations"] == 2 * (NUM_LAYERS - 1) * ACTIVATION // 4
    assert again.memory_bytes["recomputed"] == ACTIVATION // 4  # relu's result; mm reads what enters
    assert again.compute_backward_s == pytest.approx(plain.compute_backward_s + plain.compute_forward_s)
    assert again.compute_forward_s == plain.compute_forward_s and issued(again) == issued(plain)


def test_regathered_in_a_region_it_is_gathered_as_often_and_kept_while_the_region_runs_again():
    regathered = frozenset(f"w{i}" for i in range(NUM_LAYERS))
    plain = costs_of(S(0), Training(), regathered=regathered)
    again = costs_of(S(0), Training(), regathered=regathered, recomputed=LAYERS)
    assert issued(again) == issued(plain)
    assert again.memory_bytes["recomputed"] == ACTIVATION // 4 + WEIGHT and "gathered" not in again.memory_bytes


def test_where_weights_get_their_gradients_later_what_was_made_again_waits_for_them():
    training, regathered = Training("adamw", 4, 2, num_waiting=1), frozenset(f"w{i}" for i in range(NUM_LAYERS))
    again = costs_of(I, training, recomputed=LAYERS)
    assert again.memory_bytes["recomputed"] == NUM_LAYERS * ACTIVATION // 4
    # autograd reads all that a layer saved in both parts of its backward: outside of regions it is gathered for each
    costs, inside = (
        costs_of(S(0), training, regathered=regathered),
        costs_of(S(0), training, regathered=regathered, recomputed=LAYERS),
    )
    assert issued(costs)["backward", "all_gather"] == 2 * issued(inside)["backward", "all_gather"] == 2 * 4 * NUM_LAYERS
    assert inside.memory_bytes["recomputed"] == NUM_LAYERS * (ACTIVATION // 4 + WEIGHT)


def test_offloaded_layers_keep_two_at_a_time_on_the_device_and_wait_for_what_computing_does_not_hide():
    plain = costs_of(I, Training("adamw", 4, 2))
    slow, fast = (costs_of(I, Training("adamw", 4, 2), host, offloaded=LAYERS) for host in (1.0, 1e15))
    # of a microbatch: all that is saved, but what enters the first is an argument and stays
    sent = (2 * NUM_LAYERS - 1) * ACTIVATION // 4
    for costs in (slow, fast):
        assert costs.memory_bytes["activations"] == 0 and costs.moved_bytes == 4 * sent
        assert costs.memory_bytes["fetched"] == 2 * 2 * ACTIVATION // 4 and issued(costs) == issued(plain)
    # a byte a second: next to that no computing counts
    assert slow.waiting_s == pytest.approx({"forward": 4 * sent, "backward": 4 * sent}, rel=1e-3)
    # so fast that all is hidden, but what the last layer fetches when it is wanted
    assert fast.waiting_s == pytest.approx({"forward": 0.0, "backward": 4 * 2 * ACTIVATION / 4 / 1e15}, rel=1e-9)
    assert slow.step_s == pytest.approx(
        4 * (slow.microbatch_s("forward") + slow.microbatch_s("backward")) + slow.once_s
    )


def test_what_enters_recomputed_layers_waits_on_the_host():
    costs = costs_of(I, Training("adamw", 4, 2), recomputed=LAYERS, offloaded=LAYERS)
    assert costs.memory_bytes["activations"] == 0 and costs.memory_bytes["recomputed"] == ACTIVATION // 4
    assert costs.moved_bytes == 4 * (NUM_LAYERS - 1) * ACTIVATION // 4


def test_state_on_the_host_is_moved_there_and_back_once_a_step_one_parameter_at_a_time():
    plain = costs_of(S(0), Training("adamw", 4, 2), 1e6)
    away = costs_of(S(0), Training("adamw", 4, 2), 1e6, state_on_host=frozenset(("w0", "w2")))
    state = 2 * WEIGHT // 4  # of a parameter on a device
    assert away.state_on_host_bytes == 2 * state and away.waiting_s["update"] == 2 * 2 * state / 1e6
    assert away.memory_bytes["optimizer"] == state and away.memory_bytes["fetched"] == state
    assert away.total_memory_bytes == plain.total_memory_bytes - state
    assert away.once_s == pytest.approx(plain.once_s + 4 * state / 1e6)
    assert away.step_s == pytest.approx(plain.step_s + 4 * state / 1e6)
    assert away.microbatch_s("backward") == plain.microbatch_s("backward")


def test_no_way_to_the_host_is_refused():
    with pytest.raises(PlanError, match=r"cluster 'cpu'.*host_bandwidth_bytes_per_s"):
        costs_of(I, Training(), 0.0, offloaded=LAYERS)
    with pytest.raises(PlanError, match=r"cluster 'cpu'.*host_bandwidth_bytes_per_s"):
        costs_of(I, Training(), 0.0, state_on_host=frozenset(("w0",)))
