"""Plans of calls without gradients: of prefill, and of decode with a key-value cache that stays where it is."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import autopar
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.memory import local_bytes
from autopar.costmodel.training import INFERENCE
from autopar.errors import AutoparError
from autopar.ir.graph import Graph, Use
from autopar.ir.inference.append_op import APPEND
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.planner.handwritten.named_plan import named_plans
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import loads
from autopar.sbp.assignment import wanted_layout

WIDE, HEADS, DEPTH, BATCH, PAST = 256, 8, 3, 8, 4096
MESH = Mesh((8,), ("tp",))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x, keys, values):
        heads = (self.norm(x) @ p.weight.T for p in (self.query, self.key, self.value))
        query, key, value = (each.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for each in heads)
        keys, values = torch.cat((keys, key), 2), torch.cat((values, value), 2)
        seen = scaled_dot_product_attention(query, keys, values, is_causal=x.shape[1] > 1)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu()), keys, values


class Decoder(nn.Module):
    """Tokens and past keys and values in, logits and new keys and values out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(512, WIDE), nn.Linear(WIDE, 512, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, ids, keys, values):
        x, new_keys, new_values = self.tokens(ids), [], []
        for block, own_keys, own_values in zip(self.blocks, keys, values):
            x, *made = block(x, own_keys, own_values)
            new_keys.append(made[0])
            new_values.append(made[1])
        return self.head(x), new_keys, new_values


def example(past: int, num: int) -> tuple:
    caches = [[torch.empty(BATCH, HEADS, past, WIDE // HEADS, device="meta") for _ in range(DEPTH)] for _ in "kv"]
    return torch.zeros(BATCH, num, dtype=torch.long, device="meta"), *caches


def decoder() -> Decoder:
    with torch.device("meta"):
        return Decoder()


def planned(past: int, num: int) -> Plan:
    plan = autopar.plan(decoder(), MESH, cluster="h100", args=example(past, num), trains=False)
    assert isinstance(plan, Plan)
    return plan


CALLS = {"prefill": (1, 512), "decode": (PAST, 1)}


@pytest.mark.parametrize("call", CALLS)
def test_nothing_of_training_is_priced_or_shown(call: str) -> None:
    plan = planned(*CALLS[call])
    costs = plan.costs
    assert costs.compute_backward_s == costs.optimizer_s == costs.communication_s("backward") == 0
    stored = {
        kind: sum(
            local_bytes(x.shape, x.dtype.itemsize, plan.assignment.layouts[x.name], MESH.shape)
            for x in (item.value for item in plan.graph.of_kind(kind))
        )
        for kind in ("parameter", "argument")
    }
    assert costs.memory_bytes["parameters"] == stored["parameter"]
    assert costs.memory_bytes["arguments"] == stored["argument"]
    assert not {"gradients", "optimizer"} & costs.memory_bytes.keys() and not costs.memory_bytes["activations"]
    shown = plan.explain()
    assert "optimizer none (inference)" in shown
    assert "backward" not in shown and "train_step" not in shown and "pending sum of" not in shown


@pytest.mark.parametrize("call", CALLS)
def test_it_takes_no_longer_than_plans_by_hand(call: str) -> None:
    plan = planned(*CALLS[call])
    graph = trace(decoder(), example(*CALLS[call]), {})
    request = PlanRequest(training=INFERENCE)
    names = ("ddp", "zero3", "megatron:tp=8")
    hand = list(named_plans(names, decoder(), graph, MESH, load_cluster("h100"), request))
    assert plan.step_s <= min(each.step_s for each in hand) * (1 + 1e-9)
    assert hand[2].costs.memory_bytes["parameters"] < 0.3 * hand[0].costs.memory_bytes["parameters"]


def test_the_cache_lies_as_it_was_given_and_only_new_rows_are_moved() -> None:
    plan = planned(*CALLS["decode"])
    graph: Graph = plan.graph
    assert len(graph.carried) == 2 * DEPTH
    for index, argument in graph.carried:
        layout = wanted_layout(graph, plan.assignment, Use("output", index))
        assert layout == plan.assignment.layouts[argument]
        assert any(placement.is_split for placement in layout)
    appended = {op.inputs[0].name for op in graph.ops if op.target == APPEND}
    assert appended == {argument for _, argument in graph.carried}
    assert not {each.where for each in plan.costs.collectives} & appended


def test_decode_takes_what_memory_takes_to_read_weights_and_cache_once() -> None:
    (hand,) = named_plans(
        ("megatron:tp=8",),
        decoder(),
        trace(decoder(), example(*CALLS["decode"]), {}),
        MESH,
        load_cluster("h100"),
        PlanRequest(training=INFERENCE),
    )
    memory = hand.costs.memory_bytes
    read_s = (memory["parameters"] + memory["arguments"]) / hand.cluster.memory_bandwidth_bytes_per_s
    assert read_s <= hand.costs.compute_forward_s <= 1.1 * read_s


def test_a_plan_in_a_file_says_that_it_is_of_inference(tmp_path: Path) -> None:
    plan = planned(*CALLS["decode"])
    plan.save(tmp_path / "plan.json")
    graph = trace(decoder(), example(*CALLS["decode"]), {})
    again = loads((tmp_path / "plan.json").read_text(), graph, MESH)
    assert not again.training.trains and again.step_s == plan.step_s and again.graph.carried == plan.graph.carried


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mesh": "pp=2,tp=4"}, "inference .*is planned without stages"),
        ({"num_microbatches": 2}, "inference .*runs a call as a whole"),
        ({"reduce_dtype": torch.float32}, "inference .*has no gradients"),
    ],
)
def test_options_of_training_are_refused(options: dict, told: str) -> None:
    mesh = options.pop("mesh", MESH)
    with pytest.raises(AutoparError, match=told):
        autopar.plan(decoder(), mesh, cluster="h100", args=example(8, 1), trains=False, **options)
