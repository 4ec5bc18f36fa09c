"""Tensors without data: what a GPU's kernels keep, by hand from what is known of them."""

from random import Random

import pytest
import torch
from torch import nn

from autopar.costmodel.activations.count_storages import count_storages
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.peak_memory.device_kernels import KnownShapes, namespace_on, without_data
from autopar.peak_memory.predict import predict_peak
from autopar.sbp.axis import Axis
from tests.runtime.any_plan import draw_example
from tests.runtime.training import plan_called

B, H, L, E = 2, 4, 64, 16
SCORES = B * H * L * L


def kept_bytes(device_type: str, dtype: torch.dtype, *, has_mask: bool = False, dropout_p: float = 0.0) -> int:
    """Bytes that attention adds until its backward: its result, and what it keeps besides q, k, v and the mask."""
    attention = namespace_on(device_type)["aten"].scaled_dot_product_attention.default
    with without_data(device_type):
        q, k, v = (torch.empty(B, H, L, E, dtype=dtype, requires_grad=True) for _ in range(3))
        mask = torch.empty(B, H, L, L, dtype=dtype) if has_mask else None
        with count_storages([x for x in (q, k, v, mask) if x is not None]) as storages:
            start = storages.num_bytes
            out = attention(q, k, v, mask, dropout_p)
            held = storages.num_bytes - start
            out.sum().backward()
            assert q.grad.shape == q.shape and k.grad.shape == k.shape
    return held


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_on_a_gpu_keeps_no_scores(dtype: torch.dtype, dropout_p: float, has_mask: bool):
    result, log_sum_exp = B * H * L * E * dtype.itemsize, 4 * B * H * L
    extra = kept_bytes("cuda", dtype, has_mask=has_mask, dropout_p=dropout_p) - result - log_sum_exp
    assert 0 <= extra <= 64  # the state of the random numbers


def test_attention_with_dropout_on_a_cpu_keeps_its_scores():
    result = B * H * L * E * 4
    assert kept_bytes("cpu", torch.float32) - result < SCORES
    assert kept_bytes("cpu", torch.float32, dropout_p=0.1) - result >= 4 * SCORES


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_values_put_where_a_mask_is_keep_what_they_keep_with_data(device_type: str):
    """Without data a mask has no number of rows, as which the values' gradient would be read again."""

    def counted(put, run=None) -> tuple[int, int, int]:
        x, values = (torch.ones(n, 16, requires_grad=True) for n in (64, 24))
        mask = torch.zeros(64, dtype=torch.bool)
        if not x.is_meta and run is None:
            mask[:24] = True
        with count_storages([x, values, mask], *([run] if run else [])) as storages:
            out = put(x, [mask], values)
            held = storages.num_bytes
            out.sum().backward()
            assert x.grad.shape == x.shape and values.grad.shape == values.shape
            return held, storages.peak_bytes, storages.num_bytes

    with without_data(device_type) as run:
        found = counted(namespace_on(device_type)["aten"].index_put.default, run)
    assert found == counted(torch.ops.aten.index_put.default)


