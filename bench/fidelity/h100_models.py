"""The language models of rows on H100, on the meta device in bfloat16, each with a global batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autopar.models.catalogue import MODELS, Example, unmasked_attention


@dataclass(frozen=True)
class H100Model:
    """`head`: its class in transformers; "" for one that is built in, called `name`. `period`: so many layers in turn
    are of different kinds. `fused`: what transformers calls attention in one kernel, "" for
    scaled_dot_product_attention.
    """

    layers: int
    head: str = ""
    name: str = ""
    config: Any = None
    period: int = 1
    fused: str = ""


_QWEN = {"vocab_size": 151936, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4}
_MLA: Mapping[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# By their config.json on the Hugging Face Hub. Attention with sinks is one kernel there as here: NeMo AutoModel runs
# gpt-oss by FlexAttention (nemo_automodel/components/models/gpt_oss), Megatron-Bridge by cuDNN's softmax with an offset
# (`softmax_type="learnable"`, src/megatron/bridge/models/gpt_oss).
H100_MODELS: Mapping[str, H100Model] = {
    **dict.fromkeys(("llama3-8b", "llama3.1-8b"), H100Model(32, name="llama3-8b")),
    **dict.fromkeys(("llama3-70b", "llama3.1-70b"), H100Model(80, name="llama3-70b")),
    **dict.fromkeys(("llama3-405b", "llama3.1-405b"), H100Model(126, name="llama3-405b")),
    "qwen3-30b-a3b": H100Model(
        48,
        "Qwen3MoeForCausalLM",
        config={**_QWEN, "hidden_size": 2048, "num_attention_heads": 32, "moe_intermediate_size": 768},
    ),
    "qwen3-235b-a22b": H100Model(
        94,
        "Qwen3MoeForCausalLM",
        config={**_QWEN, "hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536},
    ),
    "gpt-oss-20b": H100Model(
        24, "GptOssForCausalLM", config={"num_local_experts": 32}, period=2, fused="flex_attention"
    ),
    "gpt-oss-120b": H100Model(
        36, "GptOssForCausalLM", config={"num_local_experts": 128}, period=2, fused="flex_attention"
    ),
    "mixtral-8x7b": H100Model(32, "MixtralForCausalLM", config={}),
    "deepseek-v3": H100Model(61, "DeepseekV3ForCausalLM", config={}),
    "kimi-k2": H100Model(
        61,
        "DeepseekV3ForCausalLM",
        config={
            **_MLA,
            "vocab_size": 163840,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
        },
    ),
    "moonlight-16b-a3b": H100Model(
        27,
        "DeepseekV3ForCausalLM",
        config={
            **_MLA,
            "vocab_size": 163840,
            "hidden_size": 2048,
            "intermediate_size": 11264,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
        },
    ),
}


def h100_model(name: str, batch: int, sequence: int, *, layers: int) -> Example:
    """The model called `name` in `H100_MODELS`, with so many layers."""
    import transformers

    sizes = H100_MODELS[name]
    with torch.device("meta"):
        if sizes.name:
            return MODELS[sizes.name](layers=layers, batch=batch, sequence=sequence)
        attention = sizes.fused or unmasked_attention()
        config = config_of(name, num_hidden_layers=layers, use_cache=False, attn_implementation=attention)
        model = getattr(transformers, sizes.head)(config).to(torch.bfloat16).train()
        ids, labels = (torch.zeros(batch, sequence, dtype=torch.long) for _ in range(2))
        return Example(model, (), {"input_ids": ids, "labels": labels, "use_cache": False})


def config_of(name: str, **changes: Any) -> Any:
    """The configuration of a model that is one of transformers, with `changes`."""
    import transformers

    sizes = H100_MODELS[name]
    return getattr(transformers, sizes.head).config_class(**{**sizes.config, **changes})


def builder(name: str, batch: int, sequence: int) -> "partial[Example]":
    """`h100_model` for all but its layers. ValueError, which lists those that are known, for a model that is not."""
    if name not in H100_MODELS:
        raise ValueError(f"model: expected one of {', '.join(H100_MODELS)}, found {name!r}; give its sizes")
    return partial(h100_model, name, batch, sequence)
