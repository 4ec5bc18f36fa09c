"""The models of published measurements, on the meta device, each with its global batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.models.catalogue import Example
from bench.fidelity.written_out import WrittenGPT, WrittenT5

V100_SEQUENCE, V100_VOCABULARY = 2048, 51200


def v100_gpt(batch: int, hidden: int, layers: int, heads: int, *, loss_dtype: torch.dtype = torch.float32) -> Example:
    """GPT of DLPerf in float16."""
    with torch.device("meta"):
        ids = torch.zeros(batch, V100_SEQUENCE, dtype=torch.long)
        model = WrittenGPT((hidden, layers, heads), V100_SEQUENCE, V100_VOCABULARY, loss_dtype=loss_dtype)
        return Example(model.half(), (ids, torch.zeros_like(ids)), {})


@dataclass(frozen=True)
class A800Model:
    """A model of Rubick's cluster. `head`: its class in transformers, "" for those of Megatron, whose `config` has
    hidden, heads and inner. `sequence`: 0 for images. `vocabulary`: that Megatron pads, 0 if none. `depth`: what its
    configuration calls the number of layers. `first_position`: of the table of positions.
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
    # GPT-2 XL and T5 by Megatron's pretrain_gpt.py and pretrain_t5.py (commands in benchmark/models and train_code).
    "gpt2": A800Model("", 48, 16, 1024, 50257, {"hidden": 1600, "heads": 25, "inner": 6400}),
    # 1.24 B parameters and sequence x hidden x layers = 2^24: 32 layers of 1024 on either side, with 6144 between the
    # linear layers, and the vocabulary of BERT with 100 more ids.
    "t5": A800Model("", 32, 16, 512, 30622, {"hidden": 1024, "heads": 16, "inner": 6144}),
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


def a800_megatron(
    name: str, batch: int, sequence: int, decoder_sequence: int, vocabulary: int, *, layers: int
) -> Example:
    """GPT-2 or T5 of Megatron-LM in float32, with its dropout; `decoder_sequence`: of T5."""
    hidden, heads, inner = A800_MODELS[name].config.values()
    with torch.device("meta"):
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        if name == "gpt2":
            model = WrittenGPT((hidden, layers, heads), sequence, vocabulary, dropout=_MEGATRON_DROPOUT)
            return Example(model.train(), (ids, torch.zeros_like(ids)), {})
        t5 = WrittenT5((hidden, layers, heads, inner), sequence, vocabulary, dropout=_MEGATRON_DROPOUT)
        labels = torch.zeros(batch, decoder_sequence, dtype=torch.long)
        of_masks = (sequence, sequence), (decoder_sequence, decoder_sequence), (decoder_sequence, sequence)
        masks = tuple(torch.zeros(batch, 1, *sizes, dtype=torch.bool) for sizes in of_masks)
        return Example(t5.train(), (ids, torch.zeros_like(labels), labels, masks), {})


# Its `--hidden-dropout` and `--attention-dropout`.
_MEGATRON_DROPOUT = 0.1
