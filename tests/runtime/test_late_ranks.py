"""A rank that comes late to `autopar.compile` is named by those that wait for it."""

import time

import pytest
import torch.distributed as dist

import autopar
from autopar.runtime import rank_agreement
from tests.workers import Ranks, device_mesh
from tests.zoo import build

pytestmark = pytest.mark.multirank


def late_to_compile() -> None:
    case, mesh = build("mlp"), device_mesh((2, 2), ("dp", "tp"))  # for which torch waits as well
    with pytest.MonkeyPatch.context() as patch:  # these ranks run other tests afterwards
        patch.setattr(rank_agreement, "LONG_S", 0.2)
        if dist.get_rank() == 2:
            time.sleep(1.0)
            autopar.compile(case.model, mesh, args=case.args, cluster="free-links")
        else:
            with pytest.warns(UserWarning, match=f"rank {dist.get_rank()} waits for rank 2 to call autopar.compile"):
                autopar.compile(case.model, mesh, args=case.args, cluster="free-links")


def test_a_rank_that_is_late_is_named(ranks4: Ranks) -> None:
    ranks4.run(late_to_compile)
