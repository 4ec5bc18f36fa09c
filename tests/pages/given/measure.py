"""What a block needs before it."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
x = torch.randn(32, 64)
model = autopar.compile(Net(), mesh, args=(x,), cluster="cpu")
optimizer = torch.optim.AdamW(model.parameters())
