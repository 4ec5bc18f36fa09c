"""Functions as people write them for torch, beside the same plans by name and the parts that DTensor has."""

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.mesh import Mesh
from autopar.planner.handwritten.fake_ranks import fake_ranks
from autopar.planner.handwritten.function_plan import WrittenPlan, function_plan
from autopar.planner.handwritten.named_plan import named_plan
from autopar.planner.request import ANYTHING
from autopar.plans.plan import Plan
from autopar.plans.validate import check_assignment
from autopar.sbp.placement import local_shape
from tests.planner.cases import CPU, MESH, annotated, folded, traced
from tests.zoo import LAYERS, build

PRODUCTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
REST = ("self_attn.o_proj", "mlp.down_proj")


def tensor_parallel(model: Any, mesh: DeviceMesh, *, is_sp: bool = False, head: Any = None) -> None:
    """Llama as torchtitan splits it."""
    out = Shard(1) if is_sp else Replicate()
    split = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=out)}
    split["lm_head"] = head or ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, split | ({"model.norm": SequenceParallel()} if is_sp else {}))
    for layer in model.model.layers:
        styles: dict[str, Any] = {name: ColwiseParallel() for name in PRODUCTS}
        styles |= {name: RowwiseParallel(output_layouts=out) for name in REST}
        norms = ("input_layernorm", "post_attention_layernorm")
        parallelize_module(layer, mesh, styles | ({name: SequenceParallel() for name in norms} if is_sp else {}))


def sharded(model: Any, mesh: DeviceMesh, **options: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def both(model: Any, mesh: DeviceMesh, *, is_sp: bool = False, **options: Any) -> None:
    tensor_parallel(model, mesh["tp"], is_sp=is_sp)
    sharded(model, mesh["dp"], **options)


def gathered(model: Any, mesh: DeviceMesh) -> None:
    tensor_parallel(model, mesh["tp"], head=ColwiseParallel(output_layouts=Replicate()))
    sharded(model, mesh["dp"], reshard_after_forward=True)


def on_all(model: Any, mesh: DeviceMesh) -> None:
    sharded(model, mesh["dp", "tp"]._flatten("all"), reshard_after_forward=True)


def written(function: Any, mesh: Mesh = MESH) -> WrittenPlan:
    return function_plan(function, "written", build("llama").model, traced("llama"), mesh, CPU, ANYTHING)


@cache
def named(text: str) -> Plan:
    return named_plan(text, build("llama").model, traced("llama"), MESH, CPU, ANYTHING)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (partial(both, reshard_after_forward=True), "megatron:dp=2,tp=2,zero3"),
        (partial(both, reshard_after_forward=False), "megatron:dp=2,tp=2,zero2"),
        (partial(both, is_sp=True, reshard_after_forward=False), "megatron:dp=2,tp=2,sp,zero2"),
        (gathered, "hf:dp=2,tp=2,zero3"),
        (on_all, "zero3"),
    ],
)
def test_it_is_priced_as_the_same_plan_by_name(function, text):
    """The strategies are the same, and where the layouts are the same too, so are time and memory.

    They differ where the sequence is split: of norms DTensor has all on every rank, and sums their gradients.
    """
    found, expected = written(function).plan, named(text)
    assert found.assignment.strategies == expected.assignment.strategies
    found_layouts, layouts = found.assignment.layouts, expected.assignment.layouts
    differing = {item.fqn for item in found.graph.inputs if found_layouts[item.value.name] != layouts[item.value.name]}
    assert all("norm" in name for name in differing) and bool(differing) == ("sp" in text)
    if not differing:
        assert (found.step_s, found.memory_bytes) == (expected.step_s, expected.memory_bytes)
    check_assignment(found.assignment, traced("llama"), folded("llama"), annotated("llama"), MESH)


@pytest.mark.parametrize("function", [both, partial(both, is_sp=True), gathered, on_all])
def test_parts_have_the_sizes_that_dtensor_gives_them(function):
    plan, model = written(function).plan, skeleton(build("llama").model)
    with fake_ranks(MESH) as mesh:
        function(model, mesh)
        sizes = {name: (x.to_local() if isinstance(x, DTensor) else x).numel() for name, x in model.named_parameters()}
    for item in plan.graph.of_kind("parameter"):
        parts = local_shape(item.value.shape, plan.assignment.layouts[item.value.name], MESH.shape)
        assert math.prod(parts) == sizes[item.fqn], item.fqn


def test_layouts_are_shown_as_dtensor_has_them():
    rows = {row.fqn: row for row in written(both).rows}
    row = rows["model.layers.*.self_attn.q_proj.weight"]
    assert row.dtensor == "(_StridedShard(dim=0, sf=2), Shard(dim=0)) on dp, tp"
    assert (row.count, row.priced) == (LAYERS, "S(1)S(0)")
    assert rows["model.layers.*.mlp.down_proj.weight"].priced == "S(0)S(1)"
    assert any("_StridedShard" in remark for remark in written(both).remarks)
    assert not written(on_all).remarks


