"""Built-in models to plan by name, each on the meta device, so that size costs nothing, with an example training batch.

Language models and vit-l come from transformers.

| name | from | parameters | batch |
|---|---|---|---|
| gpt2 | transformers GPT2Config() | 124 M | 64 x 1024 tokens |
| gpt2-xl | transformers, 48 layers, 1600 wide, 25 heads | 1.6 B | 64 x 1024 tokens |
| gpt-2.6b | GPT-2, 32 layers, 2560 wide, 32 heads, 51200 tokens: one of Alpa's | 2.65 B | 32 x 1024 tokens, fp16 |
| gpt-39b | GPT-2, 48 layers, 8192 wide, 64 heads, 51200 tokens: Alpa's largest | 39.1 B | 8 x 1024 tokens, fp16 |
| llama3-8b | LlamaConfig as published by Meta (arXiv:2407.21783), no tied head | 8.0 B | 64 x 4096 tokens, bf16 |
| llama3-70b | the same | 70.6 B | 32 x 8192 tokens, bf16 |
| llama3-405b | the same | 405.9 B | 256 x 8192 tokens, bf16 |
| bert-large | transformers, 24 layers, 1024 wide, masked language model | 335 M | 256 x 512 tokens |
| t5-large | transformers, encoder and decoder of 24 layers, 1024 wide | 738 M | 64 x 512 tokens in and out |
| vit-l | transformers, patch 16, 24 layers, 1024 wide, 1000 classes | 304 M | 512 images, 224 x 224 |
| vgg13 | autopar.models.vision | 133 M | 512 images, 224 x 224 |
| resnet50 | autopar.models.vision | 26 M | 512 images, 224 x 224 |
| resnet50-100k | the same with 100,000 classes, as in Whale (arXiv:2011.09208) | 228 M | 512 images, 224 x 224 |

The batch is the global one, such that a plan fits the devices these models were trained on: llama3-8b on 64 H100 (a
sequence a device), llama3-70b on 256, llama3-405b on 16,384, gpt-39b on 64 V100, gpt2-xl, bert-large and t5-large on 64
devices, vit-l on 16, the others on 8 of any GPU preset. float32 unless said otherwise; Alpa's are in float16, as V100s
train them (they have no units for bfloat16), and without dropout; the others have it as in the published
configurations. Alpa: arXiv:2201.12023.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.models.vision import Classifier, resnet50, vgg13


@dataclass(frozen=True)
class Example:
    """A model and one global training batch, its arguments; the model returns its loss first."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def build_model(
    name: str, *, layers: int | None = None, batch: int | None = None, sequence: int | None = None
) -> Example:
    """The built-in model called `name`, with its default sizes where none is given.

    `layers`: number of blocks, in the encoder and in the decoder each if it has both; `batch`: global number of
    samples; `sequence`: tokens of a sample. AutoparError if there is no such model or it has no such size.
    """
    if name not in MODELS:
        known = ", ".join(MODELS)
        raise AutoparError(
            f"no built-in model {name!r}; there are {known}, or write path.py:function returning (model, args, kwargs)"
        )
    sizes = {
        key: size for key, size in (("layers", layers), ("batch", batch), ("sequence", sequence)) if size is not None
    }
    for key, size in sizes.items():
        if key not in MODELS[name].keywords or size < 1:
            raise AutoparError(f"{key}={size} for {name}: expected a positive size, of {', '.join(_sizes_of(name))}")
    with torch.device("meta"):
        return MODELS[name](**sizes)


def _sizes_of(name: str) -> list[str]:
    return [key for key in ("layers", "batch", "sequence") if key in MODELS[name].keywords]


def _tokens(batch: int, sequence: int, **kwargs: Any) -> dict[str, Any]:
    """Input tokens and labels, as two tensors: tracing would take one tensor given twice for one argument."""
    return {
        "input_ids": torch.zeros(batch, sequence, dtype=torch.long),
        "labels": torch.zeros(batch, sequence, dtype=torch.long),
        **kwargs,
    }


