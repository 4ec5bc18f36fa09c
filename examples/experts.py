"""A small GPT with experts: expert prototyping as in M6-T (Yang et al., arXiv:2105.15082), and top-k beside it.

`num_prototypes` groups of experts, in each of which a token is sent to the best one; with one group it is the Switch
Transformer. `Chosen` sends each token to the best k of all experts: the same work and the same bytes.

    autopar explain examples/experts.py:prototypes_2 --mesh 4 --cluster h100 --hand ep=4
    autopar explain examples/experts.py:top_2 --mesh 8 --cluster h100
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, HIDDEN, INNER, HEADS, EXPERTS = 256, 64, 128, 4, 8
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Chosen(nn.Module):
    """The `k` best of `num_experts`, weighted by the router's probabilities, which are computed in float32."""

    def __init__(self, num_experts: int, k: int = 1) -> None:
        super().__init__()
        self.k, self.router = k, nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = F.softmax(self.router(x), dim=-1, dtype=torch.float32).topk(self.k, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(ids == number)
            rows = expert(x[token]) * weights[token, place, None].to(x.dtype)
            out.index_add_(0, token, rows)
        return out


class Prototypes(nn.Module):
    """`num_prototypes` groups of experts, each with a router of its own; their outputs are added."""

    def __init__(self, num_prototypes: int) -> None:
        super().__init__()
        self.groups = nn.ModuleList(Chosen(EXPERTS // num_prototypes) for _ in range(num_prototypes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.groups[0](x)
        for group in self.groups[1:]:
            out = out + group(x)
        return out


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.experts = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN), experts
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, HIDDEN // HEADS)
        q, k, v = (each.view(shape).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(y)
        return x + self.experts(self.norm2(x).reshape(-1, HIDDEN)).view(x.shape)


class GPT(nn.Module):
    """Returns the loss."""

    def __init__(self, experts: list[nn.Module], sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(sequence, HIDDEN)
        self.blocks = nn.ModuleList(Block(each) for each in experts)
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def example(kind: str, k: int, *, layers: int = 4, batch: int = 8, sequence: int = 32) -> Example:
    """(model, args, kwargs) with "prototypes" or the "top" k of all experts."""
    torch.manual_seed(0)
    experts = [Prototypes(k) if kind == "prototypes" else Chosen(EXPERTS, k) for _ in range(layers)]
    ids, labels = (torch.randint(VOCABULARY, (batch, sequence)) for _ in range(2))
    return GPT(experts, sequence), (ids, labels), {}


def prototypes_1() -> Example:
    return example("prototypes", 1)


def prototypes_2() -> Example:
    return example("prototypes", 2)


def prototypes_4() -> Example:
    return example("prototypes", 4)


def top_1() -> Example:
    return example("top", 1)


def top_2() -> Example:
    return example("top", 2)


def top_4() -> Example:
    return example("top", 4)
