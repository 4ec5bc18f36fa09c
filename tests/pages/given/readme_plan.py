"""What a block needs before it."""

import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
x = torch.randn(32, 64)
