"""What a model asks while it is exported: it takes the ways that it takes when it is run."""

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_exporting
from transformers import Aimv2TextConfig, Aimv2TextModel, CLIPTextConfig, CLIPTextModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autopar.errors import TraceError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from tests.ir.compare import assert_same_as_model

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}


class Asks(nn.Module):
    """Computes something else where torch says that it is exported."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(3, 3), way

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.way == "compiling":
            return y * 2 if torch.compiler.is_compiling() else y * 3
        if self.way == "exporting":
            return y * 2 if torch.compiler.is_exporting() else y * 3
        if self.way == "by its own name":
            return y * 2 if is_exporting() else y * 3
        return y * 2 if torch.jit.is_tracing() else y * 3


@pytest.mark.parametrize("way", ["compiling", "exporting", "by its own name", "jit"])
def test_branch_on_whether_the_model_is_traced_goes_the_way_of_a_run(way: str) -> None:
    model = Asks(way)
    assert_same_as_model(trace(skeleton(model), (X,), {}), model, (X,), {}, tolerance=1e-6)


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(16).reshape(2, 8)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_causal_mask_that_transformers_drops_in_a_run_and_keeps_in_an_export_is_refused() -> None:
    model = Aimv2TextModel(Aimv2TextConfig(**SIZES))
    with pytest.raises(TraceError, match=r"Aimv2TextModel makes a causal mask for Aimv2Attention.*attn_implementation"):
        trace(skeleton(model), (), tokens())


def test_mask_that_is_always_kept_is_traced() -> None:
    model = Aimv2TextModel(Aimv2TextConfig(**SIZES, attn_implementation="eager"))
    assert trace(skeleton(model), (), tokens()).ops


def test_causal_mask_of_attention_that_is_told_to_be_causal_is_traced() -> None:
    model = CLIPTextModel(CLIPTextConfig(**SIZES))
    assert not model.encoder.layers[0].self_attn.is_causal
    assert trace(skeleton(model), (), tokens()).ops


def test_attention_that_is_called_with_names_is_traced() -> None:
    """As Parakeet's."""

    class Attends(nn.Module):
        num_key_value_groups, is_causal = 1, False

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).reshape(1, 1, 4, 3)
            given = {"query": y, "key": y, "value": y, "attention_mask": None, "scaling": 1.0}
            return ALL_ATTENTION_FUNCTIONS["sdpa"](self, **given)[0]

    model = Attends()
    assert_same_as_model(trace(skeleton(model), (X,), {}), model, (X,), {}, tolerance=1e-6)
