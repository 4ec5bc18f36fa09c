"""Arguments of which not all are rows of the batch, or whose rows are mixed first, in stages on real ranks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.pipeline.parameter_elsewhere import ParameterElsewhere
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank
Tensor = torch.Tensor


class Shared(nn.Module):
    """Points that all samples share, rows that an argument orders, and a recurrent net on two halves of its rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_points, self.of_rows = nn.Linear(2, 6), nn.Linear(5, 6)
        self.rnn, self.head = nn.GRU(6, 6), nn.Linear(6, 10)

    def forward(self, points: Tensor, rows: Tensor, target: Tensor, order: Tensor) -> Tensor:
        mixed = 0.3 * rows + 0.7 * rows[order]
        both = self.rnn(torch.stack([self.of_rows(torch.cat([rows, mixed])).tanh()] * 2))[0][-1]
        one, other = self.head(both).chunk(2)
        values = torch.einsum("bk,pk->bp", self.of_rows(mixed).tanh(), self.of_points(points))
        return (values + one * other.sigmoid() - target).square().mean() + F.l1_loss(one, target.flip(0))


def in_stages() -> float:
    """The largest difference of the loss or of this rank's gradients, after a step."""
    model = Shared().double()
    batch = (torch.randn(10, 2).double(), torch.randn(8, 5).double(), torch.randn(8, 10).double(), torch.randperm(8))
    single = copy.deepcopy(model)
    mesh = device_mesh((2, 2), ("pp", "dp"))
    parallel = autopar.compile(model, mesh, args=batch, cluster="free-links", time_limit_s=3, num_microbatches=2)
    loss, truth = parallel.train_step(*batch), single(*batch)
    truth.backward()
    own = {name: p.grad for name, p in parallel.named_parameters() if not isinstance(p, ParameterElsewhere)}
    found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in own.items() if x is not None}
    apart = [(x - single.get_parameter(name).grad).abs().max() for name, x in found.items()]
    return float(torch.stack([*apart, (loss - truth).abs()]).max())


def test_a_step_is_that_of_one_device(ranks4: Ranks) -> None:
    assert max(ranks4.run(in_stages)) < 1e-12
