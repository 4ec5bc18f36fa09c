"""The mixture of experts that Alpa measured: layers of BERT, every other one with GShard's experts."""

import torch
import torch.nn.functional as F
from torch import nn


def top2(gates: torch.Tensor, capacity: int) -> torch.Tensor:
    """Weights of each token at each place of each expert, `[groups, tokens, experts, capacity]`, of `gates`
    `[groups, tokens, experts]`: a token goes to its two best experts as long as they have places, by turns of the
    tokens, all first choices before the second (GShard, arXiv:2006.16668, algorithm 1, without its random dispatch).
    """
    num_experts = gates.shape[-1]
    first = F.one_hot(gates.argmax(-1), num_experts)
    second = F.one_hot((gates * (1 - first)).argmax(-1), num_experts)
    places = first.cumsum(1) - first, second.cumsum(1) - second + first.sum(1, keepdim=True)
    kept = tuple(chosen * (place < capacity) for chosen, place in zip((first, second), places))
    weights = [(gates * chosen).sum(-1) for chosen in kept]
    total = weights[0] + weights[1]
    total = torch.where(total > 0, total, torch.ones_like(total))
    parts = [
        torch.einsum(
            "gse,gsc->gsec",
            (weight / total).unsqueeze(-1) * chosen,
            F.one_hot((place * chosen).sum(-1), capacity).to(gates.dtype),
        )
        for weight, chosen, place in zip(weights, kept, places)
    ]
    return parts[0] + parts[1]


class Experts(nn.Module):
    """Experts that are dispatched to by products with masks, each with as many places in a group of tokens."""

    def __init__(self, hidden: int, inner: int, num_experts: int, group: int) -> None:
        super().__init__()
        self.group, self.capacity = group, 2 * group // num_experts
        self.gate = nn.Parameter(torch.empty(hidden, num_experts))
        self.up = nn.Parameter(torch.empty(num_experts, hidden, inner))
        self.down = nn.Parameter(torch.empty(num_experts, inner, hidden))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.reshape(-1, self.group, x.shape[-1])
        gates = torch.einsum("gsm,me->gse", groups, self.gate).softmax(-1)
        combined = top2(gates, self.capacity)
        sent = torch.einsum("gsec,gsm->egcm", combined.bool().to(x.dtype), groups)
        inner = torch.einsum("egcm,emh->egch", sent, self.up).relu()
        made = torch.einsum("egch,ehm->gecm", inner, self.down)
        return torch.einsum("gsec,gecm->gsm", combined, made).reshape(x.shape)


class Layer(nn.Module):
    """A layer of BERT, without dropout."""

    def __init__(self, hidden: int, heads: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.feed_forward = feed_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        x = self.norm1(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.feed_forward(x))


class MixtureLM(nn.Module):
    """The language model; returns the mean cross-entropy, in float32. Its head is its embedding."""

    def __init__(
        self, hidden: int, layers: int, heads: int, num_experts: int, *, sequence: int, vocabulary: int, group: int
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.norm, inner = nn.LayerNorm(hidden), 8 * hidden
        self.layers = nn.ModuleList(
            Layer(
                hidden,
                heads,
                nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))
                if number % 2
                else Experts(hidden, inner, num_experts, group),
            )
            for number in range(layers)
        )
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(x, self.tokens.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
