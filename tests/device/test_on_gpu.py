"""The cases of the emulated device on a real GPU, which four ranks share: `make test-gpu`."""

import pytest
import torch

from tests.device.cases import CASES
from tests.device.steps import PP_ONLY, outcome
from tests.device.test_nccl_rules import CASES_ON, case_id
from tests.journey.case import PP, Run
from tests.journey.runs import difference
from tests.workers import Ranks


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "setting", "options"), [pytest.param(*each, id=case_id(*each)) for each in CASES_ON])
def test_steps_on_a_gpu(gpu_ranks: Ranks, name: str, setting: str, options: dict) -> None:
    if setting in (PP, PP_ONLY) and torch.__version__ < "2.12":
        pytest.skip("a plan with a pipeline needs torch 2.12")
    torch.manual_seed(0)
    expected = CASES[name](Run())
    found = gpu_ranks.run(outcome, name, setting, options, "cuda")
    assert difference([each for each, _ in found], expected) == ""
