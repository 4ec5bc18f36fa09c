"""`inference_example`: the call of a built-in model in inference, in place of that of its training batch."""

from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.models.catalogue import Example
from autopar.models.vision import Classifier


def inference_example(name: str, example: Example, num_past: int | None = None) -> Example:
    """The call of the built-in model `name` without labels, in eval mode, for as many samples as in `example`.

    Of a language model that generates: of prefill, whose prompts are the samples, and which gives the key-value cache
    and the logits of the last token; or with `num_past` of decode, one token of each sample with a cache of so many
    tokens before it. AutoparError for decode of a model that has none.
    """
    model, args, kwargs = example.model, example.args, {k: v for k, v in example.kwargs.items() if k != "labels"}
    if isinstance(model, Classifier):
        model, args = model.network, args[:1]
    elif getattr(model.config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = torch.zeros_like(kwargs["input_ids"])
    generates = "use_cache" in kwargs and "decoder_input_ids" not in kwargs
    if generates:
        kwargs |= {"use_cache": True, "logits_to_keep": 1}
    if num_past is not None:
        if not generates:
            raise AutoparError(
                f"--decode: {name} is no decoder with a key-value cache; leave it out, or take one that is"
            )
        if num_past < 1:
            raise AutoparError(f"--decode {num_past}: expected a positive number of tokens in the key-value cache")
        kwargs["input_ids"] = kwargs["input_ids"][:, :1].clone()
        kwargs["past_key_values"] = _cache(model, kwargs["input_ids"].shape[0], num_past)
    return Example(model.eval(), args, kwargs)


def _cache(model: Any, batch: int, num_past: int) -> Any:
    """The key-value cache of `num_past` tokens of each sample."""
    from transformers import DynamicCache

    config, cache = model.config, DynamicCache()
    num_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape, place = (batch, num_heads, num_past, head_dim), {"dtype": model.dtype, "device": "meta"}
    for layer in range(config.num_hidden_layers):
        cache.update(torch.empty(shape, **place), torch.empty(shape, **place), layer)
    return cache
