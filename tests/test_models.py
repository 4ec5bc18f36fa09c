import pytest
import torch

from autopar.errors import AutoparError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.models.catalogue import MODELS, build_model

# Published sizes in millions: the papers' tables, for the language models but Alpa's the released checkpoints.
MILLIONS = {
    "gpt2": 124.4,
    "gpt2-xl": 1557.6,
    "gpt-2.6b": 2651.3,
    "gpt-39b": 39087.7,
    "llama3-8b": 8030.3,
    "llama3-70b": 70553.7,
    "llama3-405b": 405853.4,
    "bert-large": 335.2,
    "t5-large": 737.7,
    "vit-l": 304.3,
    "vgg13": 133.0,
    "resnet50": 25.6,
    "resnet50-100k": 228.4,
}


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_have_the_published_size_and_no_memory(name):
    example = build_model(name)
    assert sum(p.numel() for p in example.model.parameters()) / 1e6 == pytest.approx(MILLIONS[name], abs=0.06)
    tensors = [
        *example.model.parameters(),
        *example.args,
        *(x for x in example.kwargs.values() if hasattr(x, "is_meta")),
    ]
    assert all(x.is_meta for x in tensors)


def test_unknown_models_are_named_with_the_known():
    with pytest.raises(AutoparError, match=r"'gpt5'.*gpt2-xl"):
        build_model("gpt5")


def test_a_size_that_a_model_does_not_have_is_refused():
    with pytest.raises(AutoparError, match=r"layers=3 for vgg13.*batch"):
        build_model("vgg13", layers=3)
    with pytest.raises(AutoparError, match=r"batch=0 for gpt2"):
        build_model("gpt2", batch=0)


def small_trace(name):
    example = build_model(name, layers=2, batch=4, sequence=64)
    return trace(skeleton(example.model), example.args, dict(example.kwargs))


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"vit-l", "vgg13", "resnet50", "resnet50-100k"}))
def test_depth_batch_and_sequence_are_what_was_asked_for(name):
    graph = small_trace(name)
    assert {item.value.shape for item in graph.of_kind("argument")} == {(4, 64)}
    attentions = [op for op in graph.ops if op.target == "aten.scaled_dot_product_attention.default"]
    # a decoder's block attends to itself and to the encoder
    assert len(attentions) == (6 if name == "t5-large" else 2)
    assert {op.inputs[0].shape[2] for op in attentions} == {64}


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_causal_models_write_no_mask_out(name):
    graph = small_trace(name)
    assert not [op.name for op in graph.ops + graph.constant_ops for value in op.outputs if value.dtype == torch.bool]


def test_attention_told_by_a_flag_computes_what_transformers_own_does():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    losses = []
    tokens = torch.arange(24).reshape(2, 12)
    for attention in (build_model("llama3-8b", layers=1).model.config._attn_implementation, "eager"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, attn_implementation=attention, **sizes))
        losses.append(model(input_ids=tokens, labels=tokens).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
