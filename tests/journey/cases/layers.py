"""Layers of torch.nn that models of libraries do not have."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.journey.case import PP, Numbers, Run, case
from tests.journey.stack import BATCH, WIDTH

# Blocks of few ops are not cut into stages, and not every op can be run on microbatches.
WITH_STAGES = "no plan in stages|cannot be run on microbatches|microbatches would do|returns no loss"


class Residual(nn.Module):
    """`layer` beside a skip connection; of what it returns the first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return x + (out[0] if isinstance(out, tuple) else out)


class Layers(nn.Module):
    """Three of a kind, each of which keeps the shape, and a loss."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(layer()) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - y).square().mean()


def layered(run: Run, layer: Callable[[], nn.Module], *shape: int, mode: bool = True) -> Numbers:
    """Loss, gradients and buffers after two steps."""
    x, y = torch.randn(BATCH, *shape), torch.randn(BATCH, *shape)
    model = run.compile(Layers(layer).train(mode), args=(x, y))
    found = {f"loss {number}": run.step(model, x, y) for number in range(2)}
    return found | run.gradients(model) | run.buffers(model)


def stepped(run: Run, model: nn.Module, *args: torch.Tensor) -> Numbers:
    model = run.compile(model, args=args)
    found = {f"loss {number}": run.step(model, *args) for number in range(2)}
    return found | run.gradients(model) | run.buffers(model)


IMAGE = (4, 4, 4)


@case()
def lstm_both_ways(run: Run) -> Numbers:
    """nn.LSTM of two layers in both directions"""
    return layered(run, lambda: nn.LSTM(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True), 4, WIDTH)


@case(refused={PP: WITH_STAGES})
def rnn_with_dropout_of_all(run: Run) -> Numbers:
    """nn.RNN of two layers, dropout=1.0 between them"""
    return layered(run, lambda: nn.RNN(WIDTH, WIDTH, 2, batch_first=True, dropout=1.0, nonlinearity="relu"), 4, WIDTH)


class Cells(nn.Module):
    """A loop over time, its state made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = cell = state = x.new_zeros(len(x), WIDTH)
        outputs = []
        for step in x.unbind(1):
            hidden, cell = self.lstm(step, (hidden, cell))
            state = self.gru(hidden, state)
            outputs.append(state)
        return torch.stack(outputs, 1)


@case()
def cells_in_a_loop(run: Run) -> Numbers:
    """nn.LSTMCell and nn.GRUCell in a loop over time"""
    return layered(run, Cells, 3, WIDTH)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.gru(packed)[1].square().mean()


@case(refused={PP: WITH_STAGES})
def packed_sequences(run: Run) -> Numbers:
    """nn.utils.rnn.pack_padded_sequence"""
    return stepped(run, Packed(), torch.randn(BATCH, 4, WIDTH), torch.tensor([4, 2, 3, 1, 4, 4, 2, 1]))


