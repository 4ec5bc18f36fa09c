"""An optimizer state in parts beside whole parameters (ZeRO-1) has no layout of its own here: a parameter stored in
parts and gathered once a step stands for it. What that costs more, and where it is not offered, by formulas of its
own."""

import pytest
import torch
from torch import nn

from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.evaluate import Costs, evaluate
from autopar.costmodel.training import Training
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.sbp.candidates import annotate
from tests.planner.cases import traced

RANKS = Mesh((4,), ("dp",))


def by_hand(graph: Graph, kind: str, num_microbatches: int) -> Costs:
    folded = fold(graph)
    assignment = hand_plan(parse_hand_plan(kind, RANKS), graph, folded, annotate(graph, RANKS, folded), RANKS)
    return evaluate(
        graph, assignment, RANKS, PRESETS["free-links"], training=Training(num_microbatches=num_microbatches)
    )


def weight_bytes(graph: Graph) -> int:
    return sum(item.value.num_bytes for item in graph.of_kind("parameter"))


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_it_moves_what_zero1_moves(name, num_microbatches):
    """Each gradient reduce-scattered and each parameter all-gathered once a step, tied ones too: what one all-reduce
    moves.
    """
    graph = traced(name)
    once: dict[str, int] = {}
    num_once = 0
    for planned in by_hand(graph, "zero2", num_microbatches).collectives:
        if planned.is_once:
            kind = planned.collective.kind
            once[kind] = once.get(kind, 0) + planned.collective.num_bytes
            num_once += 1
        else:
            assert planned.collective.num_bytes <= 8, "only the loss is summed in each microbatch"
    assert once == {"all_gather": weight_bytes(graph), "reduce_scatter": weight_bytes(graph)}
    assert num_once == 2 * len(graph.of_kind("parameter")), "one at a time, where others fill buckets"


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_it_holds_one_more_part_of_the_parameters_than_zero1(name):
    """ZeRO-1 keeps parameters and gradients whole, and the parts are views of them: here the stored part lies beside
    the gathered whole.
    """
    graph = traced(name)
    size, num = weight_bytes(graph), RANKS.num_devices
    state = 2 * size  # of AdamW, in the dtype of the parameters
    zero1 = size + size + state // num
    kinds = ("parameters", "gradients", "gathered", "optimizer")
    ours = by_hand(graph, "zero2", 4).memory_bytes
    assert sum(ours[kind] for kind in kinds) == zero1 + size // num
    ours = by_hand(graph, "zero2", 1).memory_bytes  # gradients are in parts as they are made
    assert sum(ours[kind] for kind in kinds) <= zero1 - size + 2 * size // num
    whole = by_hand(graph, "ddp", 4).memory_bytes
    assert sum(whole.get(kind, 0) for kind in kinds) == 2 * size + state


def test_the_state_of_what_nothing_divides_is_in_parts_that_differ():
    """4 ranks, 5 x 6: the first has 5 x 2 or 2 x 6."""
    model = nn.Linear(6, 5, bias=False, device="meta")
    graph = trace(model, (torch.empty(8, 6, device="meta"),), {})
    assert by_hand(graph, "zero2", 4).memory_bytes["optimizer"] in (8 * 10, 8 * 12)
    model = nn.Linear(8, 5, bias=False, device="meta")
    graph = trace(model, (torch.empty(8, 8, device="meta"),), {})
    assert by_hand(graph, "zero2", 4).memory_bytes["optimizer"] == 8 * 40 // 4
