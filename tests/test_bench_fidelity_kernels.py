"""What libraries make one kernel, cast once and hide, against bytes by hand and against links that cost nothing."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from autopar.costmodel.cluster.hardware import LinkLevel
from autopar.costmodel.cluster.presets import PRESETS
from autopar.costmodel.roofline import op_time
from autopar.ir.op_facts import ATTENTION, family
from autopar.models.catalogue import Example
from bench.fidelity.fused_kernels import fused_s
from bench.fidelity.h100_models import h100_model
from bench.fidelity.h100_rows import h100_rows
from bench.fidelity.peak_bytes import peak_bytes
from bench.fidelity.published_models import v100_gpt
from bench.fidelity.run_again import ATTENTION_ALONE, OTHER_PRODUCTS, kept_results, run_again
from bench.fidelity.written_plans import Library, WrittenPlan, staged, step_s

BATCH, WIDTH = 32, 64


class Gated(nn.Module):
    """Products with, between them, a gate, and then a residual with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(self.gate(x)) * self.up(x)
        y = x + self.down(y)
        return (y * (y * y).mean(-1, keepdim=True).rsqrt()).sum()


def gated() -> Example:
    with torch.device("meta"):
        return Example(Gated(), (torch.zeros(BATCH, WIDTH),), {})


def test_a_chain_between_products_reads_and_writes_once_what_others_make_and_take():
    (stage,) = staged(WrittenPlan(gated)).stages
    size, rows = BATCH * WIDTH * 4, BATCH * 4
    # silu, and the product with it; forward and backward of each move as much
    apart = 2 * (2 * size + 3 * size)
    together = (2 * size + size) + (size + 2 * 2 * size)
    # + of residuals, square, mean, rsqrt, product, and the sum of all, which no other op takes but the output
    apart += 2 * (3 * size + 3 * size + (size + rows) + 2 * rows + (2 * size + rows) + (size + 4))
    together += (2 * size + 4) + (4 + 2 * 2 * size)
    rate = stage.cluster.memory_bandwidth_bytes_per_s
    assert fused_s(stage, ()) == pytest.approx((apart - together) / rate)


@pytest.fixture(scope="module")
def small():
    return partial(v100_gpt, 8, 256, 4, 4)


def test_all_stages_of_a_rank_hide_their_collectives(small):
    """As if links between tensor ranks cost nothing."""
    written = WrittenPlan(small, tensor=2, stages=2, chunks=2, num_microbatches=4, recomputed="all")
    far = LinkLevel(0, 0.0, float("inf"))
    dear, free = (
        replace(PRESETS["v100"], levels=(LinkLevel(2, 0.0, rate), far), flops_per_s={"float32": 1e11})
        for rate in (1e8, float("inf"))
    )
    shown, hidden, none = step_s(written, dear), step_s(written, dear, Library("all")), step_s(written, free)
    assert hidden == pytest.approx(none) and shown > 1.1 * none


def test_casts_that_are_kept_are_made_of_weights_once_and_of_what_layers_share_once(small):
    """Of each layer q, k and v take the same; backward casts the gradient alone."""
    written, cluster = WrittenPlan(small, num_microbatches=2), PRESETS["v100"]
    plain, kept = (step_s(written, cluster, Library(cast_bytes=size, keeps_casts=True)) for size in (0.0, 1e3))
    rows, hidden, layers = 8 // 2 * 2048, 256, 4
    taken = rows * (3 * hidden + 4 * hidden)  # of q, k and v, of out, of up; of down
    given = rows * (5 * hidden + 4 * hidden)
    weights = 4 * hidden**2 + 2 * 4 * hidden**2
    moved = layers * (2 * (taken + given) + weights) * 1e3
    assert kept - plain == pytest.approx(moved / cluster.memory_bandwidth_bytes_per_s, rel=1e-6)


def test_selective_recomputation_runs_every_second_product_and_no_attention_again():
    model = partial(h100_model, "llama3-8b", 1, 128, layers=4)
    (stage,) = staged(WrittenPlan(model, recomputed="all")).stages
    again, kept = (names(stage, OTHER_PRODUCTS) for names in (run_again, kept_results))
    products = [op for op in stage.graph.ops if op.target == "aten.linear.default"][:7]  # q, k, v, out, gate, up, down
    assert [op.name in again for op in products] == [False, True, False, True, False, True, False]
    assert [op.name in kept for op in products] == [True, False, True, False, True, False, True]
    attention = [op for op in stage.graph.ops if family(op.target) == ATTENTION]
    assert len(attention) == 4 and all(op.name in kept and op.name not in again for op in attention)
    assert run_again(stage, ATTENTION_ALONE) == {op.name for op in attention}


def test_what_runs_again_one_by_one_takes_a_forward_of_it_and_keeps_the_other_results():
    model, cluster = partial(h100_model, "llama3-8b", 1, 128, layers=4), PRESETS["h100"]
    none, some, every = (WrittenPlan(model, recomputed=which) for which in ("none", OTHER_PRODUCTS, "all"))
    (stage,) = staged(every).stages
    names = run_again(stage, OTHER_PRODUCTS)
    of_plan = [step_s(written, cluster) for written in (none, some, every)]
    again_s = [
        sum(op_time(op, stage.assignment.strategies[op.name], stage.mesh.shape, cluster)[0] for op in ops)
        for ops in ([op for op in stage.graph.ops if op.name in names], stage.graph.ops)
    ]
    assert of_plan[1] - of_plan[0] == pytest.approx(again_s[0])
    assert of_plan[0] < of_plan[1] < of_plan[2] < of_plan[0] + again_s[1]
    small, large = (peak_bytes(written, cluster, Library()) for written in (every, some))
    kept = [op for op in stage.graph.ops if op.name in kept_results(stage, OTHER_PRODUCTS)]
    assert large - small == sum(op.outputs[0].num_bytes for op in kept)


def test_float8_is_of_experts_too_where_the_library_casts_their_products():
    """At most twice as fast; elsewhere their products, most of the work, stay as they are."""
    row = {"model": "qwen3-30b-a3b", "gpus": "8", "global_batch": "64", "microbatch": "1", "sequence": "4096"}
    row |= {"fsdp": "8", "tp": "1", "pp": "1", "cp": "1", "vp": "1", "ep": "8", "recompute": "none", "technique": ""}
    row |= {"tokens_per_s_per_gpu": "1000", "memory_gib": ""}
    ratio = {}
    for source in ("megatron-bridge", "automodel"):
        known = h100_rows([row | {"source": source, "precision": precision} for precision in ("bf16", "fp8")])
        times = [step_s(replace(one.written, num_layers=4), one.cluster(()), one.library) for one in known]
        ratio[source] = times[0] / times[1]
    assert 1 < ratio["automodel"] < ratio["megatron-bridge"] < 2
