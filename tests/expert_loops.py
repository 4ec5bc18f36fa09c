"""Mixtures of experts written as loops over experts, in the ways in which people write them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo import BATCH, HIDDEN, SEQUENCE, VOCABULARY, Case

EXPERTS, CHOSEN, INNER = 4, 2, 16
Loop = Callable[["Experts", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Expert(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=bias) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Router in float32, a shared expert, and a loop over the others."""

    def __init__(self, loop: Loop, chosen: int, bias: bool) -> None:
        super().__init__()
        self.loop, self.chosen = loop, chosen
        self.router, self.shared = nn.Linear(HIDDEN, EXPERTS, bias=False), Expert(bias)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(EXPERTS))
        self.w_in = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 0.2)
        self.w_out = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, HIDDEN)
        scores = F.softmax(self.router(flat), dim=-1, dtype=torch.float)
        weights, ids = torch.topk(scores, self.chosen, dim=-1)
        if self.chosen > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.loop(self, flat, weights.to(x.dtype), ids).view(x.shape) + self.shared(x)


def one_hot_masks(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """transformers' Mixtral until 4.53."""
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        place, token = torch.where(mask[number])
        if token.shape[0] == 0:
            continue
        rows = x[None, token].reshape(-1, HIDDEN)
        out.index_add_(0, token, (self.experts[number](rows) * weights[token, place, None]).to(x.dtype))
    return out


def hit_experts(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """transformers' Mixtral and Qwen3-MoE until 4.57."""
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        place, token = torch.where(mask[number].squeeze(0))
        rows = x[None, token].reshape(-1, HIDDEN)
        out.index_add_(0, token, self.experts[number](rows) * weights[token, place, None])
    return out


def stacked_weights(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """transformers 5, with `experts_implementation="eager"`."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(ids, num_classes=EXPERTS + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for number in hit:
        number = number[0]
        if number == EXPERTS:
            continue
        place, token = torch.where(mask[number])
        gate, up = F.linear(x[token], self.w_in[number]).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, self.w_out[number]) * weights[token, place, None]
        out.index_add_(0, token, rows.to(out.dtype))
    return out


def counted_rows(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """transformers' DeepSeek-V3 and GLM-4 MoE until 4.57."""
    out = torch.zeros_like(x, dtype=weights.dtype)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 0, 1)
    for number, expert in enumerate(self.experts):
        token, place = torch.where(mask[number])
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weights[token, place].unsqueeze(-1))
    return out.type(x.dtype)


def boolean_indexing(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """DeepSeek's own code for V2, in training."""
    repeated, flat = x.repeat_interleave(self.chosen, dim=0), ids.view(-1)
    out = torch.empty_like(repeated)
    for number, expert in enumerate(self.experts):
        out[flat == number] = expert(repeated[flat == number])
    return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def added_in_place(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mistral's own code."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        token, place = torch.where(ids == number)
        out[token] += weights[token, place, None] * expert(x[token])
    return out


def top_1(self: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Switch Transformer, as in tutorials."""
    out, best = torch.zeros_like(x), ids[:, 0]
    for number, expert in enumerate(self.experts):
        mine = best == number
        if mine.any():
            out[mine] = expert(x[mine]) * weights[:, 0][mine].unsqueeze(-1)
    return out


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (one_hot_masks, hit_experts, stacked_weights, counted_rows, boolean_indexing, added_in_place, top_1)
}


class Layers(nn.Module):
    """Tokens through `num_layers` mixtures of experts, with the loss."""

    def __init__(self, loop: Loop, num_layers: int, *, chosen: int = CHOSEN, bias: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(num_layers))
        self.layers = nn.ModuleList(Experts(loop, chosen, bias) for _ in range(num_layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def case_of(name: str, num_layers: int) -> Case:
    """The case of a loop, with the parameters that it reads."""
    torch.manual_seed(0)
    has_bias, chosen = name in ("top_1", "counted_rows"), 1 if name == "top_1" else CHOSEN
    model = Layers(LOOPS[name], num_layers, chosen=chosen, bias=has_bias)
    for layer in model.layers:
        for unused in ("experts",) if name == "stacked_weights" else ("w_in", "w_out"):
            delattr(layer, unused)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    labels = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    return Case(model, (), {"input_ids": tokens, "labels": labels}, lambda output: output)
