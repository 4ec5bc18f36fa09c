"""Found, not given: the search arrives at the plans that people publish, from prices alone."""

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Mesh, parse_mesh
from autopar.models.catalogue import build_model
from autopar.models.vision import Classifier, vgg13
from autopar.planner.layouts.search_meshes import make_plan
from autopar.plans.plan import Plan
from autopar.sbp.assignment import conversions
from autopar.sbp.placement import S, format_layout

HIDDEN, SEQUENCE, BATCH, LAYERS = 8192, 1024, 20, 2
WORDS = 1024  # few, so that the layers decide


def vgg13_graph(num_images: int) -> Graph:
    with torch.device("meta"):
        model, images, labels = (
            Classifier(vgg13()),
            torch.zeros(num_images, 3, 224, 224),
            torch.zeros(num_images, dtype=torch.long),
        )
    return trace(skeleton(model), (images, labels), {})


@functools.cache
def llama(*, hidden: int = HIDDEN, batch: int = BATCH, sequence: int = SEQUENCE) -> Graph:
    """By default two wide layers and so many tokens that splitting them pays between nodes, and splitting parameters
    inside.
    """
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=hidden,
        intermediate_size=hidden * 3 // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        use_cache=False,
    )
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config).to(torch.bfloat16), torch.zeros(batch, sequence, dtype=torch.long)
        kwargs = {"input_ids": ids, "labels": torch.zeros_like(ids), "use_cache": False}
    return trace(skeleton(model), (), kwargs)


def axis_signatures(plan: Plan, op: str, axis: int = 0) -> tuple:
    return plan.assignment.strategies[op].signatures[axis]


def ops_of(plan: Plan, part: str) -> list[str]:
    return [op.name for op in plan.graph.ops if f".{part}." in f".{op.target}."]


def layouts(plan: Plan) -> dict[str, str]:
    return {
        item.fqn: format_layout(plan.assignment.layouts[item.value.name]) for item in plan.graph.of_kind("parameter")
    }


@pytest.mark.parametrize("num_devices", [8, 16])
def test_vgg_is_data_parallel_in_its_stem_and_tensor_parallel_in_its_wide_layers(num_devices):
    """Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997."""
    plan = make_plan(vgg13_graph(32 * num_devices), parse_mesh(str(num_devices)), load_cluster("p100"))
    for op in ops_of(plan, "conv2d"):
        signature = axis_signatures(plan, op)
        assert signature.inputs[0] == signature.outputs[0] == S(0) and not signature.inputs[1].is_split
    wide = ops_of(plan, "linear")
    assert len(wide) == 3 and all(axis_signatures(plan, op).inputs[1].is_split for op in wide[:2])
    stored = {item.fqn: item.value.name for item in plan.graph.of_kind("parameter")}
    made = conversions(plan.graph, plan.assignment)
    filters = [op.inputs[1].name for op in plan.graph.ops if "conv2d" in op.target]
    assert filters and all(c.src != c.dst for name in filters for c in made[name])
    for fqn in ("network.26.weight", "network.29.weight"):  # neither gathered nor reduced
        assert layouts(plan)[fqn].startswith("S") and all(c.src == c.dst for c in made[stored[fqn]])
    assert plan.costs.step_s < 0.9 * min(cost.step_s for cost in plan.hand.values())


def two_levels(inner_bytes_per_s: float, outer_bytes_per_s: float) -> Cluster:
    """Nodes of four devices; links as fast as said, of a device to others of its node and to other nodes."""
    levels = (LinkLevel(4, 1e-6, inner_bytes_per_s), LinkLevel(0, 1e-5, outer_bytes_per_s))
    return Cluster("made up", levels, {"float32": 2e13, "bfloat16": 2e14}, 2e12, 2**40, "made up")


def num_sums(plan: Plan, axis: str, phase: str, least_bytes: int) -> float:
    """Collectives of tensors of at least that size, in sums: one that scatters or gathers is half of one."""
    found = [planned.collective for planned in plan.costs.collectives if planned.collective.phase == phase]
    kinds = Counter(c.kind for c in found if plan.mesh.name_of(c.axes) == axis and c.num_bytes >= least_bytes)
    assert set(kinds) <= {"all_reduce", "reduce_scatter", "all_gather"}, kinds
    return kinds["all_reduce"] + (kinds["reduce_scatter"] + kinds["all_gather"]) / 2


