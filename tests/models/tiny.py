"""Tiny models of transformers with random weights, made from their configurations: all sizes that a configuration has
are replaced by small ones, and inputs follow from the signature of the forward.
"""

import inspect
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BATCH, TOKENS, VOCABULARY, HIDDEN = 8, 8, 64, 32

_WIDTHS = """hidden_size d_model n_embd embed_dim dim hidden_dim emb_dim embedding_size word_embed_proj_dim model_dim
    decoder_hidden_size encoder_hidden_size lru_width"""
_DEPTHS = """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
    num_decoder_layers depth num_encoder_blocks decoder_num_layers encoder_num_layers num_feat_extract_layers"""
_HEADS = """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts
    num_local_experts n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads sliding_window attention_window
    state_size mamba_d_state conv_kernel ssm_state_size chunk_size mamba_chunk_size rotary_dim"""
_DOUBLE = """intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner mlp_dim ffn_hidden_size
    max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len vocab_size"""
_EIGHT = """head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim
    patch_size num_labels num_conv_pos_embeddings"""
_SIXTEEN = "q_lora_rank kv_lora_rank projection_dim num_mel_bins mamba_d_head mamba_head_dim classifier_proj_size"
_TWO = "num_key_value_heads num_experts_per_tok moe_k linear_num_key_heads type_vocab_size mamba_expand expand"
SIZES: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS.split(), HIDDEN),
    **dict.fromkeys(_DEPTHS.split(), 2),
    **dict.fromkeys(_HEADS.split(), 4),
    **dict.fromkeys(_DOUBLE.split(), 64),
    **dict.fromkeys(_EIGHT.split(), 8),
    **dict.fromkeys(_SIXTEEN.split(), 16),
    **dict.fromkeys(_TWO.split(), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "image_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "n_groups"), 1),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "linear_num_value_heads": 4,
    "mamba_n_groups": 1,
    "num_queries": 6,
    "use_cache": False,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "conv_dim": [16, 16],
    "conv_stride": [2, 2],
}


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model called "type/Class", in training mode without dropout, and the keywords of a call."""
    kind, class_name = name.split("/")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = _config(CONFIG_MAPPING[kind])
        model = getattr(transformers, class_name)(config).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model, _inputs(model, config, class_name)


def _config(kind: Any, around: tuple[Any, ...] = ()) -> Any:
    """A configuration of this class and those within it, with small sizes."""
    found: dict[str, Any] = {}
    for name, value in vars(kind()).items():
        if isinstance(value, transformers.PretrainedConfig):
            if type(value) not in around:
                found[name] = _config(type(value), (*around, kind))
        elif "drop" in name and isinstance(value, float):
            found[name] = 0.0
        elif "drop" in name and isinstance(value, list):
            found[name] = [0.0] * len(value)
        elif name in SIZES and value is not None and _is_alike(value, SIZES[name]):
            found[name] = SIZES[name]
    types = list(dict.fromkeys(vars(kind()).get("layer_types") or ()))
    if types:
        count = max(2, min(len(types), 4))
        found["layer_types"] = (types * 2)[:count]
        found |= {name: count for name in ("num_hidden_layers", "n_layer", "num_layers") if name in found}
    return kind(**found)


def _is_alike(value: Any, size: Any) -> bool:
    if isinstance(value, (dict, str)) or isinstance(value, bool) != isinstance(size, bool):
        return False
    return isinstance(value, (list, tuple)) == isinstance(size, list)


def _inputs(model: nn.Module, config: Any, class_name: str) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    text = getattr(config.get_text_config(), "vocab_size", VOCABULARY) or VOCABULARY
    ids = torch.randint(3, min(text, VOCABULARY), (BATCH, TOKENS))
    vision = getattr(config, "vision_config", None) or config
    size, channels = getattr(vision, "image_size", 32), getattr(vision, "num_channels", 3)
    size = size if isinstance(size, int) else size[0]
    made: dict[str, Any] = {}
    if "input_ids" in names and main in ("input_ids", "pixel_values"):
        made |= {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if "attention_mask" in names else {})
    is_seen = "pixel_values" in names and "LMHead" not in class_name
    if is_seen and (main == "pixel_values" or "ConditionalGeneration" not in class_name):
        made["pixel_values"] = torch.randn(BATCH, channels, size, size)
    if main == "input_features":
        made["input_features"] = torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    if main == "input_values":
        made["input_values"] = torch.randn(BATCH, 400)
    if "decoder_input_ids" in names:
        made["decoder_input_ids"] = ids.clone()
    ends = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForCTC")
    if "labels" in names and class_name.endswith(ends) and main != "input_features":
        made["labels"] = ids.clone()
    elif "labels" in names and class_name.endswith("Classification"):
        made["labels"] = torch.randint(0, config.num_labels, (BATCH,))
    return made
