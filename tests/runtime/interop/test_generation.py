"""transformers' `generate` of models with an encoder, which it calls by itself, and of those that ask for a device."""

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from tests.workers import Ranks, device_mesh

pytestmark = pytest.mark.multirank
WORDS = 32


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    ends = {"decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **ends, dropout_rate=0.0)).eval()


def words(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, WORDS, (rows, length), generator=torch.Generator().manual_seed(length))


def generated(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=2, do_sample=False, **options)


def an_encoder_is_called_alone() -> None:
    truth, model = t5(), t5()
    if torch.distributed.get_rank():
        nn.init.normal_(model.shared.weight)  # weights are those of the first rank, before they are sharded too
    model = autopar.compile(model, device_mesh((2,), ("dp",)), cluster="free-links")
    assert model.device == torch.device("cpu")
    for ids in (words(2, 5), words(1, 4)):
        assert torch.equal(generated(model, ids), generated(truth, ids))
    assert model.device == torch.device("cpu") and not next(model.parameters()).is_meta
    encoder = model.get_encoder()
    assert isinstance(encoder, type(truth.get_encoder())) and encoder.config is model.encoder.config
    with torch.no_grad():
        found, expected = (x(input_ids=words(2, 5)).last_hidden_state for x in (encoder, truth.get_encoder()))
    assert type(found) is torch.Tensor and torch.allclose(found, expected, atol=1e-6)
    with pytest.raises(AutoparError, match=r"plain tensor beside a DTensor.*called by itself"):
        encoder(input_ids=words(2, 5))


def test_an_encoder_is_called_alone() -> None:
    ranks = Ranks(2)
    ranks.run(an_encoder_is_called_alone)
    ranks.stop()


class Shown(nn.Module):
    """A model that is its own encoder, and whose device is no property."""

    device = "somewhere"

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def get_encoder(self) -> nn.Module:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def a_model_of_such_names() -> None:
    model = autopar.compile(Shown(), device_mesh((2,), ("dp",)), args=(torch.ones(4, 4),))
    assert model.device == "somewhere" and model.get_encoder() is model


def test_a_model_of_such_names() -> None:
    ranks = Ranks(2)
    ranks.run(a_model_of_such_names)
    ranks.stop()
