"""The models of the step benchmark, and their tensor-parallel plans as a user would write them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from tests.zoo import MLP, VGG13


@dataclass(frozen=True)
class Workload:
    """`model(*args)` is the scalar loss; args are the global batch, batch dim first. `blocks`: FQNs that FSDP wraps one
    by one.

    `tensor_parallel` is the plan given to `parallelize_module`.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    blocks: tuple[str, ...]
    tensor_parallel: Callable[[], Mapping[str, ParallelStyle]]


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


class GPT(nn.Module):
    """A GPT over byte tokens; returns the mean cross-entropy of the next token."""

    def __init__(
        self, hidden: int = 256, layers: int = 4, head: int = 32, sequence: int = 128, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, head) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        # half precision would overflow
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


class Classifier(nn.Module):
    """A model and its cross-entropy."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x), labels)


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


def _tokens() -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(256, (8, 129))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _images(*shape: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(32, *shape), torch.randint(16, (32,))


WORKLOADS: Mapping[str, Workload] = {
    "gpt": Workload(GPT, _tokens, tuple(f"blocks.{i}" for i in range(4)), _gpt_plan),
    "wide-mlp": Workload(
        lambda: Classifier(MLP(hidden=1024)),
        lambda: _images(1024),
        tuple(f"body.blocks.{i}" for i in range(2)),
        _mlp_plan,
    ),
    "vgg13": Workload(_vgg, lambda: _images(3, 32, 32), ("body.features", "body.classifier"), _vgg_plan),
}
