"""The models of the benchmarks of steps, and their tensor-parallel plans as a user would write them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from tests.zoo import MLP, VGG13


@dataclass(frozen=True)
class Workload:
    """`model(*args)` is the scalar loss; args are the global batch, batch dim first. `blocks`: FQNs that FSDP wraps one
    by one.

    `tensor_parallel` is the plan given to `parallelize_module`; empty if that cannot split the model as it is written.
    `cuts`: FQNs at which `torch.distributed.pipelining` begins the second to fourth stage of a `WithLoss`; empty if it
    cannot: it sends no tensors that are not contiguous (ViT, T5), and none back past a stage (Llama). `shard` splits
    the model in its library's own way, as `bench.titan.sharded` does.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    blocks: tuple[str, ...]
    tensor_parallel: Callable[[], Mapping[str, ParallelStyle]]
    cuts: tuple[str, ...] = ()
    shard: Callable[..., nn.Module] | None = None


class Attention(nn.Module):
    """Causal self-attention; the number of heads follows from the projections' local width."""

    def __init__(self, hidden: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, hidden: int, head: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, head)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class WithLoss(nn.Module):
    """A model whose `scores(x)` have classes in their last dim; its forward is their cross-entropy."""

    scores: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.scores(x), labels)


def cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of all rows, in float32: half precision would overflow."""
    return F.cross_entropy(scores.flatten(0, -2).float(), labels.flatten())


class GPT(WithLoss):
    """A GPT over byte tokens; returns the mean cross-entropy of the next token."""

    def __init__(
        self, hidden: int = 256, layers: int = 4, head: int = 32, sequence: int = 128, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, head) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Language(WithLoss):
    """A model of transformers and its cross-entropy: of the next tokens, or of what a decoder makes of `x`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        given = {"decoder_input_ids": x} if self.body.config.is_encoder_decoder else {}
        return self.body(x, **given, use_cache=False).logits


class Images(WithLoss):
    """An image classifier of transformers and its cross-entropy."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).logits


class Classifier(WithLoss):
    """A model and its cross-entropy."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def _vgg() -> nn.Module:
    model = Classifier(VGG13(width=32))
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # parallelize_module's outputs may not be written to
    return model


def _gpt_plan() -> dict[str, ParallelStyle]:
    column = {
        f"blocks.*.{name}": ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "up")
    }
    return {**column, "blocks.*.attention.out": RowwiseParallel(), "blocks.*.down": RowwiseParallel()}


def _mlp_plan() -> dict[str, ParallelStyle]:
    return {"body.blocks.*.0": ColwiseParallel(), "body.blocks.*.2": RowwiseParallel()}


def _vgg_plan() -> dict[str, ParallelStyle]:
    return {"body.classifier.0": ColwiseParallel(), "body.classifier.3": RowwiseParallel()}


def _llama_plan() -> dict[str, ParallelStyle]:
    layer = "body.model.layers.*"
    column = {f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    column |= {f"{layer}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    return {**column, f"{layer}.self_attn.o_proj": RowwiseParallel(), f"{layer}.mlp.down_proj": RowwiseParallel()}


def _wide_mlp() -> nn.Module:
    inner = [layer for _ in range(3) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    return nn.Sequential(*inner, nn.Linear(2048, 4096))


def _wide_mlp_plan() -> dict[str, ParallelStyle]:
    return {f"body.{place}": ColwiseParallel() if place % 4 == 0 else RowwiseParallel() for place in (0, 2, 4, 6)}


def _no_plan() -> dict[str, ParallelStyle]:
    return {}


def _tokens(vocabulary: int = 256, batch: int = 8, sequence: int = 128) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(vocabulary, (batch, sequence + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _images(*shape: int, batch: int = 32, classes: int = 16) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, *shape), torch.randint(classes, (batch,))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 1024}
    return Language(LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=256)))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Images(ViTForImageClassification(ViTConfig(**sizes, **drops, image_size=64, patch_size=8, num_labels=64)))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 2, "num_heads": 8, "vocab_size": 1024}
    return Language(T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)))


def _moe() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return Language(MixtralForCausalLM(MixtralConfig(**sizes, **experts, **heads, max_position_embeddings=256)))


def _titan() -> nn.Module:
    from bench.titan import Llama

    return Llama()


def _shard_titan(model: nn.Module, **degrees: object) -> nn.Module:
    from bench.titan import sharded

    return sharded(model, **degrees)


def _layers(name: str, num: int) -> tuple[str, ...]:
    return tuple(f"{name}.{number}" for number in range(num))


def _cuts(name: str, num: int) -> tuple[str, ...]:
    """Before each layer but the first."""
    return _layers(name, num)[1:]


WORKLOADS: Mapping[str, Workload] = {
    "gpt": Workload(GPT, _tokens, _layers("blocks", 4), _gpt_plan),
    "wide-mlp": Workload(
        lambda: Classifier(MLP(hidden=1024)), lambda: _images(1024), _layers("body.blocks", 2), _mlp_plan
    ),
    "vgg13": Workload(_vgg, lambda: _images(3, 32, 32), ("body.features", "body.classifier"), _vgg_plan),
}

# Of the benchmarks on networks: models and batches of a size at which their links matter.
NETWORK_WORKLOADS: Mapping[str, Workload] = {
    "gpt": Workload(
        lambda: GPT(vocabulary=4096),
        lambda: _tokens(4096, batch=16),
        _layers("blocks", 4),
        _gpt_plan,
        _cuts("blocks", 4),
    ),
    "long-gpt": Workload(
        lambda: GPT(vocabulary=512, sequence=512),
        lambda: _tokens(512, batch=16, sequence=512),
        _layers("blocks", 4),
        _gpt_plan,
        _cuts("blocks", 4),
    ),
    "wide-mlp": Workload(
        lambda: Classifier(_wide_mlp()),
        lambda: _images(2048, batch=64, classes=4096),
        ("body.0", "body.2", "body.4"),
        _wide_mlp_plan,
        ("body.2", "body.4", "body.6"),
    ),
    "vgg13": replace(WORKLOADS["vgg13"], cuts=("body.features.10", "body.features.15", "body.features.20")),
    "vit": Workload(_vit, lambda: _images(3, 64, 64, classes=64), _layers("body.vit.layers", 4), _no_plan),
    "llama": Workload(_llama, lambda: _tokens(1024, batch=16), _layers("body.model.layers", 4), _llama_plan),
    "t5": Workload(
        _t5,
        lambda: _tokens(1024, batch=16),
        (*_layers("body.encoder.block", 2), *_layers("body.decoder.block", 2)),
        _no_plan,
    ),
    "moe": Workload(_moe, lambda: _tokens(1024, batch=16), _layers("body.model.layers", 2), _no_plan),
}

# Beside these a library's own model, if it is there.
TITAN = "titan-llama"
CLUSTER_WORKLOADS: Mapping[str, Workload] = {
    **NETWORK_WORKLOADS,
    TITAN: Workload(_titan, lambda: _tokens(1024, batch=16), _layers("body.layers", 4), _no_plan, shard=_shard_titan),
}
