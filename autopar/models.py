"""Built-in models to plan by name. Each is built on the meta device, so that size costs nothing, with an example training batch.

| name | from | parameters | batch |
|---|---|---|---|
| gpt2 | transformers GPT2Config() | 124 M | 64 x 1024 tokens |
| gpt2-xl | transformers, 48 layers, 1600 wide, 25 heads | 1.6 B | 64 x 1024 tokens |
| llama3-8b | transformers LlamaConfig as published by Meta, no tied head | 8.0 B | 64 x 4096 tokens, bf16 |
| bert-large | transformers, 24 layers, 1024 wide, masked language model | 335 M | 256 x 512 tokens |
| vit-l | transformers, patch 16, 24 layers, 1024 wide, 1000 classes | 304 M | 512 images, 224 x 224 |
| vgg13 | autopar.vision | 133 M | 512 images, 224 x 224 |
| resnet50 | autopar.vision | 26 M | 512 images, 224 x 224 |

The batch is the global one, such that a plan fits the devices these models were trained on: llama3-8b on 64 H100 (a sequence a device),
gpt2-xl and bert-large on 64, vit-l on 16, the others on 8 devices of any GPU preset. float32 unless said otherwise; dropout as in the
published configurations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.vision import Classifier, resnet50, vgg13


@dataclass(frozen=True)
class Example:
    """A model and one global training batch; the model returns its loss first."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def build_model(name: str) -> Example:
    """The built-in model called `name`; AutoparError if there is none."""
    if name not in MODELS:
        known = ", ".join(MODELS)
        raise AutoparError(f"no built-in model {name!r}; there are {known}, or write path.py:function returning (model, args, kwargs)")
    with torch.device("meta"):
        return MODELS[name]()


def _tokens(batch: int, length: int, **kwargs: Any) -> dict[str, Any]:
    """Inputs and labels are two tensors: tracing takes one tensor given twice for one argument."""
    return {"input_ids": torch.zeros(batch, length, dtype=torch.long), "labels": torch.zeros(batch, length, dtype=torch.long), **kwargs}


def _images(model: nn.Module) -> Example:
    return Example(Classifier(model), (torch.zeros(512, 3, 224, 224), torch.zeros(512, dtype=torch.long)), {})


def _gpt2(**sizes: int) -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes)).train()
    model.loss_type = "ForCausalLM"  # transformers does not know it for this class and would warn
    return Example(model, (), _tokens(64, 1024, use_cache=False))


def _llama3_8b() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        bos_token_id=128000,
        eos_token_id=128001,
        use_cache=False,
    )
    return Example(LlamaForCausalLM(config).to(torch.bfloat16).train(), (), _tokens(64, 4096, use_cache=False))


def _bert_large() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    mask = torch.ones(256, 512, dtype=torch.long)
    return Example(BertForMaskedLM(config).train(), (), _tokens(256, 512, attention_mask=mask))


def _vit_l() -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000)
    batch = {"pixel_values": torch.zeros(512, 3, 224, 224), "labels": torch.zeros(512, dtype=torch.long)}
    return Example(ViTForImageClassification(config).train(), (), batch)


MODELS: Mapping[str, Callable[[], Example]] = {
    "gpt2": _gpt2,
    "gpt2-xl": lambda: _gpt2(n_layer=48, n_embd=1600, n_head=25),
    "llama3-8b": _llama3_8b,
    "bert-large": _bert_large,
    "vit-l": _vit_l,
    "vgg13": lambda: _images(vgg13()),
    "resnet50": lambda: _images(resnet50()),
}
