"""The figures op by op add up to those of the whole."""

import math

import pytest

from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.profile import profile
from tests.plan.cases import CPU, MESH, by_hand, traced


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "bert", "resnet"])
@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero3", "megatron:dp=2,tp=2,sp,zero3"])
def test_figures_add_up_to_the_whole(name: str, kind: str) -> None:
    assignment = by_hand(name, kind)
    whole = evaluate(traced(name), assignment, MESH, CPU)
    found = profile(traced(name), assignment, MESH, CPU)
    seconds = sum(column.sum() for column in (found.forward_s, found.backward_s, found.once_s)) + sum(x.once_s for x in found.shared)
    num_bytes = found.state_bytes.sum() + found.saved_bytes.sum() + sum(x.state_bytes for x in found.shared)
    assert math.isclose(seconds, whole.step_s, rel_tol=1e-9)
    assert math.isclose(num_bytes, whole.total_memory_bytes, rel_tol=1e-9)
