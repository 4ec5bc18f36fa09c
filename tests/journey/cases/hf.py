"""Models of transformers."""

from typing import Any

import torch
from torch import nn

from tests.journey.case import FORWARD, Numbers, Run, case
from tests.journey.stack import BATCH

WORDS, LENGTH = 32, 8


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=None, eos_token_id=None, **options))


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **options))


def words() -> torch.Tensor:
    return torch.randint(1, WORDS, (BATCH, LENGTH))


def trained(run: Run, model: nn.Module, **inputs: torch.Tensor) -> Numbers:
    model = run.compile(model, kwargs=inputs)
    return {"loss": run.step(model, **inputs)} | run.gradients(model)


@case(on=FORWARD)
def causal_model_with_labels(run: Run) -> Numbers:
    """GPT-2 with labels: output.loss"""
    ids = words()
    return trained(run, gpt2(), input_ids=ids, labels=ids)


@case(on=FORWARD)
def padded_batch(run: Run) -> Numbers:
    """Llama with an attention mask and ignored labels"""
    ids = words()
    mask = (torch.arange(LENGTH) < torch.tensor([8, 3, 5, 8, 1, 2, 8, 7])[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    return trained(run, llama(), input_ids=ids, attention_mask=mask, labels=labels)


@case(on=FORWARD)
def gradient_checkpointing(run: Run) -> Numbers:
    """model.gradient_checkpointing_enable(), reentrant as well"""
    ids, model = words(), llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return trained(run, model, input_ids=ids, labels=ids)


@case(on=FORWARD, peers=False)
def embeddings_given(run: Run) -> Numbers:
    """inputs_embeds in place of input_ids, and the logits"""
    model, x = llama(), torch.randn(BATCH, LENGTH, 16)
    model = run.compile(model, kwargs={"inputs_embeds": x})
    logits = run.whole(model(inputs_embeds=x).logits)
    logits.square().mean().backward()
    return {"logits": logits.detach()} | run.gradients(model)


@case(on=FORWARD)
def classifier(run: Run) -> Numbers:
    """BERT for sequence classification"""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **drops, intermediate_size=32, max_position_embeddings=LENGTH, num_labels=4)
    return trained(run, BertForSequenceClassification(config), input_ids=words(), labels=torch.randint(4, (BATCH,)))


@case(on=FORWARD, peers=False)
def hidden_states(run: Run) -> Numbers:
    """output_hidden_states=True: all hidden states of the output"""
    ids, model = words(), gpt2(use_cache=False)
    model = run.compile(model, kwargs={"input_ids": ids, "output_hidden_states": True})
    output = model(input_ids=ids, output_hidden_states=True)
    states = [run.whole(x) for x in output.hidden_states]
    sum(x.square().mean() for x in states).backward()
    return {str(i): x.detach() for i, x in enumerate(states)} | run.gradients(model)
