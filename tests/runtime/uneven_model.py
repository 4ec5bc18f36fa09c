"""A small transformer of sizes that few numbers of ranks divide, on ranks beside the same on one device."""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.mesh import Mesh, Shares
from tests.runtime.training import LEAST, issued, num_uneven, plan_called, planned, traced, train, under, worst
from tests.workers import device_mesh
from tests.zoo import Case


class Block(nn.Module):
    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.heads, width = heads, heads * size
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in "qkv")
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class OddTransformer(nn.Module):
    """Returns the mean loss of the next tokens."""

    def __init__(self, vocab: int, heads: int, size: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, heads * size)
        self.blocks = nn.ModuleList(Block(heads, size) for _ in range(layers))
        self.head = nn.Linear(heads * size, vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + x.square().mean()


def odd_case(vocab: int = 51, heads: int = 5, batch: int = 7) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OddTransformer(vocab, heads).double()
        ids, labels = torch.randint(0, vocab, (2, batch, 6))
    labels[0, 1] = -100
    return Case(model, (ids, labels), {}, lambda loss: loss)


def train_odd(
    shape: tuple[int, ...], kinds: tuple[str, ...], sizes: dict[str, int], shares: Shares = ()
) -> list[dict[str, Any]]:
    """On every rank: train under plans of each kind, and report how far that is from one device."""
    truth, reports = train(odd_case(**sizes), 2), []
    graph, mesh = traced(odd_case(**sizes)), Mesh(shape, ("dp", "tp")[: len(shape)], shares)
    for kind in kinds:
        plan = plan_called(kind, graph, mesh)
        case = under(plan, odd_case(**sizes), device_mesh(shape, mesh.axis_names))
        found = train(case, 2)
        reports.append(
            {"kind": kind, "uneven": num_uneven(plan), "predicted": Counter(planned(plan))}
            | {"issued": issued(case, device_mesh(shape, mesh.axis_names))}
            | {when: worst(found[when], truth[when], least) for when, least in LEAST.items()}
        )
    return reports
