"""transformers' caches: calls write to the one they are given, as on one device, and windows drop nothing unseen."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from tests.runtime.test_inference import ROWS, WORDS, llama, slow_devices, words
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank
WINDOW = 8


def gemma() -> Any:
    """A layer with a sliding window, and one without."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    kinds = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **kinds, num_attention_heads=4, num_key_value_heads=4)).eval()
    with torch.no_grad():
        for x in model.parameters():
            x *= 3 if x.ndim > 1 else 1  # so that all tokens before the present one count
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def compiled(model: nn.Module) -> Any:
    return autopar.compile(copy.deepcopy(model), device_mesh((4,), ("tp",)), cluster=slow_devices(), trains=False)


@torch.no_grad()
def tokens_by_hand(model: Any, cache: Any, num: int = 6) -> torch.Tensor:
    """Tokens of a loop that holds the cache, and reads none of what calls give for it."""
    token, found = words(5), []
    for _ in range(num):
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        found.append(token)
    return torch.cat(found, 1)


def writes_to_the_cache_it_is_given(make: Any, has_window: bool) -> None:
    from transformers import DynamicCache

    truth = make()
    model = compiled(truth)
    settings = {"config": truth.config} if has_window else {}
    own, expected = DynamicCache(**settings), DynamicCache(**settings)
    assert torch.equal(tokens_by_hand(model, own), tokens_by_hand(truth, expected))
    assert own.get_seq_length() == expected.get_seq_length() == 10
    torch.testing.assert_close(own.layers[1].keys.full_tensor(), expected.layers[1].keys)


@pytest.mark.parametrize(("make", "has_window"), [(llama, False), (gemma, True)], ids=["llama", "gemma"])
def test_calls_write_to_the_cache_they_are_given(ranks4: Ranks, make: Any, has_window: bool) -> None:
    ranks4.run(writes_to_the_cache_it_is_given, make, has_window)


def writes_to_memory_made_before() -> None:
    from transformers import StaticCache

    truth = llama()
    model, places, held = compiled(truth), [], []
    own, expected = (StaticCache(config=truth.config, max_cache_len=16) for _ in range(2))
    for num in (2, 5):  # of tokens, the second time after a longer prompt
        assert torch.equal(tokens_by_hand(model, own, num), tokens_by_hand(truth, expected, num))
        held = [x.layers[1].keys for x in (own, expected)]
        torch.testing.assert_close(held[0].full_tensor(), held[1])
        assert int(own.get_seq_length()) == int(expected.get_seq_length())
        places.append(held[0].to_local().data_ptr())
    assert held[0].to_local().numel() * 4 == held[1].numel()
    assert places[0] == places[1]  # it stays where it is


def test_a_static_cache_stays_where_it_is(ranks4: Ranks) -> None:
    ranks4.run(writes_to_memory_made_before)


def pads_are_masked_behind_a_window() -> None:
    truth, tokens = gemma(), words(WINDOW + 2)
    mask = torch.ones_like(tokens)
    for row in range(ROWS):
        mask[row, :row] = 0
    call = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(compiled(truth).generate(tokens * mask, **call), truth.generate(tokens * mask, **call))


def test_pads_are_masked_behind_a_sliding_window(ranks4: Ranks) -> None:
    ranks4.run(pads_are_masked_behind_a_window)


def refuses_a_cache_that_dropped_tokens() -> None:
    model = compiled(gemma())
    made = model(words(2 * WINDOW), use_cache=True)  # without a cache that keeps all
    with pytest.raises(AutoparError, match=r"sliding window that dropped tokens.*use_cache=False"):
        model(words(1), past_key_values=made.past_key_values, use_cache=True)


def test_a_cache_that_dropped_tokens_is_refused(ranks4: Ranks) -> None:
    ranks4.run(refuses_a_cache_that_dropped_tokens)


def refuses_other_caches() -> None:
    from transformers.cache_utils import Cache, DynamicLayer, StaticCache

    with pytest.raises(AutoparError, match=r"Cache; expected tensors.*give a transformers[.]DynamicCache"):
        compiled(llama())(words(4), past_key_values=Cache(layer_class_to_replicate=DynamicLayer))
    model = compiled(gemma())
    with pytest.raises(AutoparError, match=r"a StaticCache has a StaticSlidingWindowLayer.*use_cache=False"):
        model(words(4), past_key_values=StaticCache(config=model.config, max_cache_len=20))


def test_other_caches_are_refused_by_name(ranks4: Ranks) -> None:
    ranks4.run(refuses_other_caches)


class Silent(nn.Module):
    """Writes to a cache and does not give it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        return self.model(tokens, past_key_values=cache, use_cache=True).logits


def refuses_a_cache_that_is_not_given_back() -> None:
    from transformers import DynamicCache

    with pytest.raises(AutoparError, match="writes to a DynamicCache that it was given, which is not among"):
        compiled(Silent())(words(4), DynamicCache())


def test_a_cache_that_is_not_given_back_is_refused(ranks4: Ranks) -> None:
    ranks4.run(refuses_a_cache_that_is_not_given_back)
