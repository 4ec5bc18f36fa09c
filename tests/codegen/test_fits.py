"""Plans under a memory limit, against the memory that their programs take."""

from dataclasses import replace

import pytest
import torch

from autopar import plan
from autopar.codegen.peak import predict_peak, predict_peaks
from autopar.costmodel.presets import PRESETS
from autopar.plan.staged import StagedPlan


def largest_rank_bytes(found) -> int:
    """Of the plan's ranks, as their programs run."""
    if not isinstance(found, StagedPlan):
        return predict_peak(found.graph, found.mesh, found.assignment, training=found.training).total_bytes
    return max(peak.total_bytes for peak in predict_peaks(found))


@pytest.mark.parametrize("memory_gib", [2, 3])
def test_a_plan_that_memory_binds_fits_its_devices(memory_gib: int) -> None:
    """GPT of 2560 wide with a vocabulary of 51200, as one of 2.6 billion parameters but for its depth."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 4, "n_embd": 2560, "n_head": 32, "vocab_size": 51200, "use_cache": False}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with torch.device("meta"):
        model, tokens = transformers.GPT2LMHeadModel(config).half().train(), torch.zeros(32, 1024, dtype=torch.long)
    model.loss_type = "ForCausalLM"
    cluster = replace(PRESETS["v100"], memory_bytes=memory_gib * 2**30)
    found = plan(model, 8, cluster=cluster, kwargs={"input_ids": tokens, "labels": tokens, "use_cache": False}, time_limit_s=5.0)
    assert largest_rank_bytes(found) <= cluster.memory_bytes
