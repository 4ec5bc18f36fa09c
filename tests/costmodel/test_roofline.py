"""Flops against torch's own counter, and the roofline by hand."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from autopar.costmodel.cluster.attention_kernel import AttentionCall, attention_kernel
from autopar.costmodel.cluster.hardware import Cluster, LinkLevel
from autopar.costmodel.cluster.measured_terms import MemoryShare, ProductShare
from autopar.costmodel.roofline import least_reuse, op_bytes, op_flops, op_time, shapes_time, splitting_s
from autopar.ir.graph import Op, Value
from autopar.runtime.pipeline.split_backward import backward_of_inputs
from autopar.sbp.placement import I, P, R, S
from autopar.sbp.signature import Signature, Strategy
from autopar.torch_compat import TorchDispatchMode
from tests.costmodel.build import make_op, meta

CLUSTER = Cluster("test", (LinkLevel(0, 0.0, 1.0),), {"float32": 1e6}, 1e6, 2**30, "made up")


def _recurrent(gates: int, size: int, hidden: int) -> list[torch.Tensor]:
    """Parameters of two layers."""
    layers = ((size, hidden), (hidden, hidden))
    return [meta(*shape) for own, rest in layers for shape in ((gates, own), (gates, rest), (gates,), (gates,))]


WEIGHTS = {gates: _recurrent(gates, 8, 6) for gates in (6, 18, 24)}
PRODUCTS = {
    "linear": ("aten.linear.default", (meta(3, 4, 8), meta(6, 8), meta(6)), {}),
    "matmul": ("aten.matmul.default", (meta(2, 3, 4, 8), meta(2, 3, 8, 5)), {}),
    "matmul vector": ("aten.matmul.default", (meta(4, 8), meta(8)), {}),
    "mm": ("aten.mm.default", (meta(4, 8), meta(8, 5)), {}),
    "bmm": ("aten.bmm.default", (meta(2, 4, 8), meta(2, 8, 5)), {}),
    "addmm": ("aten.addmm.default", (meta(5), meta(4, 8), meta(8, 5)), {}),
    "baddbmm": ("aten.baddbmm.default", (meta(2, 4, 5), meta(2, 4, 8), meta(2, 8, 5)), {}),
    "einsum": ("aten.einsum.default", ("b i d, b j d -> b i j", (meta(2, 3, 8), meta(2, 5, 8))), {}),
    "einsum ellipsis": ("aten.einsum.default", ("...id,...dj->...ij", (meta(2, 7, 3, 8), meta(2, 7, 8, 5))), {}),
    "inner": ("aten.inner.default", (meta(3, 4, 8), meta(5, 8)), {}),
    "tensordot": ("aten.tensordot.default", (meta(3, 4, 8), meta(8, 4, 5), [1, 2], [1, 0]), {}),
    "lstm": (
        "aten.lstm.input",
        (meta(5, 3, 8), [meta(2, 3, 6), meta(2, 3, 6)], WEIGHTS[24], True, 2, 0.0, True, False, False),
        {},
    ),
    "gru": ("aten.gru.input", (meta(5, 3, 8), meta(2, 3, 6), WEIGHTS[18], True, 2, 0.0, True, False, False), {}),
    "rnn": ("aten.rnn_tanh.input", (meta(3, 5, 8), meta(2, 3, 6), WEIGHTS[6], True, 2, 0.0, True, False, True), {}),
    "conv": ("aten.conv2d.default", (meta(2, 4, 9, 9), meta(6, 4, 3, 3), meta(6), (2, 2), (1, 1)), {}),
    "conv transposed": ("aten.conv_transpose2d.input", (meta(2, 4, 5, 5), meta(4, 6, 3, 3)), {}),
    "attention": (
        "aten.scaled_dot_product_attention.default",
        (meta(2, 3, 6, 8), meta(2, 3, 7, 8), meta(2, 3, 7, 8)),
        {},
    ),
}


def whole(op: Op) -> Strategy:
    return Strategy((Signature((I,) * len(op.inputs), (I,) * len(op.outputs)),))


def shapes(values: tuple[Value, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(value.shape for value in values)


@pytest.mark.parametrize("name", PRODUCTS)
def test_forward_and_backward_flops(name):
    target, args, kwargs = PRODUCTS[name]
    op = make_op(target, *args, **kwargs)
    found, overload = target.removeprefix("aten.").split(".")
    with FlopCounterMode(display=False) as forward:
        out = getattr(getattr(torch.ops.aten, found), overload)(*args, **kwargs)
    with FlopCounterMode(display=False) as backward:
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    if name != "matmul vector":  # matrix times vector is missing in torch's counter
        assert op_flops(op, shapes(op.inputs), shapes(op.outputs)) == forward.get_total_flops()
    fast = Cluster("x", CLUSTER.levels, {"float32": 1.0}, 1e30, 1, "")
    times = op_time(op, whole(op), (1,), fast)
    # torch counts the backward of attention without the product that it computes again
    if name not in ("matmul vector", "attention"):
        assert times[1] / times[0] == backward.get_total_flops() / forward.get_total_flops()


HEADS = (2, 3, 16, 8)
ATTENTIONS = {
    "plain": (False, False, 0.0),
    "masked": (True, False, 0.0),
    "causal": (False, True, 0.0),
    "dropout": (False, False, 0.1),
}


class CountPasses(TorchDispatchMode):
    """How often tensors of as many elements as there are scores are read or written; booleans and views are not."""

    def __init__(self, num_scores: int) -> None:
        super().__init__()
        self.num_scores, self.num_passes = num_scores, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, schema = str(func), func._schema
        is_view = "view" in name or (schema.returns[0].alias_info is not None and not schema.is_mutable)
        if not is_view and "empty" not in name:
            read = [] if "bernoulli_" in name else tree_leaves((args, kwargs))
            tensors = [x for x in [*read, *tree_leaves(out)] if isinstance(x, torch.Tensor)]
            self.num_passes += sum(x.numel() == self.num_scores for x in tensors)
        return out


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_written_out_passes_over_its_scores_as_often_as_torch(name: str) -> None:
    has_mask, is_causal, dropout_p = ATTENTIONS[name]
    num_scores = math.prod(HEADS[:3]) * HEADS[2]
    heads = [torch.randn(HEADS, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(1, 1, HEADS[2], HEADS[2]) if has_mask else None
    with CountPasses(num_scores) as forward, sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(*heads, mask, dropout_p, is_causal)
    with CountPasses(num_scores) as backward:
        out.sum().backward()
    mask = meta(1, 1, HEADS[2], HEADS[2], grad=False) if has_mask else None
    op = make_op(
        "aten.scaled_dot_product_attention.default", *(meta(*HEADS) for _ in range(3)), mask, dropout_p, is_causal
    )
    # FlashAttention takes no float32; products cost nothing, and a byte a second
    slow = replace(CLUSTER, flops_per_s={"float32": 1e30}, memory_bandwidth_bytes_per_s=1.0)
    times = op_time(op, whole(op), (1,), replace(slow, attention_kernels=("flash",)))
    own = op_bytes(op, shapes(op.inputs), shapes(op.outputs))
    passes = [(seconds - rounds * own) / num_scores / 4 for seconds, rounds in zip(times, (1, 2))]
    assert passes == [pytest.approx(forward.num_passes), pytest.approx(backward.num_passes)]


KERNELS = {
    "halves": (torch.bfloat16, HEADS, {"is_causal": True}, ("flash", "efficient"), "flash"),
    "float32": (torch.float32, HEADS, {}, ("flash", "efficient"), "efficient"),
    "V100": (torch.float16, HEADS, {"is_causal": True}, ("efficient",), "efficient"),
    "bfloat16 on V100": (torch.bfloat16, HEADS, {}, ("efficient",), "separate"),
    "head that is not aligned": (torch.float32, (2, 3, 16, 6), {}, ("flash", "efficient"), "separate"),
    "float64": (torch.float64, HEADS, {}, ("flash", "efficient"), "separate"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_attention_is_priced_by_the_kernel_that_the_device_has(name: str) -> None:
    dtype, heads, options, kernels, kernel = KERNELS[name]
    call = AttentionCall(heads, heads, heads, dtype, has_mask=False, is_causal=options.get("is_causal", False))
    assert attention_kernel(call, kernels) == kernel
    op = make_op("aten.scaled_dot_product_attention.default", *(meta(*heads, dtype=dtype) for _ in range(3)), **options)
    fused, own = (op_time(op, whole(op), (1,), replace(CLUSTER, attention_kernels=x)) for x in ((), kernels))
    assert (own == fused) == (kernel != "separate")
    assert kernel != "separate" or own[0] > fused[0]


def test_a_head_is_split_where_no_kernel_takes_the_parts():
    """Values whose features are split into parts of 4 are not aligned for halves: their attention is written out."""
    heads = [meta(2, 4, 32, 8, dtype=torch.float16) for _ in range(3)]
    op = make_op("aten.scaled_dot_product_attention.default", *heads)
    cluster = replace(CLUSTER, attention_kernels=("flash", "efficient"))
    by_head, inside = (
        op_time(op, Strategy((Signature((first, first, second), (second,)),)), (2,), cluster)
        for first, second in ((S(1), S(1)), (R, S(3)))
    )
    assert by_head[0] < inside[0] and by_head[1] < inside[1]
    floor = replace(cluster, attention_kernels=()).at_best(), cluster.at_best()
    assert all(sum(op_time(op, whole(op), (1,), best)) / 2 <= sum(by_head) for best in floor)


@pytest.mark.parametrize(("length", "share"), [(8, 1 / 2), (12, 1 - 1 / 8)])
def test_causal_attention_does_half_and_parts_without_equal_halves_wait_for_the_last(length: int, share: float):
    heads = [meta(2, 3, length, 4) for _ in range(3)]
    full = make_op("aten.scaled_dot_product_attention.default", *heads)
    causal = make_op("aten.scaled_dot_product_attention.default", *heads, None, 0.0, True)
    whole_shapes = shapes(full.inputs), shapes(full.outputs)
    assert op_flops(causal, *whole_shapes) == op_flops(full, *whole_shapes) / 2
    for keys in (length, length // 4):  # whole, or a part that is sent around a ring
        part = (2, 3, length // 4, 4)
        split = (part, (2, 3, keys, 4), (2, 3, keys, 4)), (part,)
        assert op_flops(full, *split) == op_flops(full, *whole_shapes) / 4
        assert op_flops(causal, *split) == op_flops(full, *split) * share


def test_results_of_keys_that_go_around_a_ring_are_merged_in_float32():
    """For each of four parts 7 passes of 4 bytes and one of 2 over a result, 2 and one over gradients of q, k and v."""
    heads = [meta(2, 3, 16, 4, dtype=torch.bfloat16) for _ in range(3)]
    op = make_op("aten.scaled_dot_product_attention.default", *heads)
    part, num = (2, 3, 4, 4), 2 * 3 * 4 * 4
    whole_keys = (part, (2, 3, 16, 4), (2, 3, 16, 4)), (part,)
    ring = (part, part, part), (part,)
    slow = replace(CLUSTER, flops_per_s={"float32": 1e5})  # products take longer than bytes
    gathered, turned = (shapes_time(op, *each, slow) for each in (whole_keys, ring))
    rate = slow.memory_bandwidth_bytes_per_s
    assert turned[0] - gathered[0] == pytest.approx(4 * num * (7 * 4 + 2) / rate, rel=1e-3)
    assert turned[1] - gathered[1] == pytest.approx(4 * 3 * num * (2 * 4 + 2) / rate, rel=1e-3)


def test_backward_needs_a_product_per_tracked_input_only():
    for tracked, ratio in (((True, True), 2), ((False, True), 1), ((False, False), 0)):
        op = make_op("aten.mm.default", meta(64, 64, grad=tracked[0]), meta(64, 64, grad=tracked[1]))
        forward, backward = op_time(op, whole(op), (1,), CLUSTER)
        assert backward == ratio * forward


def test_roofline_on_local_shapes():
    op = make_op("aten.mm.default", meta(64, 64), meta(64, 64))
    rows = Strategy((Signature((S(0), R), (S(0),)),))
    inner = Strategy((Signature((S(1), S(0)), (P,)),))
    assert op_time(op, whole(op), (4,), CLUSTER)[0] == pytest.approx(2 * 64**3 / 1e6)
    assert (
        op_time(op, rows, (4,), CLUSTER)[0]
        == op_time(op, inner, (4,), CLUSTER)[0]
        == pytest.approx(2 * 64**3 / 4 / 1e6)
    )
    add = make_op("aten.add.Tensor", meta(64, 64), meta(64, 64))
    assert op_time(add, whole(add), (4,), CLUSTER)[0] == pytest.approx(3 * 64 * 64 * 4 / 1e6)


def test_views_and_lookups():
    view = make_op("aten.view.default", meta(4, 8), (32,))
    assert op_time(view, whole(view), (1,), CLUSTER) == (0.0, 0.0)
    rows = make_op("aten.embedding.default", meta(1000, 8), meta(5, dtype=torch.int64))
    assert op_bytes(rows, shapes(rows.inputs), shapes(rows.outputs)) == 5 * 8 * 4 * 2 + 5 * 8


def test_shares_and_fixed_costs_by_hand():
    shares = (ProductShare(0.5, 4), ProductShare(1.0, 64), ProductShare(0.25, op="aten.bmm", backward=0.125))
    fast = replace(CLUSTER, memory_bandwidth_bytes_per_s=1e12)  # products take the time of their flops
    terms = {"kernel_s": 7.0, "product_shares": shares, "memory_shares": (MemoryShare("aten.gelu", 0.5, 0.25),)}
    for bare, op, shares_of_op, kernels in (
        (fast, make_op("aten.linear.default", meta(64, 128), meta(16, 128)), (0.75, 0.75), (1, 2)),  # half way to 64
        (fast, make_op("aten.linear.default", meta(64, 128), meta(2, 128)), (0.5, 0.5), (1, 2)),
        (fast, make_op("aten.bmm.default", meta(2, 64, 128), meta(2, 128, 64)), (0.25, 0.125), (1, 2)),
        (CLUSTER, make_op("aten.gelu.default", meta(64, 128)), (0.5, 0.25), (1, 1)),
        (CLUSTER, make_op("aten.relu.default", meta(64, 128)), (1.0, 1.0), (1, 1)),
        (CLUSTER, make_op("aten.view.default", meta(64, 128), [128, 64]), (1.0, 1.0), (0, 0)),
    ):
        times = op_time(op, whole(op), (1,), bare)
        expected = [time_s / share + 7.0 * num for time_s, share, num in zip(times, shares_of_op, kernels)]
        assert op_time(op, whole(op), (1,), replace(bare, **terms)) == pytest.approx(expected), op.target


@pytest.mark.parametrize("rows, is_odd", [(16, False), (12, False), (17, True), (10, True)])
def test_products_whose_rows_are_no_whole_units_are_slower(rows, is_odd):
    """Rows of 16 bytes are 4 elements of float32; the number of rows of the first operand does not matter."""
    fast = replace(CLUSTER, memory_bandwidth_bytes_per_s=1e12)
    slow = replace(fast, unaligned_shares={"float32": 0.25})
    op = make_op("aten.linear.default", meta(63, 128), meta(rows, 128), meta(rows))
    (forward_s, backward_s), times = (op_time(op, whole(op), (1,), cluster) for cluster in (fast, slow))
    assert times == pytest.approx((forward_s * (4 if is_odd else 1), backward_s * (4 if is_odd else 1)))
    image = make_op("aten.conv2d.default", meta(2, 3, 9, 9), meta(5, 3, 3, 3))
    assert op_time(image, whole(image), (1,), slow) == op_time(image, whole(image), (1,), fast)


def test_shares_of_memory_are_by_dtype_where_it_has_rows():
    shares = MemoryShare("aten.gelu", 0.5), MemoryShare("aten.gelu", 0.25, dtype="bfloat16"), MemoryShare("", 0.125)
    cluster = replace(CLUSTER, memory_shares=shares)
    for target, dtype, share in (("gelu", torch.float32, 0.5), ("gelu", torch.bfloat16, 0.25), ("relu", None, 0.125)):
        op = make_op(f"aten.{target}.default", meta(64, 128, dtype=dtype or torch.float32))
        bytes_s = op_bytes(op, shapes(op.inputs), shapes(op.outputs)) / cluster.memory_bandwidth_bytes_per_s
        assert op_time(op, whole(op), (1,), cluster)[0] == pytest.approx(bytes_s / share)


@pytest.mark.parametrize(
    "name, rows, columns, summed",
    [("linear", 12, 6, 8), ("matmul", 4, 5, 8), ("mm", 4, 5, 8), ("baddbmm", 4, 5, 8), ("einsum", 3, 5, 8)],
)
def test_the_least_reuse_of_a_product_of_matrices_is_its_smallest_dim(name, rows, columns, summed):
    target, args, kwargs = PRODUCTS[name]
    op = make_op(target, *args, **kwargs)
    flops = op_flops(op, shapes(op.inputs), shapes(op.outputs))
    assert least_reuse(shapes(op.inputs), shapes(op.outputs), flops) == min(rows, columns, summed)


def test_new_tensors_that_the_allocator_does_not_keep_cost_their_memory():
    fresh = replace(CLUSTER, fresh_s_per_byte=1e-3)
    rows, row = 2**13, 2**10  # 32 MiB of float32

    def beyond(op: Op, num_devices: int = 1) -> tuple[float, ...]:
        """Bytes of new memory in forward and backward, by rows."""
        rows_split = Strategy((Signature((S(0),), (S(0),)),))
        strategy = rows_split if num_devices > 1 else whole(op)
        pairs = zip(*(op_time(op, strategy, (num_devices,), cluster) for cluster in (fresh, CLUSTER)))
        return tuple(round((more - less) / 1e-3) for more, less in pairs)

    whole_bytes = 4 * rows * row
    x, weight = meta(rows, row), meta(row, row)
    assert beyond(make_op("aten.gelu.default", x)) == (whole_bytes, whole_bytes)
    assert beyond(make_op("aten.gelu.default", x), 2) == (0, 0)
    assert beyond(make_op("aten.add.Tensor", x, x)) == (whole_bytes, 0)  # whose gradients are one tensor
    assert beyond(make_op("aten.linear.default", x, weight)) == (whole_bytes, whole_bytes)  # not the weight's
    assert beyond(make_op("aten.linear.default", meta(8, rows), meta(rows, rows))) == (0, 4 * rows * rows)
    assert beyond(make_op("aten.view.default", x, (rows * row,))) == (0, 0)
    saved = make_op("aten.cross_entropy_loss.default", x, meta(rows, dtype=torch.int64))
    assert beyond(saved)[0] == whole_bytes + 4  # logarithms of softmax, and the number of rows
    assert shapes_time(make_op("aten.gelu.default", x), ((rows, row),), ((rows, row),), fresh.at_best()) == shapes_time(
        make_op("aten.gelu.default", x), ((rows, row),), ((rows, row),), CLUSTER
    )


class _Kernels(TorchDispatchMode):
    """Kernels that go over whole tensors in backward: products, and those of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.name().split("::")[1] in {"mm", "native_layer_norm_backward", "native_group_norm_backward"}
        return func(*args, **(kwargs or {}))


