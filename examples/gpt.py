"""A small GPT to try autopar on: bytes in, next byte out. `autopar explain examples/gpt.py:build --mesh 2x2 --cluster
cpu`.
"""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 256  # one token a byte
SEQUENCE = 128
BATCH = 8


def build() -> tuple[nn.Module, tuple, dict]:
    """(model, args, kwargs): 3.2 M parameters, GPT-2's architecture, no dropout, and a batch of 8 x 128 bytes."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=256,
        n_layer=4,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers does not know it for this class and would warn
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    return model, (), {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}