class Embedded(nn.Module):
    """An embedding and a product."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(WIDTH, WIDTH)

    def forward(self, *words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(*words)).square().mean()


def words() -> torch.Tensor:
    return torch.randint(16, (BATCH, 4))


@case(refused={PP: WITH_STAGES})
def embedding_with_padding(run: Run) -> Numbers:
    """nn.Embedding(padding_idx=0, scale_grad_by_freq=True)"""
    return stepped(run, Embedded(nn.Embedding(16, WIDTH, padding_idx=0, scale_grad_by_freq=True)), words())


@case(refused={PP: "use one microbatch"})
def embedding_with_a_greatest_norm(run: Run) -> Numbers:
    """nn.Embedding(max_norm=1.0), whose forward writes to its weight"""
    return stepped(run, Embedded(nn.Embedding(16, WIDTH, max_norm=1.0)), words())


@case()
def embedding_with_sparse_gradient(run: Run) -> Numbers:
    """nn.Embedding(sparse=True) with SGD: the weights; the gradient is dense under autopar"""
    args = (words(),)
    model = run.compile(Embedded(nn.Embedding(16, WIDTH, sparse=True)), args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = run.step(model, *args)
    optimizer.step()
    return {"loss": loss} | run.parameters(model)


@case(refused="SparseAdam does not support dense gradients.*SGD or Adagrad|empty parameter list")
def sparse_adam(run: Run) -> Numbers:
    """torch.optim.SparseAdam of nn.Embedding(sparse=True)"""
    args = (words(),)
    model = run.compile(Embedded(nn.Embedding(16, WIDTH, sparse=True)), args=args)
    run.step(model, *args)
    torch.optim.SparseAdam([p for fqn, p in run.named(model) if "embedding" in fqn], lr=0.1).step()
    return run.parameters(model)


@case(refused={PP: WITH_STAGES})
def bags_of_words(run: Run) -> Numbers:
    """nn.EmbeddingBag: mean and largest of rows of the same length, weights of each word, padding"""
    found = {}
    for mode in ("mean", "sum", "max"):
        bag = nn.EmbeddingBag(16, WIDTH, mode=mode, padding_idx=0)
        found |= {f"{mode} {key}": x for key, x in stepped(run, Embedded(bag), words()).items()}
    bag = Embedded(nn.EmbeddingBag(16, WIDTH, mode="sum"))

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = bag

        def forward(self, words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.bag.embedding(words, per_sample_weights=weights).square().mean()

    return found | stepped(run, Weighted(), words(), torch.rand(BATCH, 4))


@case(refused={PP: WITH_STAGES}, peers=False)
def bags_of_other_lengths(run: Run) -> Numbers:
    """nn.EmbeddingBag with offsets: bags of unequal lengths in one row"""
    flat, offsets = torch.randint(16, (20,)), torch.tensor([0, 2, 7, 8, 11, 15, 18, 19])
    return stepped(run, Embedded(nn.EmbeddingBag(16, WIDTH, mode="mean")), flat, offsets)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return (x @ self.named["a"] + self.named["b"]).tanh()


@case()
def lists_of_parameters(run: Run) -> Numbers:
    """nn.ParameterList and nn.ParameterDict"""
    return layered(run, Listed, WIDTH)


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d dilated": (lambda: nn.Conv1d(4, 4, 3, padding=2, dilation=2), (4, 6)),
    "3d": (lambda: nn.Conv3d(4, 4, 3, padding=1), (4, 3, 3, 3)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, padding="same", groups=4), IMAGE),
    "circular": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), IMAGE),
    "reflected": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", bias=False), IMAGE),
    "transposed 1d": (lambda: nn.Sequential(nn.Conv1d(4, 8, 2, 2), nn.ConvTranspose1d(8, 4, 2, 2)), (4, 6)),
    "transposed 2d": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 3, 2, 1, output_padding=1)),
        IMAGE,
    ),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 4, 3, padding=1, groups=2), (4, 3, 3, 3)),
}


@case()
def convolutions_of_all_kinds(run: Run) -> Numbers:
    """nn.Conv1d, Conv3d, depthwise, circular and reflected padding, and ConvTranspose1d to 3d"""
    found = {}
    for name, (layer, shape) in CONVOLUTIONS.items():
        found |= {f"{name} {key}": x for key, x in layered(run, layer, *shape).items()}
    return found


NORMS: dict[str, Callable[[], nn.Module]] = {
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "local response": lambda: nn.LocalResponseNorm(3),
    "layer over three dims": lambda: nn.LayerNorm(IMAGE),
    "root mean square": lambda: nn.RMSNorm(4),
    "channel shuffle": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ChannelShuffle(2)),
}


@case()
def norms_of_all_kinds(run: Run) -> Numbers:
    """nn.GroupNorm, InstanceNorm2d, LocalResponseNorm, LayerNorm over three dims, RMSNorm, ChannelShuffle"""
    found = {}
    for name, norm in NORMS.items():
        layer = lambda norm=norm: nn.Sequential(nn.Conv2d(4, 4, 1), norm())  # noqa: E731
        found |= {f"{name} {key}": x for key, x in layered(run, layer, *IMAGE).items()}
    return found


@case(refused={PP: WITH_STAGES})
def batch_norm_of_images(run: Run) -> Numbers:
    """nn.BatchNorm2d of images, and in eval() afterwards"""
    x, y = torch.randn(BATCH, *IMAGE), torch.randn(BATCH, *IMAGE)
    model = run.compile(Layers(lambda: nn.BatchNorm2d(4)), args=(x, y))
    found = {"trained": run.step(model, x, y)}
    model.eval()
    return found | {"evaluated": run.step(model, x, y)} | run.gradients(model) | run.buffers(model)


@case(refused={PP: WITH_STAGES})
def batch_norm_with_cumulative_average(run: Run) -> Numbers:
    """nn.BatchNorm2d(momentum=None): the mean of all batches' statistics"""
    return layered(run, lambda: nn.BatchNorm2d(4, momentum=None), *IMAGE)


