"""The time of a backward whose gradients are reduced meanwhile, and the bounds of it that a table gives."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.overlap.backward_lanes import AtOp, Handover, backward_time
from autopar.costmodel.overlap.path_weights import Paths
from autopar.costmodel.pricing.encode_decode import decode, encode
from autopar.costmodel.pricing.price import PricedStep, price
from autopar.costmodel.training import Training
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import Folded, fold
from autopar.ir.folding.segments import ends_apart, segmented
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner.handwritten.hand_plan import hand_plans
from autopar.sbp.candidates import annotate
from autopar.search.table import cost_of

SECONDS = st.floats(0, 10)
LANES = st.dictionaries(st.integers(0, 1), SECONDS, max_size=2)
OPS = st.lists(st.builds(AtOp, SECONDS, LANES, LANES), max_size=6)


def longest_path(ops: list[AtOp], overlap: float) -> float:
    """The longest path, by trying each: leave compute at some op for some lane, or never."""

    def along_compute(at: AtOp) -> float:
        return at.compute_s + sum(at.blocking.values())

    ops = ops[::-1]
    taken = [(1 - overlap) * sum(at.put_off.values()) for at in ops]
    lengths = [sum(map(along_compute, ops)) + sum(taken)]
    for number, at in enumerate(ops):
        before = sum(taken[:number]) + sum(along_compute(one) for one in ops[: number + 1])
        for place, lane in enumerate(at.put_off):
            earlier_s = (1 - overlap) * sum(list(at.put_off.values())[:place])
            on_lane = [at.put_off[lane]]
            on_lane += [one.blocking.get(lane, 0.0) + one.put_off.get(lane, 0.0) for one in ops[number + 1 :]]
            lengths.append(before + earlier_s + sum(on_lane))
    return max(lengths)


@given(OPS, st.sampled_from([0.0, 0.3, 1.0]))
def test_the_time_is_the_longest_path(ops: list[AtOp], overlap: float) -> None:
    time_s, _ = backward_time(ops, overlap)
    assert time_s == pytest.approx(longest_path(ops, overlap), rel=1e-9, abs=1e-9)


def test_known_times():
    reduced = {0: 3.0}
    assert backward_time([AtOp(2.0, {}, reduced), AtOp(2.0, {}, reduced)], 1.0) == (8.0, Handover(1, 0))
    assert backward_time([AtOp(2.0), AtOp(4.0, {}, reduced)], 1.0) == (7.0, Handover(1, 0))
    assert backward_time([AtOp(4.0), AtOp(4.0, {}, reduced)], 1.0) == (8.0, None)
    assert backward_time([AtOp(4.0), AtOp(4.0, {}, reduced)], 0.0) == (11.0, None)
    assert backward_time([AtOp(0.0, {0: 2.0}), AtOp(4.0, {}, reduced)], 1.0) == (9.0, Handover(1, 0))  # delayed
    assert backward_time([AtOp(0.0, {1: 2.0}), AtOp(4.0, {}, reduced)], 1.0) == (7.0, Handover(1, 0))  # another lane
    assert backward_time([], 1.0) == (0.0, None)


CLUSTER = Cluster(
    "two levels",
    (LinkLevel(2, 1e-6, 2e9), LinkLevel(0, 1e-5, 4e8)),
    {"float32": 2e11},
    1e11,
    2**34,
    "made up",
    overlap=0.9,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def problem() -> tuple[Graph, Folded]:
    model = nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(6)), nn.Linear(64, 10))
    graph = trace(skeleton(model), (torch.zeros(32, 64),), {})
    folded = fold(graph)
    return graph, segmented(folded, graph, ends_apart(folded))


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 4)])
def test_any_weights_of_paths_give_a_table_of_lower_bounds(shape: tuple[int, ...]) -> None:
    """No choice costs more in the table than its plan takes; along its own longest path it nearly costs that."""
    graph, folded = problem()
    mesh, draw = Mesh(shape, ("dp", "tp")[: len(shape)]), Random(0)
    candidates = annotate(graph, mesh, folded)
    plain = price(graph, folded, candidates, mesh, CLUSTER)
    by_hand = hand_plans(graph, folded, candidates, mesh).values()
    choices = [encode(plain, graph, folded, assignment) for assignment in by_hand]
    choices += [tuple(draw.randrange(len(e.options)) for e in plain.entities) for _ in range(20)]
    plans = [evaluate(graph, decode(plain, graph, folded, choice), mesh, CLUSTER) for choice in choices]
    assert sum(plan.hidden_s > 0 for plan in plans) > 3
    for number, (choice, plan) in enumerate(zip(choices, plans)):
        for met in (plans[: number + 1], [plan]):
            paths = Paths(CLUSTER.overlap, tuple((one.handover, 1 / len(met)) for one in met))
            weights = paths.weights(graph, folded)
            table = price(graph, folded, candidates, mesh, CLUSTER, PricedStep(weights=weights)).table
            for other, its_plan in zip(choices, plans):
                assert cost_of(table, other) <= its_plan.step_s * (1 + 1e-9)
        assert cost_of(table, choice) == pytest.approx(plan.step_s, rel=0.05)


def test_without_overlap_all_is_done_in_turn():
    graph, folded = problem()
    mesh, cluster = Mesh((4,), ("dp",)), replace(CLUSTER, overlap=0.0)
    candidates = annotate(graph, mesh, folded)
    priced = price(graph, folded, candidates, mesh, CLUSTER)
    by_hand = hand_plans(graph, folded, candidates, mesh)["ddp"]
    by_hand = decode(priced, graph, folded, encode(priced, graph, folded, by_hand))
    hidden, in_turn = (evaluate(graph, by_hand, mesh, each) for each in (CLUSTER, cluster))
    assert in_turn.hidden_s == 0.0 and 0 < hidden.hidden_s < 0.9 * in_turn.communication_s("backward")
    assert hidden.step_s == pytest.approx(in_turn.step_s - hidden.hidden_s)
    several = Training(num_microbatches=2)
    assert evaluate(graph, by_hand, mesh, CLUSTER, training=several).hidden_s == 0.0
