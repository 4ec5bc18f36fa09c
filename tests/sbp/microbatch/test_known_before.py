"""What follows from arguments alone is computed of the whole batch before its microbatches run."""

import pytest
import torch
from torch import nn

from tests.sbp.microbatch.test_microbatch_graph import WithLoss, check

W_OF_8 = torch.tensor([0.1, 0.2, 0.9, 0.7, 0.3, 0.1, 0.8, 0.2], dtype=torch.float64)
WEIGHTED = {
    "a masked mean": lambda y, w: (y.square().mean(-1) * w).sum() / w.sum(),
    "at least one": lambda y, w: (y.square() * w[:, None]).sum() / (w > 0.5).sum().clamp(min=1),
    "weights that sum to one": lambda y, w: (y.mean(-1) * (w / w.sum())).sum() + y.square().mean(),
    "what a mask picks": lambda y, w: y[w > 0.5].square().mean(),
    "sorted": lambda y, w: (y[:, 0] * w.sort(0).values + y[:, 1] * w.sort(0, descending=True).indices).sum(),
    "running maxima": lambda y, w: (y[:, 0] * torch.cummax(w, 0).values).mean(),
    "the largest and its place": lambda y, w: sum(y.square().sum() * x for x in w.max(0)),
    "two means": lambda y, w: (y[:, 0] * w).sum() / w.sum() + (y[:, 1].tanh() * (1 - w)).sum() / (1 - w).sum(),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_numbers_of_the_whole_batch_that_are_known_before(name):
    torch.manual_seed(0)
    micro = check(WithLoss(nn.Linear(4, 4), WEIGHTED[name]).double(), (torch.randn(8, 4).double(), W_OF_8), {})
    assert micro.counts