class OfMask(nn.Module):
    """The columns that a mask has, read by the numbers of these columns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(8) % 2 == 0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[..., self.mask.nonzero().squeeze(-1)].square().mean()


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_numbers_of_a_mask_are_whole_without_data(device_type: str):
    graph, mesh = trace(OfMask(), (torch.randn(6, 8),), {}), Mesh((2,), ("dp",))
    assert predict_peak(graph, mesh, plan_called("ddp", graph, mesh).assignment, on=device_type).total_bytes > 0


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_check_of_values_within_a_kernel_holds_without_data(device_type: str):
    """`istft` checks its window by `torch.equal`, which has no answer for a tensor without data."""

    def counted(run=None) -> tuple[int, int]:
        spectrum = torch.ones(3, 17, 5, dtype=torch.complex64, requires_grad=True)
        window = torch.ones(32)
        with count_storages([spectrum, window], *([run] if run else [])) as storages:
            torch.istft(spectrum, 32, 8, window=window, length=32).sum().backward()
            return storages.peak_bytes, storages.num_bytes

    with without_data(device_type) as run:
        found = counted(run)
    assert found == counted()


def test_a_slice_of_the_queries_keeps_no_scores_either():
    attention = namespace_on("cuda")["local"].scaled_dot_product_attention
    with without_data("cuda"):
        q = torch.empty(B, H, L // 2, E, dtype=torch.float16, requires_grad=True)
        k, v = (torch.empty(B, H, L, E, dtype=torch.float16, requires_grad=True) for _ in range(2))
        with count_storages([q, k, v]) as storages:
            out = attention(q, k, v, is_causal=True, queries=(Axis("a", 2, 0, None),))
            given = 2 * B * H * (2 * L + L // 2) * E
            # the result; queries, result and the log-sum-exp of its scores in balanced order
            assert storages.num_bytes - given <= 3 * 2 * out.numel() + 4 * B * H * L // 2 + 64


def test_grouped_queries_get_gradients_of_their_shape():
    attention = namespace_on("cuda")["aten"].scaled_dot_product_attention.default
    for dtype in (torch.bfloat16, torch.float32):
        with without_data("cuda"):
            q = torch.empty(B, H, L, E, dtype=dtype, requires_grad=True)
            k, v = (torch.empty(B, H // 2, L, E, dtype=dtype, requires_grad=True) for _ in range(2))
            attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
            assert k.grad.shape == k.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_values_split_inside_a_head_give_a_result_of_their_head_size(dtype: torch.dtype, is_causal: bool):
    """FlashAttention wants one head size, so the memory-efficient kernel runs: no scores are kept."""
    attention = namespace_on("cuda")["aten"].scaled_dot_product_attention.default
    with without_data("cuda"):
        q, k = (torch.empty(B, H, L, E, dtype=dtype, requires_grad=True) for _ in range(2))
        v = torch.empty(B, H, L, E // 2, dtype=dtype, requires_grad=True)
        with count_storages([q, k, v]) as storages:
            start = storages.num_bytes
            out = attention(q, k, v, is_causal=is_causal)
            assert out.shape == v.shape
            assert storages.num_bytes - start <= out.numel() * dtype.itemsize + 4 * B * H * L + 64
        out.sum().backward()
        assert q.grad.shape == q.shape and v.grad.shape == v.shape


@pytest.mark.parametrize(
    ("dtype", "heads", "num_queries", "size", "value_size", "is_causal", "keeps_scores"),
    [
        (torch.bfloat16, H, L, 128, 128, True, False),
        (torch.bfloat16, H // 2, L, 128, 128, True, False),  # FlashAttention shares keys among heads,
        (torch.float32, H // 2, L, 128, 128, True, True),  # the memory-efficient kernel does not,
        (torch.bfloat16, H // 2, L, 128, 64, True, True),
        (torch.bfloat16, H, L, 20, 20, True, False),  # q, k and v padded to 24
        (torch.bfloat16, H, L, 40, 20, True, True),  # not aligned to 16 bytes
        (torch.bfloat16, H, L // 2, 64, 64, True, False),  # causal and not square: memory-efficient
        (torch.bfloat16, H, L, 512, 512, False, False),  # too large for FlashAttention
        (torch.float64, H, L, 16, 16, False, True),  # no fused kernel has doubles
    ],
)
def test_the_kernel_is_that_which_pytorch_picks(dtype, heads, num_queries, size, value_size, is_causal, keeps_scores):
    """The conditions of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, compute capability 8.0."""
    attention = namespace_on("cuda")["aten"].scaled_dot_product_attention.default
    with without_data("cuda"):
        q = torch.empty(B, H, num_queries, size, dtype=dtype, requires_grad=True)
        k = torch.empty(B, heads, L, size, dtype=dtype, requires_grad=True)
        v = torch.empty(B, heads, L, value_size, dtype=dtype, requires_grad=True)
        with count_storages([q, k, v]) as storages:
            start, out = storages.num_bytes, attention(q, k, v, is_causal=is_causal, enable_gqa=heads != H)
            padded = (4 if size % 8 else 1) * B * H * L * (-(-size // 8) * 8) * dtype.itemsize
            extra = storages.num_bytes - start - padded
        assert out.shape == (B, H, num_queries, value_size)
        assert (extra > B * H * num_queries * L * dtype.itemsize / 2) == keeps_scores


def test_dropout_keeps_a_byte_an_element():
    for device_type, each in (("cuda", 1), ("cpu", 2)):
        dropout = namespace_on(device_type)["aten"].dropout.default
        with without_data(device_type):
            x = torch.empty(1024, dtype=torch.float16, requires_grad=True)
            with count_storages([x]) as storages:
                out = dropout(x, 0.1, True)
                assert storages.num_bytes - 2 * x.numel() == out.numel() * (2 + each)
                assert dropout(x, 0.1, False).untyped_storage() is not None


@pytest.mark.parametrize("seed", range(12))
def test_known_shapes_are_those_of_the_ops(seed: int, monkeypatch: pytest.MonkeyPatch):
    example = draw_example(Random(seed), 5)
    known = predict_peak(example.graph, example.mesh, example.assignment, is_whole=True)
    monkeypatch.setattr(KnownShapes, "run", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert predict_peak(example.graph, example.mesh, example.assignment, is_whole=True) == known


def test_views_and_writes_of_known_shapes_share_memory():
    with without_data("cpu") as run, count_storages((), run) as storages:
        x = torch.empty(64, 32)
        for _ in range(3):  # the first is run, the next are known
            part = x[8:].t().reshape(32, 7, 8)
            assert part.storage_offset() == 256
            assert part.add_(1.0) is part and part.device.type == "cpu"
            assert storages.num_bytes == 64 * 32 * 4
            assert x[16:].t().storage_offset() == 512
            twice = x.mul(2.0)
            assert twice.stride() == (32, 1) and storages.num_bytes == 2 * 64 * 32 * 4
            del twice