def test_parameters_with_fewer_rows_than_ranks_are_told():
    def function(model: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(model, mesh=mesh)

    mesh = Mesh((4,), ("dp",))
    found = function_plan(function, "written", build("bert").model, traced("bert"), mesh, CPU, ANYTHING)
    (row,) = (row for row in found.rows if row.priced != "S(0)")
    assert row.dtensor == "(Shard(dim=0)) on dp" and row.priced == "S(1)"
    assert any(row.fqn in remark and "ranks do not divide" in remark for remark in found.remarks)


def test_blocks_whose_activations_are_computed_again():
    def function(model: Any, mesh: DeviceMesh) -> None:
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = checkpoint_wrapper(layer)
        both(model, mesh)

    plan = written(function).plan
    assert len(plan.assignment.recomputed) == LAYERS
    assert sum("linear" in name for name in plan.assignment.recomputed[0]) == 7
    assert plan.costs.memory_bytes["activations"] < written(both).plan.costs.memory_bytes["activations"]


def test_layers_may_differ():
    def function(model: Any, mesh: DeviceMesh) -> None:
        names = {name: ColwiseParallel() for name in ("mlp.gate_proj", "mlp.up_proj")}
        parallelize_module(model.model.layers[0], mesh["tp"], names | {"mlp.down_proj": RowwiseParallel()})
        sharded(model, mesh["dp"])

    rows = {row.priced for row in written(function).rows if row.fqn.endswith("gate_proj.weight")}
    assert rows == {"S(1)S(0)", "S(0)B"}


def test_gradients_are_summed_in_the_dtype_of_the_policy():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = written(partial(both, mp_policy=policy))
    assert found.plan.training.reduce_dtype == "float32"
    assert any("param_dtype" in remark for remark in found.remarks)


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model


def around(model: Any, mesh: DeviceMesh) -> nn.Module:
    both(model, mesh)
    return Around(model)


def sharded_around(model: Any, mesh: DeviceMesh) -> nn.Module:
    tensor_parallel(model, mesh["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(Around(model), mesh=mesh["dp"])


@pytest.mark.parametrize("function", [around, sharded_around])
def test_a_module_around_the_model_is_priced_as_the_model(function):
    found, expected = written(function), written(both)
    assert (found.rows, found.plan.step_s) == (expected.rows, expected.plan.step_s)


def frozen(model: Any, mesh: DeviceMesh) -> None:
    model.model.embed_tokens.weight.requires_grad_(False)
    on_all(model, mesh)


def in_bfloat16(model: Any, mesh: DeviceMesh) -> None:
    on_all(model.to(torch.bfloat16), mesh)


def kept_on_two(model: Any, mesh: DeviceMesh) -> None:
    sharded(model, mesh["dp", "tp"]._flatten("all"), reshard_after_forward=2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (frozen, "1 parameters, model.embed_tokens.weight first, are frozen"),
        (in_bfloat16, "another dtype"),
        (kept_on_two, "priced as True"),
    ],
)
def test_what_is_priced_otherwise_is_told(function, words):
    assert any(words in remark for remark in written(function).remarks)


def raises(model: nn.Module, mesh: DeviceMesh) -> None:
    raise ValueError("no such layer")


def needs_gpu(model: nn.Module, mesh: DeviceMesh) -> None:
    torch.zeros(1, device="cuda")


def half_on_meta(model: Any, mesh: DeviceMesh) -> None:
    both(model, mesh)
    model.lm_head.to_empty(device="cpu")


def without_root(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp", "tp"]._flatten("all"))


def without_dp(model: Any, mesh: DeviceMesh) -> None:
    tensor_parallel(model, mesh["tp"])


def replicated(model: Any, mesh: DeviceMesh) -> nn.Module:
    tensor_parallel(model, mesh["tp"])
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def with_fsdp1(model: Any, mesh: DeviceMesh) -> nn.Module:
    return FullyShardedDataParallel(model, device_mesh=mesh["dp"])


def with_bias(model: Any, mesh: DeviceMesh) -> None:
    model.lm_head = nn.Linear(32, 64, device="meta")
    both(model, mesh)


def with_more_words(model: Any, mesh: DeviceMesh) -> None:
    model.lm_head = nn.Linear(32, 128, bias=False, device="meta")
    both(model, mesh)


def split_hidden(model: Any, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], {"model.embed_tokens": ColwiseParallel()})
    sharded(model, mesh["dp"])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises, r"test_function_plan.py:\d+: `raise ValueError.* raised ValueError: no such layer"),
        (needs_gpu, r"test_function_plan.py:\d+: `torch.zeros.*mesh.device_type"),
        (half_on_meta, r"test_function_plan.py:\d+: half_on_meta gives lm_head.weight contents and leaves \d+ .*embed"),
        (without_root, r"leaves 3 parameters, model.embed_tokens.weight first, out of fully_shard"),
        (without_dp, r"splits no parameter on mesh axis 'dp' and sums no gradients"),
        (replicated, r"test_function_plan.py:\d+: `return Distributed.* init_sync=False"),
        (with_fsdp1, r"test_function_plan.py:\d+: `return Fully.* write fully_shard"),
        (with_bias, r"with_bias adds parameter lm_head.bias"),
        (with_more_words, r"with_more_words gives lm_head.weight another shape"),
        (lambda model: model, r"test_function_plan.py:\d+: <lambda> raised TypeError"),
        (split_hidden, r"splits model.embed_tokens.weight as .*only products"),
        (lambda model, mesh: 3, r"test_function_plan.py:\d+: <lambda> returned a int"),
        (lambda model, mesh: nn.Linear(2, 2, device="meta"), r"leaves no parameter|nobody|splits no parameter"),
    ],
)
def test_what_cannot_be_priced_is_told_with_its_line(function, words):
    with pytest.raises(PlanError, match=words):
        written(function)
    assert not dist.is_initialized()
