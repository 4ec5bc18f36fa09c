"""A process that plans again and again, as a service or a notebook does, does not grow."""

import subprocess
import sys

MODEL = """
import gc
import torch
from torch import nn
import autopar

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(x, y)

def resident_bytes():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

example = (torch.zeros(16, 64), torch.zeros(16, 64))
for number in range(50):
    autopar.plan(Net(), "2x2", args=example, cluster="cpu")
    if number == 9:
        before = resident_bytes()
print(resident_bytes() - before)
"""


def test_planning_the_same_model_again_takes_no_more_memory():
    done = subprocess.run([sys.executable, "-c", MODEL], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * 2**20  # measured: 1 MiB in 40 plans
