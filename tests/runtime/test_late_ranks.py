"""A rank that comes late to `autopar.compile` is named by those that wait for it."""

import time

import pytest
import torch.distributed as dist

import autopar
from autopar.runtime import rank_agreement
from autopar.torch_compat import default_store
from tests.workers import Ranks, device_mesh
from tests.zoo import build

pytestmark = pytest.mark.multirank
LATE = 2


def compiled() -> None:
    case = build("mlp")
    autopar.compile(case.model, device_mesh((2, 2), ("dp", "tp")), args=case.args, cluster="free-links")


def late_to_compile() -> None:
    compiled()
    store, own = default_store(), "autopar/compile/{}".format
    num_calls = store.add(own(dist.get_rank()), 0)
    with pytest.MonkeyPatch.context() as patch:  # these ranks run other tests afterwards
        patch.setattr(rank_agreement, "LONG_S", 0.2)
        if dist.get_rank() != LATE:
            # on a busy machine others may be late too
            named = rf"rank {dist.get_rank()} waits for ranks? ([0-9], )*{LATE}\b.* to call autopar"
            with pytest.warns(UserWarning, match=named):
                compiled()
            return
        while any(store.add(own(rank), 0) == num_calls for rank in range(4) if rank != LATE):
            time.sleep(0.05)
        time.sleep(1.0)
        compiled()


def test_a_rank_that_is_late_is_named(ranks4: Ranks) -> None:
    ranks4.run(late_to_compile)