@case(refused="track_running_stats=False")
def instance_norm_with_statistics(run: Run) -> Numbers:
    """nn.InstanceNorm2d(track_running_stats=True)"""
    norm = lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, track_running_stats=True))  # noqa: E731
    return layered(run, norm, *IMAGE)


class Warped(nn.Module):
    """A spatial transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Linear(64, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = F.affine_grid(self.angles(x.flatten(1)).view(-1, 2, 3).tanh(), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


RESIZING: dict[str, Callable[[], nn.Module]] = {
    "nearest": lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.AvgPool2d(2)),
    "bilinear": lambda: nn.Sequential(nn.Upsample(7, mode="bilinear", align_corners=True), nn.AdaptiveAvgPool2d(4)),
    "bicubic": lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bicubic"), nn.MaxPool2d(3, 2, 1)),
    "shuffled": lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(16, 16, 1), nn.PixelShuffle(2)),
    "adaptive": lambda: nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Upsample(4)),
    "power mean": lambda: nn.Sequential(nn.ZeroPad2d(2), nn.LPPool2d(2, 2), nn.ReplicationPad2d(1), nn.AvgPool2d(3, 1)),
    "folded": lambda: nn.Sequential(nn.Unfold(2, stride=2), nn.Tanh(), nn.Fold(4, 2, stride=2)),
    "warped": Warped,
}


@case(refused={PP: WITH_STAGES})
def images_resized(run: Run) -> Numbers:
    """nn.Upsample of all modes, PixelShuffle, adaptive pools, paddings, fold and unfold, affine_grid and grid_sample"""
    found = {}
    for name, layer in RESIZING.items():
        both = lambda layer=layer: nn.Sequential(nn.Conv2d(4, 4, 1), layer())  # noqa: E731
        found |= {f"{name} {key}": x for key, x in layered(run, both, *IMAGE).items()}
    return found


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.back = nn.Conv2d(4, 4, 1), nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(*self.pool(self.conv(x)))


@case()
def pooled_and_put_back(run: Run) -> Numbers:
    """nn.MaxPool2d(return_indices=True) and nn.MaxUnpool2d"""
    return layered(run, Pooled, *IMAGE)


class Masked(nn.Module):
    """Attention with a mask of pairs and one of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out, weights = self.attention(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=True)
        alone, each = self.attention(x, x, x, average_attn_weights=False)
        return (out + alone).square().mean() + weights[:, -1, 0].square().mean() + each[:, 1, 0].mean()


@case(refused={PP: WITH_STAGES})
def attention_with_masks(run: Run) -> Numbers:
    """nn.MultiheadAttention with attn_mask and key_padding_mask, and its weights"""
    padding = torch.arange(4) >= torch.tensor([4, 2, 3, 1, 4, 4, 2, 1])[:, None]
    return stepped(run, Masked(), torch.randn(BATCH, 4, WIDTH), padding.float() * -1e4)


class Translating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.transformer = nn.Transformer(WIDTH, 2, 1, 2, **sizes)

    def forward(self, x: torch.Tensor, y: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        out = self.transformer(x, y, tgt_mask=mask, src_key_padding_mask=padding, tgt_is_causal=True)
        return (out - y).square().mean()


@case()
def transformer_with_padding(run: Run) -> Numbers:
    """nn.Transformer, encoder and decoder, with a causal mask and padding"""
    padding = torch.arange(4) >= torch.tensor([4, 2, 3, 1, 4, 4, 2, 1])[:, None]
    return stepped(run, Translating(), torch.randn(BATCH, 4, WIDTH), torch.randn(BATCH, 3, WIDTH), padding)


@case(refused={PP: WITH_STAGES})
def transformer_layers_in_eval_mode(run: Run) -> Numbers:
    """nn.TransformerEncoder in eval() and no_grad, where torch takes its fused path"""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    x = torch.randn(BATCH, 4, WIDTH)
    model = run.compile(nn.TransformerEncoder(layer, 2).eval(), args=(x,))
    with torch.no_grad():
        return {"out": run.whole(model(x))}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.cosine = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.CosineSimilarity(-1)
        self.distance = nn.PairwiseDistance(p=2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.bilinear(x, y)
        return (self.cosine(out, y) + self.distance(out, x)).mean() + torch.cdist(out, y).mean()


@case(refused={PP: WITH_STAGES})
def pairs(run: Run) -> Numbers:
    """nn.Bilinear, CosineSimilarity, PairwiseDistance and torch.cdist"""
    return stepped(run, Pair(), torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
