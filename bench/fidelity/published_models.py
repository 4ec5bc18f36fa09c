"""The models of published measurements, on the meta device, each with its global batch."""

import torch
import torch.nn.functional as F
from torch import nn

from autopar.models.catalogue import MODELS, Example

V100_SEQUENCE, V100_VOCABULARY = 2048, 51200


class _Block(nn.Module):
    """Pre-norm block with attention written out."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shape, y = (*x.shape[:2], self.heads, x.shape[2] // self.heads), self.norm1(x)
        q, k, v = (layer(y).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * shape[-1] ** -0.5
        y = _dropped(torch.softmax(scores.masked_fill(mask, -1e4), -1), self.dropout) @ v
        x = x + _dropped(self.out(y.transpose(1, 2).reshape(x.shape)), self.dropout)
        return x + _dropped(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


def _dropped(x: torch.Tensor, share: float) -> torch.Tensor:
    return F.dropout(x, share) if share else x


class _WrittenOut(nn.Module):
    """GPT as OneFlow's LanguageModeling/GPT and Megatron-LM have it: q, k and v split by heads, attention written out,
    tied head, loss in `loss_dtype`.
    """

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
        self.blocks, self.norm = (
            nn.ModuleList(_Block(hidden, heads, dropout) for _ in range(layers)),
            nn.LayerNorm(hidden),
        )
        self.register_buffer("mask", torch.ones(sequence, sequence, dtype=torch.bool).triu(1))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x, self.mask)
        logits = F.linear(self.norm(x), self.tokens.weight).to(self.loss_dtype)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def v100_gpt(batch: int, hidden: int, layers: int, heads: int, *, loss_dtype: torch.dtype = torch.float32) -> Example:
    """GPT of DLPerf in float16."""
    with torch.device("meta"):
        ids = torch.zeros(batch, V100_SEQUENCE, dtype=torch.long)
        model = _WrittenOut((hidden, layers, heads), V100_SEQUENCE, V100_VOCABULARY, loss_dtype=loss_dtype)
        return Example(model.half(), (ids, torch.zeros_like(ids)), {})


# Of GPT-2 XL: hidden, heads, sequence.
_XL = 1600, 25, 1024


def a800_megatron_gpt2(batch: int, vocabulary: int, *, layers: int) -> Example:
    """GPT-2 XL of Megatron-LM in float32, with its dropout."""
    hidden, heads, sequence = _XL
    with torch.device("meta"):
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        model = _WrittenOut((hidden, layers, heads), sequence, vocabulary, dropout=0.1)
        return Example(model.train(), (ids, torch.zeros_like(ids)), {})


def a800_gpt2(batch: int, *, layers: int) -> Example:
    """GPT-2 XL of transformers in float32, attention written out."""
    from transformers import GPT2Config, GPT2LMHeadModel

    hidden, heads, sequence = _XL
    config = GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, use_cache=False, attn_implementation="eager")
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
        model.loss_type = "ForCausalLM"  # transformers does not know it for this class and would warn
        tokens = {name: torch.zeros(batch, sequence, dtype=torch.long) for name in ("input_ids", "labels")}
    return Example(model, (), {**tokens, "use_cache": False})


def a800_t5(batch: int, *, layers: int) -> Example:
    """T5 of 1.24 B parameters in float32, sequence 512.

    The source gives the number of parameters and sequence x hidden x layers = 2^24: 32 layers of 1024 on either side,
    with 6144 between the linear layers.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024,
        d_kv=64,
        d_ff=6144,
        num_layers=layers,
        num_heads=16,
        decoder_start_token_id=0,
        use_cache=False,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config).train()
        tokens = {name: torch.zeros(batch, 512, dtype=torch.long) for name in ("input_ids", "labels")}
    return Example(model, (), {**tokens, "use_cache": False})


def llama3(name: str, batch: int, sequence: int, *, layers: int) -> Example:
    """Llama 3 ("llama3-8b") in bfloat16."""
    with torch.device("meta"):
        return MODELS[name](layers=layers, batch=batch, sequence=sequence)
