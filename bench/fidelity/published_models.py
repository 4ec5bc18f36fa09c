"""The models of published measurements, on the meta device, each with its global batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class A800Model:
    """A model of Rubick's cluster. `head`: its class in transformers. `sequence`: 0 for images. `vocabulary`: that
    Megatron pads, 0 if none. `depth`: what its configuration calls the number of layers. `first_position`: of the
    table of positions.
    """

    head: str
    layers: int
    batch: int
    sequence: int
    vocabulary: int
    config: Mapping[str, Any]
    inputs: tuple[str, ...] = ("input_ids", "labels")
    depth: str = "num_hidden_layers"
    first_position: int = 0


_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
_LLAMA = {"use_cache": False}
# Batches, lengths and numbers of parameters by the artifact (AlibabaPAI/reconfigurable-dl-scheduler, `BATCH_SIZE`,
# `SEQ_HID` and `PARAMETER_SIZE` in artifact/71_performance_model/model/validat*.py; of RoBERTa its batch by `local_bsz`
# in sched/models/roberta.py). Where the configurations of its schedulers (sched/models, benchmark/models) are of other
# sizes, as of BERT 1536 wide, those that make the number of parameters are taken.
A800_MODELS: Mapping[str, A800Model] = {
    "gpt2": A800Model(
        "GPT2LMHeadModel", 48, 16, 1024, 50257, {"n_embd": 1600, "n_head": 25, "use_cache": False}, depth="n_layer"
    ),
    # 1.24 B parameters and sequence x hidden x layers = 2^24: 32 layers of 1024 on either side, with 6144 between the
    # linear layers.
    "t5": A800Model(
        "T5ForConditionalGeneration",
        32,
        16,
        512,
        0,
        {"d_model": 1024, "d_kv": 64, "d_ff": 6144, "num_heads": 16, "decoder_start_token_id": 0, "use_cache": False},
        depth="num_layers",
    ),
    # BERT-Large (arXiv:1810.04805) with both its losses; 336,297,858 parameters are those of
    # Megatron's padded vocabulary, as its commands with DeepSpeed are Megatron's too.
    "bert": A800Model(
        "BertForPreTraining",
        24,
        32,
        512,
        30592,
        _LARGE,
        inputs=("input_ids", "labels", "attention_mask", "next_sentence_label"),
    ),
    # RoBERTa-large (arXiv:1907.11692, 355 M) by transformers' run_mlm.py, which groups texts to the 512 tokens that the
    # tokenizer allows.
    "roberta": A800Model(
        "RobertaForMaskedLM",
        24,
        64,
        512,
        50265,
        {**_LARGE, "type_vocab_size": 1, "pad_token_id": 1},
        inputs=("input_ids", "labels", "attention_mask"),
        first_position=2,
    ),
    # ViT-Base (arXiv:2010.11929), patch 16 of 224 x 224; 85,952,456 parameters are those with the 200 classes of
    # Tiny ImageNet, which its command names.
    "vit": A800Model("ViTForImageClassification", 12, 64, 0, 0, {"num_labels": 200}),
    # arXiv:2307.09288: 6,738,423,808 parameters.
    "llama7": A800Model(
        "LlamaForCausalLM",
        32,
        8,
        2048,
        32000,
        {**_LLAMA, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008},
    ),
    # arXiv:2302.13971: 32.5 B, where the artifact counts 33.17 B. Its sequence x hidden x layers is that of 13 B.
    "llama30": A800Model(
        "LlamaForCausalLM",
        60,
        4,
        2048,
        32000,
        {**_LLAMA, "hidden_size": 6656, "num_attention_heads": 52, "intermediate_size": 17920},
    ),
}


def a800_model(name: str, batch: int, sequence: int, vocabulary: int, *, layers: int) -> Example:
    """A model of transformers in float32, attention written out; `vocabulary` 0 as published."""
    import transformers

    sizes, head = A800_MODELS[name], getattr(transformers, A800_MODELS[name].head)
    config = {**sizes.config, sizes.depth: layers, "attn_implementation": "eager"}
    if sequence:
        config["max_position_embeddings"] = sequence + sizes.first_position
    if vocabulary or sizes.vocabulary:
        config["vocab_size"] = vocabulary or sizes.vocabulary
    with torch.device("meta"):
        model = head(head.config_class(**config)).train()
        shapes = {name: (batch,) if name == "next_sentence_label" else (batch, sequence) for name in sizes.inputs}
        inputs = {name: torch.zeros(shape, dtype=torch.long) for name, shape in shapes.items()}
        if not sequence:
            inputs = {"pixel_values": torch.zeros(batch, 3, 224, 224), "labels": torch.zeros(batch, dtype=torch.long)}
    if model.loss_type is None:
        model.loss_type = "ForCausalLM"  # transformers takes it where it knows none, and would warn
    return Example(model, (), inputs)


def a800_megatron_gpt2(batch: int, sequence: int, vocabulary: int, *, layers: int) -> Example:
    """GPT-2 XL of Megatron-LM in float32, with its dropout."""
    config = A800_MODELS["gpt2"].config
    with torch.device("meta"):
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        model = _WrittenOut((config["n_embd"], layers, config["n_head"]), sequence, vocabulary, dropout=0.1)
        return Example(model.train(), (ids, torch.zeros_like(ids)), {})


def llama3(name: str, batch: int, sequence: int, *, layers: int) -> Example:
    """Llama 3 ("llama3-8b") in bfloat16."""
    with torch.device("meta"):
        return MODELS[name](layers=layers, batch=batch, sequence=sequence)