SPLIT = {
    "linear": (F.linear, lambda x, w: (x, w), (8, 8), 2),
    "linear of data": (F.linear, lambda x, w: (x, w), (8, 8), 1),
    "layer_norm": (torch.layer_norm, lambda x, w: (x, [8], w), (8,), 1),
    "layer_norm of data": (torch.layer_norm, lambda x, w: (x, [8], w), (8,), 1),
    "layer_norm without weight": (torch.layer_norm, lambda x, w: (x + w, [8]), (8,), 1),
    "group_norm": (torch.group_norm, lambda x, w: (x, 2, w), (8,), 1),
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_backward_in_two_parts_takes_as_many_kernels_more_as_it_is_priced(name: str) -> None:
    function, arguments, shape, num_whole = SPLIT[name]

    def kernels(is_split: bool) -> int:
        x, weight = torch.ones(4, 8, requires_grad="data" not in name), torch.ones(shape, requires_grad=True)
        out = function(*arguments(x, weight.view_as(weight)))
        with _Kernels() as counted:
            if is_split:
                _, left = backward_of_inputs([out], [torch.ones_like(out)], [x])
                assert left is not None
                left.run()
            else:
                out.sum().backward()
        return counted.number

    target = f"aten.{name.split()[0]}.default"
    has_weight = "without" not in name
    read = arguments(meta(4, 8, grad="data" not in name), meta(*shape)) if has_weight else (meta(4, 8), [8])
    op, cluster = make_op(target, *read), replace(CLUSTER, flops_per_s={"float32": 1e30}, kernel_s=0.0)
    shapes = tuple(value.shape for value in op.inputs), tuple(value.shape for value in op.outputs)
    assert kernels(is_split=False) == num_whole
    backward_s = shapes_time(op, *shapes, cluster)[1]
    more = kernels(is_split=True) - num_whole
    assert splitting_s(op, *shapes, cluster) == pytest.approx(more / num_whole * backward_s)
    assert (splitting_s(op, *shapes, replace(CLUSTER, kernel_s=1.0)) >= 1) == (has_weight and "data" not in name)
