"""Changes that torch does not count."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.checks.count_settings import settings_counted


def test_settings_are_counted_of_dtensors_alone() -> None:
    count = settings_counted()
    before = count[0]
    x = nn.Parameter(torch.ones(2))
    x.requires_grad = False
    x.requires_grad_(True).data = torch.zeros(2)
    assert count[0] == before and isinstance(vars(DTensor)["requires_grad"], property)
