"""Models trained in shares of the batch on ranks beside the same on one device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.costmodel.cluster.device_groups import joined
from autopar.costmodel.cluster.load_cluster import Cluster, LinkLevel, load_cluster
from tests.workers import device_mesh


class Net(nn.Module):
    """A convolution with batch statistics; gives the loss and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return nn.functional.cross_entropy(logits, labels), logits


def batch_of(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels, of which one in each batch is ignored."""
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (rows,), generator=made)
    labels[0] = -100
    return torch.randn(rows, 2, 5, 5, generator=made, dtype=torch.float64), labels


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def state_of(model: nn.Module) -> list[torch.Tensor]:
    """All parameters, gradients and buffers, whole."""
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    return [(x.full_tensor() if isinstance(x, DTensor) else x).clone() for x in map(torch.detach, tensors)]


def trained(model: nn.Module, batches: Sequence[tuple[torch.Tensor, ...]], weight: float = 0.3) -> list[torch.Tensor]:
    """Losses of a step on each batch, of the loss and of the logits, and the state then."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        loss, logits = model(*batch)
        (loss + weight * logits.square().mean()).backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *state_of(model)]


def differ(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    assert len(found) == len(expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected))


def in_shares(shape: tuple[int, ...], shares: tuple[int, ...], sizes: Sequence[int], batch: str) -> dict[str, Any]:
    """On every rank: train on batches of these sizes, in shares, and compare with one device."""
    names = ("dp", "tp")[: len(shape)]
    batches, mesh = [batch_of(rows, seed) for seed, rows in enumerate(sizes)], device_mesh(shape, names)
    index = mesh.get_local_rank("dp")
    first = sum(shares[:index]) if batch == "local" else 0
    last = first + shares[index] if batch == "local" else None
    given = [tuple(x[first:last] for x in each) for each in batches]
    model = autopar.compile(net(), mesh, args=given[0], shares=shares, cluster="free-links", batch=batch)
    program, found = model._autopar.current().program, trained(model, given)
    layouts = {item.fqn: str(layout[0]) for item, layout in program.inputs if item.kind == "argument"}
    rows = len(model(*given[0])[1])
    return {"difference": differ(found, trained(net(), batches)), "layouts": layouts, "rows": rows}


def two_groups(counts: tuple[int, int], slower: float) -> Cluster:
    """Two groups of devices, of which the second is slower, with links that cost nothing between them."""
    fast = load_cluster("cpu")
    slow = replace(fast, name="slow", flops_per_s={"float32": fast.flops_per_s["float32"] / slower})
    slow = replace(slow, memory_bandwidth_bytes_per_s=fast.memory_bandwidth_bytes_per_s / slower)
    return joined([(counts[0], fast), (counts[1], slow)], LinkLevel(0, 1e-9, 1e12))


def on_groups(counts: tuple[int, int], slower: float, rows: int) -> dict[str, Any]:
    """On every rank: train on devices of two groups, of which the second is slower, and compare with one device."""
    cluster = two_groups(counts, slower)
    batches, mesh = [batch_of(rows, seed) for seed in range(2)], device_mesh((sum(counts),), ("dp",))
    model = autopar.compile(net(), mesh, args=batches[0], cluster=cluster)
    found = trained(model, batches)
    shares = model.plan.mesh.shares
    return {"difference": differ(found, trained(net(), batches)), "shares": tuple(tuple(one) for _, one in shares)}