def unmasked_attention() -> str:
    """The name of an attention registered with transformers that gets `is_causal` instead of a mask.

    A model called without padding runs so. While it is exported, however, transformers writes [batch, 1, sequence,
    sequence] masks, except for kinds of attention that it has no mask function for.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("unmasked_sdpa", sdpa_attention_forward)
    return "unmasked_sdpa"


def _gpt2(*, layers: int, batch: int, sequence: int, dtype: torch.dtype = torch.float32, **sizes: Any) -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    positions = max(sequence, 1024)
    config = GPT2Config(
        n_layer=layers, n_positions=positions, use_cache=False, attn_implementation=unmasked_attention(), **sizes
    )
    model = GPT2LMHeadModel(config).to(dtype).train()
    model.loss_type = "ForCausalLM"  # transformers does not know it for this class and would warn
    return Example(model, (), _tokens(batch, sequence, use_cache=False))


def _llama3(*, layers: int, batch: int, sequence: int, **sizes: int) -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        num_hidden_layers=layers,
        num_key_value_heads=8,
        max_position_embeddings=max(sequence, 8192),
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        bos_token_id=128000,
        eos_token_id=128001,
        use_cache=False,
        attn_implementation=unmasked_attention(),
        **sizes,
    )
    return Example(LlamaForCausalLM(config).to(torch.bfloat16).train(), (), _tokens(batch, sequence, use_cache=False))


def _bert_large(*, layers: int, batch: int, sequence: int) -> Example:
    from transformers import BertConfig, BertForMaskedLM

    positions = max(sequence, 512)
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=positions,
    )
    mask = torch.ones(batch, sequence, dtype=torch.long)
    return Example(BertForMaskedLM(config).train(), (), _tokens(batch, sequence, attention_mask=mask))


def _t5_large(*, layers: int, batch: int, sequence: int) -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=layers,
        num_heads=16,
        decoder_start_token_id=0,
        use_cache=False,
        attn_implementation=unmasked_attention(),
    )
    return Example(T5ForConditionalGeneration(config).train(), (), _tokens(batch, sequence, use_cache=False))


def _vit_l(*, layers: int, batch: int) -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    images = {"pixel_values": torch.zeros(batch, 3, 224, 224), "labels": torch.zeros(batch, dtype=torch.long)}
    return Example(ViTForImageClassification(config).train(), (), images)


def _vgg13(*, batch: int) -> Example:
    return _classifier(vgg13(), batch)


def _resnet50(*, batch: int, num_classes: int) -> Example:
    return _classifier(resnet50(num_classes), batch)


def _classifier(network: nn.Module, batch: int) -> Example:
    return Example(Classifier(network), (torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)), {})


_ALPA: Mapping[str, Any] = {
    "dtype": torch.float16,
    "vocab_size": 51200,
    "activation_function": "gelu_pytorch_tanh",
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

# The default sizes of each model; only sizes that are named here can be set.
MODELS: Mapping[str, partial[Example]] = {
    "gpt2": partial(_gpt2, layers=12, batch=64, sequence=1024),
    "gpt2-xl": partial(_gpt2, layers=48, batch=64, sequence=1024, n_embd=1600, n_head=25),
    "gpt-2.6b": partial(_gpt2, layers=32, batch=32, sequence=1024, n_embd=2560, n_head=32, **_ALPA),
    "gpt-39b": partial(_gpt2, layers=48, batch=8, sequence=1024, n_embd=8192, n_head=64, **_ALPA),
    "llama3-8b": partial(
        _llama3, layers=32, batch=64, sequence=4096, hidden_size=4096, intermediate_size=14336, num_attention_heads=32
    ),
    "llama3-70b": partial(
        _llama3, layers=80, batch=32, sequence=8192, hidden_size=8192, intermediate_size=28672, num_attention_heads=64
    ),
    "llama3-405b": partial(
        _llama3,
        layers=126,
        batch=256,
        sequence=8192,
        hidden_size=16384,
        intermediate_size=53248,
        num_attention_heads=128,
    ),
    "bert-large": partial(_bert_large, layers=24, batch=256, sequence=512),
    "t5-large": partial(_t5_large, layers=24, batch=64, sequence=512),
    "vit-l": partial(_vit_l, layers=24, batch=512),
    "vgg13": partial(_vgg13, batch=512),
    "resnet50": partial(_resnet50, batch=512, num_classes=1000),
    "resnet50-100k": partial(_resnet50, batch=512, num_classes=100_000),
}
