"""Transformers as OneFlow's LanguageModeling/GPT and Megatron-LM have them, with attention written out."""

import torch
import torch.nn.functional as F
from torch import nn


class _Attention(nn.Module):
    """Projections that are split by heads, with scores and their dropout as tensors of their own."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of `x` to `memory`, or to itself, where `mask` is False."""
        other = x if memory is None else memory
        q, k, v = self._by_heads(self.q(x)), self._by_heads(self.k(other)), self._by_heads(self.v(other))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        y = dropped(torch.softmax(scores.masked_fill(mask, -1e4), -1), self.dropout) @ v
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def _by_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.heads, x.shape[2] // self.heads).transpose(1, 2)


class Layer(nn.Module):
    """A pre-norm layer; of a decoder, with attention to the encoder's result."""

    def __init__(self, hidden: int, heads: int, inner: int, *, dropout: float, is_decoder: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = _Attention(hidden, heads, dropout)
        if is_decoder:
            self.norm3, self.cross = nn.LayerNorm(hidden), _Attention(hidden, heads, dropout)
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        memory: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = x + dropped(self.attention(self.norm1(x), mask), self.dropout)
        if memory is not None and memory_mask is not None:
            x = x + dropped(self.cross(self.norm3(x), memory_mask, memory), self.dropout)
        return x + dropped(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


def dropped(x: torch.Tensor, share: float) -> torch.Tensor:
    """`x` after dropout, itself where `share` is 0."""
    return F.dropout(x, share) if share else x


class WrittenGPT(nn.Module):
    """GPT with a tied head and its loss in `loss_dtype`; `sizes`: hidden, layers, heads."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        sequence: int,
        vocabulary: int,
        *,
        dropout: float = 0.0,
        loss_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.loss_dtype = loss_dtype
        hidden, layers, heads = sizes
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Parameter(torch.zeros(sequence, hidden))
        self.blocks = nn.ModuleList(Layer(hidden, heads, 4 * hidden, dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.register_buffer("mask", torch.ones(sequence, sequence, dtype=torch.bool).triu(1))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x, self.mask)
        logits = F.linear(self.norm(x), self.tokens.weight).to(self.loss_dtype)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class WrittenT5(nn.Module):
    """T5 of Megatron-LM: layers of BERT with learned positions; `sizes`: hidden, layers of either side, heads, inner.

    It takes masks of encoder, decoder and between them, [batch, 1, queries, keys].
    """

    def __init__(self, sizes: tuple[int, int, int, int], sequence: int, vocabulary: int, *, dropout: float) -> None:
        super().__init__()
        hidden, layers, heads, inner = sizes
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Parameter(torch.zeros(sequence, hidden))
        self.encoder, self.decoder = (
            nn.ModuleList(Layer(hidden, heads, inner, dropout=dropout, is_decoder=side) for _ in range(layers))
            for side in (False, True)
        )
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(
        self, ids: torch.Tensor, decoder_ids: torch.Tensor, labels: torch.Tensor, masks: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        encoder_mask, decoder_mask, between = masks
        memory = self._embedded(ids)
        for layer in self.encoder:
            memory = layer(memory, encoder_mask)
        memory, x = self.encoder_norm(memory), self._embedded(decoder_ids)
        for layer in self.decoder:
            x = layer(x, decoder_mask, memory, between)
        logits = F.linear(self.decoder_norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.positions[: ids.shape[1]]
