"""What the meta device says is kept, against tensors that real runs keep."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import create_block_mask

from autopar.costmodel.activations import autograd_footprint
from autopar.costmodel.activations.autograd_footprint import footprint, regatherable
from autopar.ir.attention import index_functions
from autopar.ir.attention.flex_op import BLOCKS_OF_KEYS, BLOCKS_OF_QUERIES, FLEX
from autopar.ir.graph import Graph, Input
from autopar.sbp.candidates import strategies_of
from tests.costmodel.build import make_op, meta
from tests.runtime.training import traced
from tests.sbp import rulecheck
from tests.zoo import build

bf16, i32, i64 = torch.bfloat16, torch.int32, torch.int64


@pytest.mark.parametrize(
    "target, args, inputs, outputs",
    [
        ("aten.linear.default", (meta(2, 3, 8), meta(6, 8), meta(6)), {0, 1}, set()),
        ("aten.mul.Tensor", (meta(4, 8), meta(4, 8, grad=False)), {1}, set()),
        ("aten.mul.Tensor", (meta(4, 8), meta(4, 8)), {0, 1}, set()),
        ("aten.relu.default", (meta(4, 8),), set(), {0}),
        ("aten.silu.default", (meta(4, 8),), {0}, set()),
        ("aten.add.Tensor", (meta(4, 8), meta(8)), set(), set()),
        ("aten.softmax.int", (meta(4, 8), -1), set(), {0}),
        ("aten.embedding.default", (meta(9, 8), meta(4, dtype=i64)), {1}, set()),
        ("aten.layer_norm.default", (meta(4, 8), (8,), meta(8), meta(8)), {0, 1, 2}, set()),
        (
            "aten.scaled_dot_product_attention.default",
            (meta(1, 2, 4, 8), meta(1, 2, 4, 8), meta(1, 2, 4, 8)),
            {0, 1, 2},
            {0},
        ),
    ],
)
def test_saved_tensors(target, args, inputs, outputs):
    found = footprint(make_op(target, *args))
    assert found.saved_inputs == inputs and found.saved_outputs == outputs


def test_nothing_is_saved_without_gradient():
    assert (
        footprint(make_op("aten.mm.default", meta(4, 8, grad=False), meta(8, 4, grad=False))).saved_inputs
        == frozenset()
    )


def test_views_share_memory():
    assert footprint(make_op("aten.transpose.int", meta(4, 8), 0, 1)).is_view
    assert footprint(make_op("aten.split.Tensor", meta(4, 8), 2)).alias_of == (0, 0)
    assert not footprint(make_op("aten.neg.default", meta(4, 8))).is_view


def test_cross_entropy_keeps_its_log_softmax():
    op = make_op("aten.cross_entropy_loss.default", meta(16, 100), meta(16, dtype=i64))
    saved: list[torch.Tensor] = []
    logits, target = torch.randn(16, 100, requires_grad=True), torch.zeros(16, dtype=i64)
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.ops.aten.cross_entropy_loss.default(logits, target)
    internal = {t.data_ptr(): t.nbytes for t in saved if t.data_ptr() not in (logits.data_ptr(), target.data_ptr())}
    assert footprint(op).internal_bytes == pytest.approx(sum(internal.values()), abs=8)


def test_an_op_that_looks_at_values_keeps_everything():
    op = make_op("aten.masked_select.default", meta(4, 8), meta(4, 8, dtype=torch.bool), outputs=[meta(5)])
    assert footprint(op).saved_inputs == {0, 1} and footprint(op).alias_of == (-1,)


@pytest.mark.parametrize(("name", "left"), [("gpt2", {"transformer.wte.weight"}), ("llama", set()), ("bert", set())])
def test_matrices_of_blocks_may_be_gathered_again(name, left):
    """In transformers' Conv1D too, which stores its weight the other way round; tables that are looked up are not saved
    for backward.
    """
    graph = traced(build(name))
    found = regatherable(graph, {item.value.name: item.value.name for item in graph.inputs})
    looked_up = {op.inputs[0].name for op in graph.ops if op.target == "aten.embedding.default"}
    matrices = {item.value.name: item.fqn for item in graph.of_kind("parameter") if len(item.value.shape) == 2}
    assert {matrices[name] for name in matrices.keys() - found - looked_up} == set()
    assert {matrices[name] for name in looked_up & found} == set() and left <= {matrices[name] for name in looked_up}


@pytest.mark.parametrize(
    ("target", "slot", "args", "is_fit"),
    [
        ("aten.tensordot.default", 0, (meta(6, 2, 2), meta(2, 5, 2), (1, 2), (2, 0)), False),
        ("aten.matmul.default", 0, (meta(4, 6, 5), meta(4, 5, 3)), True),
        ("aten._grouped_mm.default", 1, (meta(8, 8, dtype=bf16), meta(4, 8, 16, dtype=bf16), meta(4, dtype=i32)), True),
    ],
)
def test_a_parameter_of_which_an_op_may_save_a_copy_is_not_gathered_again(
    target: str, slot: int, args: tuple[object, ...], is_fit: bool
) -> None:
    """The parameter of a tensordot is copied where it was gathered along its second dim, and the copy would be kept."""
    op = make_op(target, *args)
    kinds = ["argument"] * len(op.inputs)
    kinds[slot] = "parameter"
    inputs = tuple(Input(kind, value, "") for kind, value in zip(kinds, op.inputs))
    graph = Graph(inputs, (op,), op.outputs, (), (), {}, (), None, None)
    again = regatherable(graph, {value.name: value.name for value in op.inputs} | {op.name: op.name})
    assert again == ({op.inputs[slot].name} if is_fit else set())


@pytest.mark.parametrize("size", [4, 6, 9])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("target", ["aten.scaled_dot_product_attention.default", FLEX])
def test_each_step_of_a_ring_saves_as_much_as_the_one_before(
    target: str, is_causal: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv, rest = [meta(2, 4, 8 * size, 4) for _ in range(3)], (None, 0.0, is_causal)
    if target == FLEX:
        masked = create_block_mask(
            lambda b, h, q, k: q >= k, None, None, 8 * size, 8 * size, device="cpu", BLOCK_SIZE=4
        )
        tables = tuple(getattr(masked, name) for name in (*BLOCKS_OF_QUERIES, *BLOCKS_OF_KEYS)) if is_causal else ()
        name, captured = index_functions.traced(None, masked.mask_mod if is_causal else None, torch.device("cpu"))
        rest = (tables, captured, name, 0.5, (4, 4))
    op, _ = rulecheck.make_op(target, *qkv, *rest)
    (ring,) = [one for one in strategies_of(op, (size,)) if one.signatures[0].role == "ring"]
    found = autograd_footprint.saved_by_local_op(op, ring, (size,))
    monkeypatch.setattr(autograd_footprint, "_FEW_STEPS", size)
    assert found is not None and found == autograd_footprint.saved_by_local_op(op, ring, (size,)) > 0
