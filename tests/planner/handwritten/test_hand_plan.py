"""Hand plans are what people write: counted against the textbook."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.pricing.encode_decode import decode, encode
from autopar.costmodel.pricing.price import price
from autopar.errors import PlanError
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Mesh, parse_mesh
from autopar.planner.handwritten.hand_plan import HandPlan, format_hand_plan, hand_plans, parse_hand_plan
from autopar.plans.validate import check_assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import format_layout
from tests.planner.cases import CPU, MESH, annotated, by_hand, folded, tally, traced
from tests.zoo import BATCH, HIDDEN, LAYERS, SEQUENCE, ZOO

LINE = Mesh((4,), ("tp",))
MESHES = [MESH, LINE, Mesh((3,), ("x",)), Mesh((2, 1, 2), ("a", "b", "c"))]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_hand_plan_of_every_model_is_valid(name, mesh):
    for assignment in hand_plans(traced(name), folded(name), annotated(name, mesh), mesh).values():
        check_assignment(assignment, traced(name), folded(name), annotated(name, mesh), mesh)


def readers_of_parameters(graph: Graph) -> set[str]:
    names = {item.value.name for item in graph.of_kind("parameter")}
    return {op.name for op in graph.ops if any(value.name in names for value in op.inputs)}


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "vit", "vgg13"])
def test_ddp_reduces_each_gradient_once_over_all_ranks_and_nothing_else(name):
    graph, assignment = traced(name), by_hand(name, "ddp")
    costs = evaluate(graph, assignment, MESH, CPU)
    backward = [planned for planned in costs.collectives if planned.collective.phase == "backward"]
    num_bytes = sum(item.value.num_bytes for item in graph.of_kind("parameter"))
    assert sum(planned.collective.num_bytes for planned in backward) == num_bytes
    assert {(planned.collective.kind, planned.collective.axes) for planned in backward} == {("all_reduce", (0, 1))}
    assert {user for planned in backward for user in planned.users} == readers_of_parameters(graph)
    scalars = [planned.collective.num_bytes for planned in costs.collectives if planned.collective.phase == "forward"]
    assert all(num_bytes <= 8 for num_bytes in scalars)  # the loss and its count of tokens


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama"])
@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_zero_gathers_each_parameter_and_scatters_its_gradient(name, kind):
    graph, assignment = traced(name), by_hand(name, kind)
    parameters = graph.of_kind("parameter")
    counts = tally(name, assignment)
    assert counts["forward", "all_gather", "dp+tp"] == counts["backward", "reduce_scatter", "dp+tp"] == len(parameters)
    assert not any(kind == "all_reduce" and phase == "backward" for phase, kind, _ in counts)
    stored = evaluate(graph, assignment, MESH, CPU).memory_bytes["parameters"]
    assert stored == sum(item.value.num_bytes for item in parameters) // MESH.num_devices


def test_zero3_gathers_again_for_backward_what_zero2_keeps():
    graph, kept, again = traced("llama"), by_hand("llama", "zero2"), by_hand("llama", "zero3")
    # a lookup's backward needs no table
    reread = {item.value.name for item in graph.of_kind("parameter")} - {"model_embed_tokens_weight"}
    assert tally("llama", kept)["backward", "all_gather", "dp+tp"] == 0
    assert tally("llama", again)["backward", "all_gather", "dp+tp"] == len(reread)
    held = [evaluate(graph, plan, MESH, CPU).memory_bytes.get("gathered", 0) for plan in (kept, again)]
    assert held[0] - held[1] == sum(
        item.value.num_bytes for item in graph.of_kind("parameter") if item.value.name in reread
    )
    assert by_hand("llama", "zero1") == kept


def test_megatron_on_llama_is_two_all_reduces_a_layer_each_way():
    assignment = by_hand("llama", "megatron")
    counts = tally("llama", assignment)
    lookup, head, loss = 1, 1, 2  # embedding's sum; gradient of the head's input; maximum and sum over the vocabulary
    assert counts["forward", "all_reduce", "tp"] == 2 * LAYERS + lookup + loss
    assert counts["backward", "all_reduce", "tp"] == 2 * LAYERS + head
    assert counts["backward", "all_reduce", "dp"] == 3  # a bucket for each of the layouts: columns, rows and whole
    assert counts["forward", "all_reduce", "dp"] == 2
    assert counts.total() == sum(
        counts[phase, "all_reduce", axis] for phase in ("forward", "backward") for axis in MESH.axis_names
    )


def test_megatron_moves_one_activation_a_time():
    activation = BATCH // 2 * SEQUENCE * HIDDEN * 8
    backward = [
        p.collective
        for p in evaluate(traced("llama"), by_hand("llama", "megatron"), MESH, CPU).collectives
        if p.collective.phase == "backward"
    ]
    assert [c.num_bytes for c in backward if c.axes == (1,)] == [activation] * (2 * LAYERS + 1)


def test_megatron_splits_what_the_paper_splits():
    layouts = {
        item.fqn: format_layout(by_hand("llama", "megatron").layouts[item.value.name])
        for item in traced("llama").of_kind("parameter")
    }
    block = {name.removeprefix("model.layers.1."): layout for name, layout in layouts.items() if ".layers.1." in name}
    columns = {
        f"{name}_proj.weight": "BS(0)" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    }
    rows = {f"{name}_proj.weight": "BS(1)" for name in ("self_attn.o", "mlp.down")}
    assert block == columns | rows | {"input_layernorm.weight": "BB", "post_attention_layernorm.weight": "BB"}
    assert layouts["lm_head.weight"] == layouts["model.embed_tokens.weight"] == "BS(0)"


def test_megatron_on_gpt2_gathers_the_fused_projection_only():
    counts = tally("gpt2", by_hand("gpt2", "megatron", LINE), LINE)
    assert counts["forward", "all_gather", "tp"] == counts["backward", "reduce_scatter", "tp"] == LAYERS
    assert counts["backward", "all_reduce", "tp"] == 2 * LAYERS + 1


def test_megatron_on_bert_splits_attention_without_further_collectives():
    counts = tally("bert", by_hand("bert", "megatron"))
    assert {kind for _, kind, axis in counts if axis == "tp"} == {"all_reduce"}


@pytest.mark.parametrize("kind", ["ddp", "zero3", "megatron"])
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_hand_plans_are_points_of_the_searched_space(name, kind):
    priced = price(traced(name), folded(name), annotated(name), MESH, CPU)
    assignment = by_hand(name, kind)
    decoded = decode(priced, traced(name), folded(name), encode(priced, traced(name), folded(name), assignment))
    assert replace(decoded, parameter_buckets={}) == assignment


# Megatron's f and g: two a layer; one for the embedding's sum forward, one for the head's input backward
PLAIN = 2 * LAYERS + 1


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_sequence_parallel_turns_each_all_reduce_into_a_gather_and_a_scatter(name):
    plain, split = (tally(name, by_hand(name, kind)) for kind in ("megatron", "megatron:sp"))
    loss = 2  # maximum and sum over the vocabulary
    assert plain["forward", "all_reduce", "tp"] == PLAIN + loss and plain["backward", "all_reduce", "tp"] == PLAIN
    assert split["forward", "all_reduce", "tp"] == loss
    assert split["backward", "all_reduce", "tp"] == 0
    assert split["backward", "all_reduce", "dp+tp"] == 1  # gradients of norms, in one bucket
    for phase in ("forward", "backward"):
        assert split[phase, "all_gather", "tp"] == split[phase, "reduce_scatter", "tp"] == PLAIN
    plain["backward", "all_reduce", "dp"] -= 1  # there they are summed over dp only
    assert {key: n for key, n in split.items() if key[2] == "dp"} == {
        key: n for key, n in plain.items() if key[2] == "dp"
    }


def test_sequence_parallel_moves_one_activation_a_time():
    activation = BATCH // 2 * SEQUENCE * HIDDEN * 8
    costs = evaluate(traced("llama"), by_hand("llama", "megatron:sp"), MESH, CPU)
    moved = [
        p.collective
        for p in costs.collectives
        if p.collective.axes == (1,) and p.collective.kind in ("all_gather", "reduce_scatter")
    ]
    assert [collective.num_bytes for collective in moved] == [activation] * (4 * PLAIN)


def test_sequence_parallel_holds_fewer_activations():
    held = [
        evaluate(traced("llama"), by_hand("llama", kind, LINE), LINE, CPU).memory_bytes
        for kind in ("megatron", "megatron:sp")
    ]
    assert held[1]["activations"] < held[0]["activations"] and held[1]["parameters"] == held[0]["parameters"]


@pytest.mark.parametrize("name", ["mlp", "resnet", "vgg13"])
def test_models_without_a_sequence_to_split_stay_megatron(name):
    assert by_hand(name, "megatron:sp") == by_hand(name, "megatron")


def test_a_sequence_that_the_ranks_do_not_divide_is_split_in_parts_that_differ():
    plans = [by_hand("vit", kind) for kind in ("megatron:sp", "megatron")]  # 17 tokens
    layouts = [{str(s.output_layout(0)) for s in plan.strategies.values()} for plan in plans]
    assert "(S(0), S(1))" in layouts[0] and plans[0] != plans[1]


@pytest.mark.parametrize(("kind", "gathers"), [("megatron", {}), ("megatron:zero3", {"dp": 1})])
def test_megatron_with_zero_stores_each_parameter_once(kind, gathers):
    graph, assignment = traced("llama"), by_hand("llama", kind)
    costs = evaluate(graph, assignment, MESH, CPU)
    stored = sum(item.value.num_bytes for item in graph.of_kind("parameter"))
    norms = sum(item.value.num_bytes for item in graph.of_kind("parameter") if len(item.value.shape) == 1)
    split, whole = (4, 2) if gathers else (2, 1)  # norms are whole on the tensor axis
    assert costs.memory_bytes["parameters"] == (stored - norms) // split + norms // whole
    counts = tally("llama", assignment)
    assert counts["forward", "all_gather", "dp"] == gathers.get("dp", 0) * len(graph.of_kind("parameter"))
    # no parameter is undone on the tensor axis to be gathered on the other
    assert counts["forward", "all_gather", "tp"] == 0


def test_tensor_axes_may_be_any():
    mesh = Mesh((2, 2, 2), ("a", "b", "c"))
    outer = by_hand("llama", "megatron:tp=a", mesh)
    counts = tally("llama", outer, mesh)
    assert counts["backward", "all_reduce", "a"] == PLAIN and counts["forward", "all_reduce", "a"] == PLAIN + 2
    by_name, by_degree = (by_hand("llama", kind, mesh) for kind in ("megatron:tp=b+c,sp", "megatron:dp=2,tp=4,sp"))
    assert by_name == by_degree != by_hand("llama", "megatron:tp=a+c,sp", mesh)


def test_equal_plans_are_offered_once():
    found = hand_plans(traced("mlp"), folded("mlp"), annotated("mlp"), MESH)
    tensor = "megatron:dp=2,tp=2"
    assert list(found) == ["ddp", "zero2", "zero3", tensor, f"{tensor},zero2", f"{tensor},zero3"]
    found = hand_plans(traced("llama"), folded("llama"), annotated("llama"), MESH)
    assert {"megatron:dp=2,tp=2,sp", "megatron:dp=2,tp=2,sp,zero3"} < set(found)


def test_hand_plans_are_read_with_their_degrees():
    mesh = parse_mesh("2x4x8")
    assert parse_hand_plan("ddp", mesh) == HandPlan()
    assert parse_hand_plan("zero3", mesh) == parse_hand_plan("fsdp", mesh) == HandPlan(flavour="zero3")
    assert parse_hand_plan("ep=8", mesh) == HandPlan(expert_axes=(2,))
    assert parse_hand_plan("ep=4,tp=8,fsdp", mesh) == HandPlan((2,), flavour="zero3", expert_axes=(1,))
    assert parse_hand_plan("megatron", mesh) == parse_hand_plan("megatron:dp=8,tp=8", mesh) == HandPlan((2,))
    assert parse_hand_plan("megatron:tp=32", mesh) == parse_hand_plan("megatron:tp=a1+a2", mesh) == HandPlan((1, 2))
    assert parse_hand_plan("megatron:tp=a0, sp, zero2", mesh) == HandPlan(
        (0,), is_sequence_parallel=True, flavour="zero2"
    )
    assert parse_hand_plan("megatron", parse_mesh("8")) == HandPlan((0,))
    for text, axes in (
        ("cp=8", (2,)),
        ("cp=a1,a2a,zero3", (1,)),
        ("dp=2,tp=8,cp=4", (1,)),
        ("tp=8,cp=4,all_gather", (1,)),
    ):
        plan = parse_hand_plan(f"megatron:{text}", mesh)
        assert plan.sequence_axes == axes and plan.sequence_by == next(
            (way for way in ("a2a", "all_gather") if way in text), "p2p"
        )
        assert parse_hand_plan(format_hand_plan(plan, mesh), mesh) == plan
    for text in ("megatron:a2a", "megatron:cp=8,a2a,p2p", "megatron:cp=3"):
        with pytest.raises(PlanError):
            parse_hand_plan(text, mesh)


@pytest.mark.parametrize(
    "text", ["ddp", "zero1", "megatron:dp=8,tp=8", "megatron:dp=2,tp=32,sp,zero3", "megatron:tp=a0+a2,zero2"]
)
def test_what_is_read_is_written_alike(text):
    mesh = parse_mesh("2x4x8")
    assert format_hand_plan(parse_hand_plan(text, mesh), mesh) == text


@pytest.mark.parametrize(
    "text",
    [
        "megatron:dp=3,tp=8",
        "megatron:pp=2",
        "megatron:dp",
        "fsdp:tp=2",
        "ddp:dp=2",
        "megatron:zero2,zero3",
        "megatron:tp=a9",
        "zero4",
    ],
)
def test_unknown_hand_plans_are_refused(text):
    with pytest.raises(PlanError, match=r"megatron:dp="):
        parse_hand_plan(text, parse_mesh("2x4x8"))


def test_a_norm_registered_behind_the_layers_that_follow_it():
    """As in BART: what stands for the others of its class is not the first of the graph's inputs."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)]) for _ in range(4)
            )
            self.first, self.scale = nn.LayerNorm(8), nn.Parameter(torch.ones(8))

        def forward(self, x):
            x = self.first(x * self.scale)
            for up, down, norm in self.layers:
                x = norm(x + down(up(x).relu()))
            return x.sum()

    graph = trace(Model(), (torch.randn(4, 8),), {})
    same = fold(graph)
    assert same.representative["layers_0_2_weight"] == "first_weight"
    candidates = annotate(graph, MESH, same)
    for assignment in hand_plans(graph, same, candidates, MESH).values():
        check_assignment(assignment, graph, same, candidates, MESH)
