"""Small models every test can use. Batches are 8, heads 4, widths 32, vocabularies 64: all divide by 2, 4 and (but for
heads) 8.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

BATCH, SEQUENCE, VOCABULARY, HIDDEN, HEADS, LAYERS, CLASSES = 8, 8, 64, 32, 4, 2, 16


class Case(NamedTuple):
    """`loss(model(*args, **kwargs))` is a scalar."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor]


class MLP(nn.Module):
    """linear, gelu, linear"""

    def __init__(self, dropout: float = 0.0, hidden: int = HIDDEN, depth: int = LAYERS) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)) for _ in range(depth)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return self.head(x)


class VGG13(nn.Module):
    """VGG configuration B for 32x32 images; `width` is the first layer's channels (64 in the paper)."""

    def __init__(self, dropout: float = 0.0, width: int = 8) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in (width, 2 * width, 4 * width, 8 * width, 8 * width):
            for _ in range(2):
                layers += [nn.Conv2d(channels, stage, 3, padding=1), nn.ReLU(inplace=True)]
                channels = stage
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        wide = 64 * width
        self.classifier = nn.Sequential(
            nn.Linear(channels, wide),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(wide, wide),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(wide, CLASSES),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


class Residual(nn.Module):
    """The basic block of ResNet-18, with its projection where the shape changes."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, three residual blocks, average pooling; batch norm throughout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(
            Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(images)), 1).flatten(1))


def _classify(model: nn.Module, *shape: int) -> Case:
    labels = torch.randint(CLASSES, (BATCH,))
    return Case(
        model, (torch.randn(BATCH, *shape),), {}, lambda logits: F.cross_entropy(logits, labels.to(logits.device))
    )


def _predict_tokens(model: nn.Module) -> Case:
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    return Case(model, (), {"input_ids": tokens, "labels": tokens.clone()}, lambda output: output.loss)


def _mlp(dropout: float) -> Case:
    return _classify(MLP(dropout), HIDDEN)


def _vgg13(dropout: float) -> Case:
    return _classify(VGG13(dropout), 3, 32, 32)


def _resnet(dropout: float) -> Case:
    assert dropout == 0.0, "ResNet has no dropout"
    return _classify(ResNet(), 3, 16, 16)


def _gpt2(dropout: float) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": SEQUENCE, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
    drops = {
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, use_cache=False))
    model.loss_type = "ForCausalLM"  # transformers does not know it for this class and would warn
    return _predict_tokens(model)


def _llama(dropout: float) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=SEQUENCE,
        attention_dropout=dropout,
        use_cache=False,
    )
    return _predict_tokens(LlamaForCausalLM(config))


def _bert(dropout: float) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _predict_tokens(BertForMaskedLM(config))


def _vit(dropout: float) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=CLASSES,
    )
    kwargs = {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(CLASSES, (BATCH,))}
    return Case(ViTForImageClassification(config), (), kwargs, lambda output: output.loss)


ZOO: Mapping[str, Callable[[float], Case]] = {
    "mlp": _mlp,
    "vgg13": _vgg13,
    "resnet": _resnet,
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "vit": _vit,
}


def build(name: str, *, dtype: torch.dtype = torch.float64, dropout: float = 0.0, seed: int = 0) -> Case:
    """The model called `name` in training mode with inputs, the same for the same arguments. HF losses are float32
    whatever `dtype`.

    >>> case = build("mlp")
    >>> case.loss(case.model(*case.args, **case.kwargs)).shape
    torch.Size([])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        case = ZOO[name](dropout)
    to_dtype = lambda x: x.to(dtype) if x.is_floating_point() else x  # noqa: E731
    args, kwargs = tuple(map(to_dtype, case.args)), {key: to_dtype(x) for key, x in case.kwargs.items()}
    return Case(case.model.to(dtype).train(), args, kwargs, case.loss)
