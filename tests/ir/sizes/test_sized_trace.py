"""A model that is traced once for a range of sizes gives, for each size, the graph that tracing anew gives."""

import math

import pytest
import torch
from torch import nn

from autopar.ir.passes.normalise import normalise
from autopar.ir.print_graph import fingerprint
from autopar.ir.sizes.sized_trace import SizedTrace
from autopar.ir.trace import trace
from autopar.ir.trace_with_loss import traced, traced_for_sizes


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.table(tokens) + torch.sin(positions)[:, None])
        return self.head(hidden[:, -3:]).flatten(0, 1)


class Branches(nn.Module):
    """Decides by sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(40, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) + self.table[: x.shape[1]]
        if x.shape[1] > 20:
            x = x * 2
        if x.shape[1] % 2:
            x = x + 1
        first, second = x.chunk(2, dim=1)
        return first.sum() / math.sqrt(8) - second.sum() * x.shape[1]


def tokens(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="meta")


def test_transformer_of_any_length_and_batch() -> None:
    model = Encoder().to("meta")
    sized = SizedTrace.of(model, (tokens(4, 12),), {}, {0: (0, 1)}, normalise)
    for batch, length in [(4, 12), (4, 13), (2, 30), (7, 5), (5, 16), (16, 16)]:
        found, expected = sized.graph((tokens(batch, length),), {}), trace(model, (tokens(batch, length),), {})
        assert found is not None and fingerprint(found) == fingerprint(expected), (batch, length)


def test_what_a_model_decides_by_sizes() -> None:
    model, x = Branches(), torch.zeros(2, 24, 8)
    sized = SizedTrace.of(model, (x,), {}, {0: (1,)}, normalise)
    for length in range(2, 41):
        found = sized.graph((torch.zeros(2, length, 8),), {})
        assert (found is not None) == (length > 20 and length % 2 == 0), length
        if found is not None:
            assert fingerprint(found) == fingerprint(trace(model, (torch.zeros(2, length, 8),), {}))
    assert sized.graph((torch.zeros(2, 42, 8),), {}) is None, "the table has 40 rows"
    assert sized.graph((torch.zeros(3, 24, 8),), {}) is None, "another batch was not asked for"


def test_size_that_the_model_fixes() -> None:
    model = nn.Linear(8, 4)
    sized = SizedTrace.of(model, (torch.zeros(3, 8),), {}, {0: (1,)}, normalise)
    assert sized.range.is_point
    assert sized.graph((torch.zeros(3, 8),), {}) is not None and sized.graph((torch.zeros(3, 9),), {}) is None


def test_loss_function_and_keywords() -> None:
    model = Encoder().to("meta")

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, target[:, -3:].flatten())

    args = tokens(4, 12), tokens(4, 12)
    sized = traced_for_sizes(model, loss, args, {}, {0: (1,), 1: (1,)})
    for length in (12, 13, 20):
        args = tokens(4, length), tokens(4, length)
        found = sized.graph(args, {})
        assert found is not None and fingerprint(found) == fingerprint(traced(model, loss, args, {}))
    assert sized.graph((tokens(4, 12), tokens(4, 13)), {}) is not None, "the loss reads three of each"
    assert sized.graph((tokens(4, 12), tokens(4, 2)), {}) is None


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_cache_that_grows(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 50, "bos_token_id": None, "eos_token_id": None}
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, **small))
    else:
        config = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, **small))
    model.eval()

    def call(length: int) -> dict:
        cache = transformers.DynamicCache(config=model.config)
        for layer in range(2):
            cache.update(torch.zeros(1, 2, length, 8), torch.zeros(1, 2, length, 8), layer)
        tokens = torch.zeros(1, 1, dtype=torch.int64)
        return {"input_ids": tokens, "past_key_values": cache, "use_cache": True, "return_dict": True}

    trace(model, (), call(5))  # registers the cache
    leaves = torch.utils._pytree.tree_leaves(dict(sorted(call(6).items())))
    dynamic = {i: (2,) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.ndim == 4}
    sized = SizedTrace.of(model, (), call(6), dynamic, normalise)
    for length in (5, 6, 7, 20):
        found = sized.graph((), call(length))
        assert found is not None and fingerprint(found) == fingerprint(trace(model, (), call(length)))
