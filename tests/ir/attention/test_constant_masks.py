"""Masks that a model makes of positions: recognised by what they are, never by how they are made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.graph import Graph, arguments_of
from autopar.ir.trace import trace
from tests.ir.compare import assert_same_as_model

BATCH, TOKENS, WIDTH = 2, 6, 4


class Attends(nn.Module):
    """`mask_of(tokens)` is [queries, keys], or broadcasts to the batch and the heads."""

    def __init__(self, mask_of: Callable[[int], torch.Tensor], num_keys: int = TOKENS) -> None:
        super().__init__()
        self.mask_of, self.num_keys = mask_of, num_keys
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x).unflatten(-1, (2, 2)).transpose(1, 2)
        keys = heads[:, :, : self.num_keys]
        return F.scaled_dot_product_attention(heads, keys, keys, attn_mask=self.mask_of(TOKENS)[..., : self.num_keys])


def causal(n: int) -> torch.Tensor:
    return torch.arange(n)[:, None] >= torch.arange(n)


def spoilt(n: int) -> torch.Tensor:
    mask = causal(n)
    return mask | ((torch.arange(n)[:, None] == 2) & (torch.arange(n) == 5))


def of_samples(n: int) -> torch.Tensor:
    """All samples' masks, of which the last is another."""
    sample = torch.arange(BATCH).view(-1, 1, 1, 1)
    return causal(n).expand(BATCH, 1, n, n) | (sample == BATCH - 1)


def expanded(n: int) -> torch.Tensor:
    positions = torch.arange(n)[None].expand(BATCH, n)
    return positions[:, None, :, None] >= positions[:, None, None, :]


CASES: dict[str, tuple[Any, int, str]] = {
    "causal": (causal, TOKENS, "causal"),
    "tril": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(), TOKENS, "causal"),
    "of each sample": (expanded, TOKENS, "causal"),
    "fewer keys": (causal, 4, "causal"),  # is_causal counts queries and keys from the first
    "all": (lambda n: torch.ones(1, n, dtype=torch.bool), TOKENS, "all"),
    "one score more": (spoilt, TOKENS, "kept"),
    "another sample": (of_samples, TOKENS, "kept"),
    "window": (lambda n: causal(n) & (torch.arange(n)[:, None] - torch.arange(n) < 3), TOKENS, "kept"),
    "strictly": (lambda n: torch.arange(n)[:, None] + 1 > torch.arange(n) + 0, TOKENS, "causal"),
    "later": (lambda n: torch.arange(n)[:, None] <= torch.arange(n), TOKENS, "kept"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mask_becomes_what_it_is(name: str) -> None:
    mask_of, num_keys, kind = CASES[name]
    model, x = Attends(mask_of, num_keys), torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    graph = trace(model, (x,), {})
    assert kind_in(graph) == kind
    assert_same_as_model(graph, model, (x,), {})


def kind_in(graph: Graph) -> str:
    (op,) = (op for op in graph.ops if "scaled_dot_product" in op.target)
    arguments = arguments_of(op)
    if arguments["attn_mask"] is not None:
        return "kept"
    return "causal" if arguments["is_causal"] else "all"


def test_a_mask_of_an_argument_is_kept() -> None:
    class Padded(Attends):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            self.mask_of = lambda n: causal(n) & keep[:, None, None, :]
            return super().forward(x)

    x, keep = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64), torch.ones(BATCH, TOKENS, dtype=torch.bool)
    assert kind_in(trace(Padded(causal), (x, keep), {})) == "kept"


def test_a_model_of_transformers_has_no_mask() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = {name: torch.zeros(64, 1024, dtype=torch.long) for name in ("input_ids", "labels")}
    graph = trace(model, (), tokens)  # of 64 samples 2**26 scores
    assert not any(item.value.dtype == torch.bool for item in graph.of_kind("constant"))
    calls = [arguments_of(op) for op in graph.ops if "scaled_dot_product" in op.target]
    assert [(call["attn_mask"], call["is_causal"]) for call in calls] == [(None, True)] * 2
