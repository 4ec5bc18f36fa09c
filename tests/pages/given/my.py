"""The reader's own model, and a parallelize function as people write it for torch."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def model() -> tuple:
    return Net(), (torch.ones(256, 512),), {}


def parallelize(model: nn.Module, mesh) -> nn.Module:
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])
