"""A model whose equal modules were exported once has just the graph that it has when it is exported as a whole."""

import copy

import pytest
import torch
from torch import nn

from autopar.ir.print_graph import format_graph
from autopar.ir.trace import trace
from tests.ir.compare import assert_same_as_model
from tests.ir.outlines import assert_equal, both

LAYERS = 6


def _gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=LAYERS, n_head=2, use_cache=False, **options)
    )


SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2}


def _causal(name, **options):
    import transformers

    sizes = SIZES | {
        "intermediate_size": 32,
        "num_key_value_heads": 1,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = getattr(transformers, f"{name}Config")(**(sizes | options))
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, intermediate_size=32))


def _t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": LAYERS,
        "num_heads": 2,
        "use_cache": False,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, num_decoder_layers=6, decoder_start_token_id=0, pad_token_id=0))


def _vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**sizes, intermediate_size=32, image_size=8, patch_size=4))


def _whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {
        "vocab_size": 64,
        "d_model": 16,
        "num_mel_bins": 8,
        "max_source_positions": 8,
        "max_target_positions": 8,
        "use_cache": False,
    }
    layers = {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(
        WhisperConfig(**sizes, **layers, **heads, bos_token_id=None, eos_token_id=None)
    )


def _tokens(*shape):
    tokens = torch.ones(shape, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


HF = {
    "gpt2": (_gpt2, _tokens(2, 8), LAYERS, 1),
    "llama": (lambda: _causal("Llama"), _tokens(2, 8), LAYERS, 1),
    "qwen3": (lambda: _causal("Qwen3", head_dim=8), _tokens(2, 8), LAYERS, 1),
    "mixtral": (lambda: _causal("Mixtral", num_local_experts=4), _tokens(2, 8), LAYERS, 1),
    "bert": (_bert, _tokens(2, 8), LAYERS, 1),
    "t5": (_t5, _tokens(2, 8), LAYERS - 1 + 5, 2),
    "vit": (_vit, {"pixel_values": torch.ones(2, 3, 8, 8), "labels": torch.ones(2, dtype=torch.long)}, LAYERS, 1),
    "whisper": (
        _whisper,
        {"input_features": torch.ones(2, 8, 16), "labels": torch.ones(2, 8, dtype=torch.long)},
        2 * LAYERS,
        2,
    ),
}


@pytest.mark.parametrize("name", sorted(HF))
def test_transformers(name):
    build, kwargs, calls, bodies = HF[name]
    with torch.device("meta"):
        model = build().train()
    assert_equal(model, (), kwargs, calls=calls, bodies=bodies)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_models_with_contents(name):
    """The same for models that are not on the meta device; they are left as they were."""
    build, kwargs, calls, bodies = HF[name]
    torch.manual_seed(0)
    model = build().eval()
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    tables = {
        (id(module), table): [(name, id(item)) for name, item in attributes[table].items()]
        for module, attributes in before
        for table in ("_parameters", "_buffers", "_modules")
    }
    assert_equal(model, (), kwargs, calls=calls, bodies=bodies)
    for module, attributes in before:
        assert (
            module.__dict__.keys() == attributes.keys() and not module._forward_hooks and not module._forward_pre_hooks
        )
        for table in ("_parameters", "_buffers", "_modules"):
            assert type(module.__dict__[table]) is dict
            assert [(name, id(item)) for name, item in module.__dict__[table].items()] == [*tables[id(module), table]]
    assert_same_as_model(trace(model, (), kwargs), model, (), kwargs, tolerance=1e-5)


def test_a_number_of_the_layer_in_use():
    """Attention scaled by one over the number of its layer."""
    with torch.device("meta"):
        model = _gpt2(scale_attn_by_inverse_layer_idx=True, attn_implementation="eager")
    assert_equal(model, (), _tokens(2, 8), calls=0)


def test_caches_are_handed_from_layer_to_layer():
    with torch.device("meta"):
        model = _causal("Llama", use_cache=True)
    assert_equal(model, (), _tokens(2, 8), calls=0)


@pytest.mark.parametrize("kind", ["output_hidden_states", "output_attentions"])
def test_outputs_of_layers(kind):
    with torch.device("meta"):
        model = _causal("Llama", attn_implementation="eager")
    _, graph, whole = both(model, (), _tokens(2, 8) | {kind: True})
    assert format_graph(graph) == format_graph(whole)


def test_layers_of_two_kinds():
    with torch.device("meta"):
        kinds = ["sliding_attention", "full_attention"] * 6
        model = _causal(
            "Qwen3", head_dim=8, num_hidden_layers=12, layer_types=kinds, use_sliding_window=True, sliding_window=4
        )
    assert_equal(model, (), _tokens(2, 8), calls=12, bodies=2)


def test_layers_of_torch():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with torch.device("meta"):
        model = nn.TransformerEncoder(copy.deepcopy(layer), 12)
    assert_equal(model, (torch.randn(2, 8, 16, requires_grad=True),), {}, calls=12)
