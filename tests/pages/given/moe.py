"""The reader's own model with experts: a small Mixtral."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def model() -> tuple:
    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=8,
    )
    tokens = torch.zeros(64, 128, dtype=torch.long)
    return MixtralForCausalLM(config), (), {"input_ids": tokens, "labels": tokens, "use_cache": False}
