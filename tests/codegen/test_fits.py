"""Plans under a memory limit, against the memory that their programs take."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar import plan
from autopar.codegen.peak import predict_peaks, rank_peaks
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.presets import PRESETS
from autopar.errors import InfeasibleError
from autopar.plan.staged import StagedPlan

V100 = PRESETS["v100"]


def gpt(layers: int, batch: int, dropout: float) -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2 of 2560 wide with a vocabulary of 51200, as one of 2.6 billion parameters has 32 layers of, and a batch; in float16."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": layers, "n_embd": 2560, "n_head": 32, "vocab_size": 51200, "use_cache": False}
    config = transformers.GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    with torch.device("meta"):
        model, tokens = transformers.GPT2LMHeadModel(config).half().train(), torch.zeros(batch, 1024, dtype=torch.long)
    model.loss_type = "ForCausalLM"
    return model, {"input_ids": tokens, "labels": tokens, "use_cache": False}


@pytest.mark.parametrize(("memory_gib", "dropout"), [(2, 0.0), (3, 0.1)])
def test_a_plan_that_memory_binds_fits_its_devices(memory_gib: int, dropout: float) -> None:
    model, batch = gpt(4, 32, dropout)
    cluster = replace(V100, memory_bytes=memory_gib * 2**30)
    found = plan(model, 8, cluster=cluster, kwargs=batch, time_limit_s=2.0)
    assert found.peak_bytes == rank_peaks(found)
    assert max(found.peak_bytes) <= usable_memory_bytes(cluster) == found.memory_limit_bytes


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mesh", [8, "dp=8", "tp=8", "pp=8", "pp=4,dp=2", "pp=2,dp=4", "pp=2,dp=2,tp=2"])
def test_gpt_of_2600_million_parameters_on_8_v100_of_16_gib(mesh: int | str, dropout: float) -> None:
    """Whatever is returned fits, every stage run in full; what cannot fit is refused."""
    for num_samples in (8, 32, 128):
        model, batch = gpt(32, num_samples, dropout)
        try:
            found = plan(model, mesh, cluster=V100, kwargs=batch, time_limit_s=10.0)
        except InfeasibleError:
            assert mesh != 8, "some plan fits"
            continue
        peaks = [peak.total_bytes for peak in predict_peaks(found, is_whole=True)] if isinstance(found, StagedPlan) else rank_peaks(found)
        assert max(peaks) <= usable_memory_bytes(V100)
