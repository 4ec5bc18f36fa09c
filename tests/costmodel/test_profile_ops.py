"""The figures op by op add up to those of the whole."""

import math
from dataclasses import replace

import pytest

from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.profile_ops import profile
from autopar.costmodel.state_offload import hostable
from autopar.costmodel.training import Training
from tests.planner.cases import CPU, MESH, by_hand, traced


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "bert", "resnet"])
@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero3", "megatron:dp=2,tp=2,sp,zero3"])
@pytest.mark.parametrize("training", [Training(), Training("sgd", num_microbatches=3)], ids=str)
def test_figures_add_up_to_the_whole(name: str, kind: str, training: Training) -> None:
    assignment = by_hand(name, kind)
    assignment = replace(assignment, state_on_host=frozenset(item.value.name for item in hostable(traced(name))[::2]))
    whole = evaluate(traced(name), assignment, MESH, CPU, training=training)
    found = profile(traced(name), assignment, MESH, CPU, training=training)
    num_bytes = found.state_bytes.sum() + found.saved_bytes.sum() + sum(x.state_bytes for x in found.shared)
    assert math.isclose(found.forward_s.sum(), whole.microbatch_s("forward"), rel_tol=1e-9)
    assert math.isclose(found.backward_s.sum(), whole.microbatch_s("backward"), rel_tol=1e-9)
    assert math.isclose(found.once_s.sum() + sum(x.once_s for x in found.shared), whole.once_s, rel_tol=1e-9)
    assert math.isclose(num_bytes, whole.total_memory_bytes, rel_tol=1e-9)