def megatron_s(plan: Plan) -> float:
    """The best of the kind."""
    return min(cost.step_s for name, cost in plan.hand.items() if name.startswith("megatron"))


def test_fast_links_get_column_and_row_pairs_in_every_layer():
    """Shoeybi et al., "Megatron-LM", arXiv:1909.08053: two sums each way a layer, here scattered and gathered
    (arXiv:2205.05198).
    """
    plan = make_plan(llama(), Mesh((2, 4), ("dp", "tp")), two_levels(600e9, 100e9))
    placed = layouts(plan)
    for layer in range(LAYERS):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            assert placed[f"model.layers.{layer}.{name}.weight"].endswith("S(0)"), name
        assert placed[f"model.layers.{layer}.mlp.down_proj.weight"].endswith("S(1)")
        # gathering what it reads costs as much as scattering what it makes
        assert placed[f"model.layers.{layer}.self_attn.o_proj.weight"].endswith(("S(0)", "S(1)"))
    for op in ops_of(plan, "scaled_dot_product_attention"):
        # batch; heads
        assert axis_signatures(plan, op, 0).outputs == (S(0),) and axis_signatures(plan, op, 1).outputs == (S(1),)
    activation_bytes = BATCH // 2 * SEQUENCE * HIDDEN * 2
    assert (
        num_sums(plan, "tp", "forward", activation_bytes)
        == num_sums(plan, "tp", "backward", activation_bytes)
        == 2 * LAYERS
    )
    assert plan.costs.step_s < 0.9 * min(plan.hand[name].step_s for name in ("ddp", "zero3"))
    assert plan.costs.step_s <= megatron_s(plan) * (1 + 1e-9)


def test_slow_links_get_data_parallelism():
    """With long enough sequences and narrow layers, activations outweigh parameters."""
    with torch.device("meta"):
        model = nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)))
        )
        x = torch.zeros(64, 1024, 512)
    plan = make_plan(trace(skeleton(model), (x,), {}), Mesh((2, 4), ("dp", "tp")), two_levels(1e9, 1e9))
    for op in ops_of(plan, "linear"):
        for axis in range(2):
            signature = axis_signatures(plan, op, axis)
            assert signature.inputs[0] == signature.outputs[0] == S(0) and not signature.inputs[1].is_split
    assert plan.costs.step_s <= plan.hand["ddp"].step_s * (1 + 1e-9)
    assert plan.costs.step_s < 0.5 * megatron_s(plan)


def test_slow_links_get_data_parallelism_in_transformers_too():
    """Two layers of Llama and a million tokens."""
    plan = make_plan(llama(hidden=2048, batch=512, sequence=2048), Mesh((2, 4), ("dp", "tp")), two_levels(1e9, 1e9))
    linear = ops_of(plan, "linear")
    assert len(linear) == 7 * LAYERS + 1
    for op in linear:
        for axis in range(2):
            signature = axis_signatures(plan, op, axis)
            assert signature.inputs[0] == signature.outputs[0] == S(0) and not signature.inputs[1].is_split
    assert plan.costs.step_s <= plan.hand["ddp"].step_s * (1 + 1e-9)
    assert plan.costs.step_s < 0.5 * megatron_s(plan)


@functools.cache
def built_in(name: str) -> Graph:
    example = build_model(name)
    return trace(skeleton(example.model), example.args, dict(example.kwargs))


@pytest.mark.parametrize(("mesh", "cluster"), [("2x4", "a100"), ("4x8", "h100"), ("32", "p100")])
@pytest.mark.parametrize("name", ["gpt2", "vit-l", "vgg13", "resnet50"])
def test_built_in_models_are_never_worse_than_by_hand_and_nearly_proven(name, mesh, cluster):
    plan = make_plan(built_in(name), parse_mesh(mesh), load_cluster(cluster))
    fitting = [cost.step_s for cost in plan.hand.values() if cost.memory_bytes <= plan.memory_limit_bytes]
    assert plan.costs.step_s <= min(fitting, default=float("inf")) * (1 + 1e-9)
    assert plan.costs.total_memory_bytes <= plan.memory_limit_bytes
    assert 0.0 <= plan.gap < 0.05


def test_a_model_without_ops_is_planned_on_an_open_mesh_too() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))

        def forward(self, _: torch.Tensor) -> torch.Tensor:
            return self.weight

    plan = autopar.plan(Constant(), "4", args=(torch.ones(4),), cluster="cpu")
    assert not plan.graph.ops and 0 < plan.step_s < 1e-3  # the update
