"""What shards a model by hand refuses one that autopar.compile returned, which refuses what torch wraps."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import autopar
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank


def _refused() -> None:
    mesh = device_mesh((2, 2), ("dp", "tp"))
    x = torch.ones(4, 4)
    by_hand: dict[str, Callable[[nn.Module], object]] = {
        "fully_shard": lambda model: fully_shard(model, mesh=mesh["dp"]),
        "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        "replicate": lambda model: replicate(model)(x),
        "parallelize_module": lambda model: parallelize_module(model, mesh["tp"], ColwiseParallel()),
    }
    for name, shards in by_hand.items():
        for args in (None, (x,)):  # not planned yet, and planned
            model = autopar.compile(nn.Sequential(nn.Linear(4, 4)), mesh, cluster="cpu", args=args)
            with pytest.raises(autopar.AutoparError, match=f"{name} was given .* sharded already"):
                shards(model[0])
        shards(nn.Linear(4, 4)) if name != "FullyShardedDataParallel" else None  # which wants a GPU
    wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
    with pytest.raises(autopar.AutoparError, match="the part '0' of the model is wrapped"):
        autopar.compile(wrapped, mesh, args=(x,))


def test_what_is_sharded_or_wrapped_twice_is_refused_with_what_to_leave_out(ranks4: Ranks) -> None:
    ranks4.run(_refused)
