"""What libraries make one kernel, cast once and hide, against bytes by hand and against links that cost nothing."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from autopar.costmodel.cluster.hardware import LinkLevel
from autopar.costmodel.cluster.presets import PRESETS
from autopar.models.catalogue import Example
from bench.fidelity.fused_kernels import fused_s
from bench.fidelity.published_models import v100_gpt
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
    assert fused_s(stage) == pytest.approx((apart - together) / rate)


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
