"""The time of passes whose parameters are gathered and reduced meanwhile, and the bounds of it that a table gives."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.overlap.pass_time import AtOp, Handover, PassCost
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
    backward = PassCost(tuple(ops), overlap, is_backward=True)
    assert backward.time_s == pytest.approx(longest_path(ops, overlap), rel=1e-9, abs=1e-9)


PREFETCHED = st.lists(st.builds(AtOp, SECONDS, LANES, LANES, LANES, LANES), max_size=7)


@given(PREFETCHED, st.sampled_from([0.0, 0.3, 1.0]), st.booleans())
def test_no_path_is_longer_than_the_time(ops: list[AtOp], overlap: float, is_backward: bool) -> None:
    if not is_backward:
        ops = [replace(at, put_off={}, reduced={}) for at in ops]
    one = PassCost(tuple(ops), overlap, is_backward)
    paths = [None, *(Handover(position, lane) for position in range(len(ops) + 1) for lane in (0, 1))]
    longest_s = max(map(one.length_s, paths))
    assert one.length_s(one.handover) == pytest.approx(longest_s, rel=1e-9, abs=1e-9)
    assert longest_s <= one.time_s * (1 + 1e-9) + 1e-9
    assert one.time_s <= sum(at.in_turn_s for at in ops) * (1 + 1e-9) + 1e-9


def known(*ops: AtOp, overlap: float = 1.0, is_backward: bool = True) -> tuple[float, Handover | None]:
    one = PassCost(ops, overlap, is_backward)
    return one.time_s, one.handover


def test_known_times():
    reduced = {0: 3.0}
    assert known(AtOp(2.0, {}, reduced), AtOp(2.0, {}, reduced)) == (8.0, Handover(1, 0))
    assert known(AtOp(2.0), AtOp(4.0, {}, reduced)) == (7.0, Handover(1, 0))
    assert known(AtOp(4.0), AtOp(4.0, {}, reduced)) == (8.0, None)
    assert known(AtOp(4.0), AtOp(4.0, {}, reduced), overlap=0.0) == (11.0, None)
    assert known(AtOp(0.0, {0: 2.0}), AtOp(4.0, {}, reduced)) == (9.0, Handover(1, 0))  # delayed
    assert known(AtOp(0.0, {1: 2.0}), AtOp(4.0, {}, reduced)) == (7.0, Handover(1, 0))  # another lane
    assert known() == (0.0, None)


def test_known_times_of_prefetched_buckets():
    def ops(compute_s: float, gather_s: float, reduce_s: float = 0.0) -> list[AtOp]:
        reduced = {0: reduce_s} if reduce_s else {}
        return [AtOp(compute_s, reduced=reduced, gathered={0: gather_s}) for _ in range(4)]

    # the first gather is waited for; the others are there when they are needed, or hold up compute
    assert known(*ops(2.0, 1.0), is_backward=False) == (1.0 + 4 * 2.0, Handover(0, 0))
    assert known(*ops(1.0, 2.0), is_backward=False) == (4 * 2.0 + 1.0, Handover(3, 0))
    assert known(*ops(1.0, 2.0), is_backward=False, overlap=0.0)[0] == 3 * 4.0
    # in backward a lane has the next gather and the last reduction; that of the first op remains
    assert known(*ops(3.0, 1.0, 1.0))[0] == 1.0 + 4 * 3.0 + 1.0
    assert known(*ops(1.0, 2.0, 3.0)) == (2.0 + 3 * 2.0 + 4 * 3.0, Handover(4, 0))


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


def shares(handovers: list[Handover | None]) -> dict[Handover | None, float]:
    return {each: number / len(handovers) for each, number in Counter(handovers).items()}


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 4)])
def test_any_weights_of_paths_give_a_table_of_lower_bounds(shape: tuple[int, ...]) -> None:
    """No choice costs more in the table than its plan takes; along its own longest paths it nearly costs that."""
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
            forward, backward = (shares([each.handover for each in passes]) for passes in zip(*(x.passes for x in met)))
            paths = Paths(CLUSTER.overlap, forward, backward)
            weights = paths.weights(graph, folded)
            table = price(graph, folded, candidates, mesh, CLUSTER, PricedStep(weights=weights)).table
            for other, its_plan in zip(choices, plans):
                assert cost_of(table, other) <= its_plan.step_s * (1 + 1e-9)
        # those drawn at random change layouts within a block, and gather in no order
        assert cost_of(table, choice) == pytest.approx(plan.step_s, rel=0.01 if number < len(by_hand) else 0.15)


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
    assert evaluate(graph, by_hand, mesh, cluster, training=several).hidden_s == 0.0
    assert evaluate(graph, by_hand, mesh, cluster, training=Training().staged(1, num_ranks=2)).hidden_s == 0.0
    assert Training().staged(1, num_ranks=1) == Training()


def test_the_last_of_several_microbatches_has_the_reductions_beside_it() -> None:
    graph, folded = problem()
    mesh, split, stage = Mesh((4,), ("dp",)), Training(num_microbatches=3), Training(in_stages=True)
    candidates = annotate(graph, mesh, folded)
    priced = price(graph, folded, candidates, mesh, CLUSTER, PricedStep(split))
    by_hand = {
        name: decode(priced, graph, folded, encode(priced, graph, folded, each))
        for name, each in hand_plans(graph, folded, candidates, mesh).items()
    }
    for training in (split, stage):
        for name in ("ddp", "zero2"):
            costs, in_turn = (
                evaluate(graph, by_hand[name], mesh, cluster, training=training)
                for cluster in (CLUSTER, replace(CLUSTER, overlap=0.0))
            )
            forward, backward = costs.passes
            reduced_s = sum(sum(at.put_off.values()) for at in backward.ops)
            assert not forward.ops and 0 < costs.hidden_s < reduced_s
            assert costs.hidden_s <= sum(at.compute_s for at in backward.ops) and not in_turn.hidden_s
            parts = costs.num_microbatches * (costs.microbatch_s("forward") + costs.microbatch_s("backward"))
            assert costs.step_s == pytest.approx(parts + costs.once_s)
    put_off = evaluate(graph, by_hand["ddp"], mesh, CLUSTER, training=replace(split, num_waiting=1))
    assert not put_off.hidden_s
    again = evaluate(graph, by_hand["zero3"], mesh, CLUSTER, training=split)
    assert again.hidden_s < evaluate(graph, by_hand["zero2"], mesh, CLUSTER, training=split).hidden_s
