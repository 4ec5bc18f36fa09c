"""Layers and idioms of torch that people use, each in a small model."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.written.draws import BATCH, ids, image, mlp, rows, some


class Volumes(nn.Module):
    """Convolutions of three dims, instance norm, trilinear interpolation, Tversky's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv3d(1, 8, 3, 2, 1), nn.ConvTranspose3d(8, 8, 2, 2)
        self.norm, self.head = nn.InstanceNorm3d(8, affine=True), nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.elu(self.norm(self.down(x)))
        h = self.up(h) + F.interpolate(h, scale_factor=2, mode="trilinear", align_corners=False)
        p = self.head(h).softmax(1)[:, 1]
        hit = (p * y).sum((1, 2, 3))
        missed, false = ((1 - p) * y).sum((1, 2, 3)), (p * (1 - y)).sum((1, 2, 3))
        return 1 - ((hit + 1) / (hit + 0.7 * missed + 0.3 * false + 1)).mean()


class Recurrent(nn.Module):
    """An LSTM with projections, an Elman RNN, a Bilinear layer over their last states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, proj_size=6, batch_first=True)
        self.rnn, self.both = nn.RNN(8, 6, nonlinearity="relu", batch_first=True), nn.Bilinear(6, 6, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        _, (h, _) = self.lstm(x)
        return F.multilabel_margin_loss(self.both(h[-1], self.rnn(x)[0].mean(1)), target)


class Padded(nn.Module):
    """pack_padded_sequence of given lengths, the mean of real steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(32, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, tokens: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return F.cross_entropy(self.head(out.sum(1) / lengths.unsqueeze(1)), target)


class Mapped(nn.Module):
    """The gradient of each sample by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 16, 1)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(torch.func.vmap(torch.func.grad(lambda one: self.net(one).sum()))(x), wanted)


class Hamiltonian(nn.Module):
    """The field of a learnt energy by torch.autograd.grad inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(4, 16, 1)

    def forward(self, x: Tensor, change: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        q, p = slope.chunk(2, 1)
        return F.mse_loss(torch.cat([p, -q], 1), change)


@dataclass
class Answer:
    loss: Tensor
    logits: Tensor


class Checkpointed(nn.Module):
    """Blocks recomputed by torch.utils.checkpoint, a dataclass returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([mlp(16, 32, 16) for _ in range(3)]), nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Answer:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        logits = self.head(x)
        return Answer(F.cross_entropy(logits, target), logits)


class Parts(NamedTuple):
    mean: Tensor
    spread: Tensor


class Encoded(nn.Module):
    """Cholesky factors written by tril_indices, a named tuple returned."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 16, 3 + 6)

    def forward(self, x: Tensor) -> Parts:
        mean, flat = self.net(x).split([3, 6], 1)
        low = x.new_zeros(len(x), 3, 3)
        i, j = torch.tril_indices(3, 3)
        low[:, i, j] = flat
        low = low - torch.diag_embed(low.diagonal(dim1=1, dim2=2)) + torch.diag_embed(F.softplus(low.diagonal(0, 1, 2)))
        return Parts(mean, low @ low.mT)


class Kernels(nn.Module):
    """unfold and fold, a kernel for each place, edges padded by reflection."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(3, 9, 3, padding=1, padding_mode="reflect")

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        n, c, h, w = x.shape
        patches = F.unfold(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3).view(n, c, 9, h, w)
        y = (patches * self.kernel(x).softmax(1).unsqueeze(1)).sum(2)
        spread = F.fold(F.unfold(y, 2, stride=2), (h, w), 2, stride=2)
        return F.l1_loss(spread, target) + (y - F.avg_pool2d(y, 3, 1, 1)).abs().mean()


class Shared(nn.Module):
    """Grouped queries, QK norm, a tied head, z-loss and logits capped by tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.kv, self.out = (
            nn.Embedding(32, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
        )
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, doc: Tensor) -> Tensor:
        x = self.embed(tokens)
        n, time, _ = x.shape
        q = self.q_norm(self.q(x).view(n, time, 4, 8)).transpose(1, 2)
        k, v = self.kv(x).view(n, time, 2, 2, 8).unbind(2)
        same = (doc[:, :, None] == doc[:, None]) & torch.ones(time, time, dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(
            q, self.k_norm(k).transpose(1, 2), v.transpose(1, 2), attn_mask=same.unsqueeze(1), enable_gqa=True
        )
        logits = 30 * torch.tanh(self.head(self.out(y.transpose(1, 2).reshape(n, time, 32)) + x) / 30)
        z = logits[:, :-1].logsumexp(-1)
        return F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:]) + 1e-3 * z.square().mean()


class Straight(torch.autograd.Function):
    """The sign, with the gradient of a clamp."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class Binary(nn.Module):
    """Binary weights by an autograd.Function, quantised activations straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = F.linear(x, Straight.apply(self.first.weight), self.first.bias)
        scale = h.detach().abs().max() / 7
        h = h + ((h / scale).round().clamp(-8, 7) * scale - h).detach()
        return F.multi_margin_loss(self.second(h), target)


class Spectra(nn.Module):
    """STFT magnitudes at two resolutions, a mel matrix as a buffer, logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv1d(1, 1, 9, padding=4)
        self.register_buffer("mel", torch.rand(6, 17))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.net(x.unsqueeze(1)).squeeze(1)
        loss = F.l1_loss(x, y)
        for size in (16, 32):
            window = torch.hann_window(size, dtype=x.dtype, device=x.device)
            a, b = (
                torch.stft(z, size, size // 4, window=window, return_complex=True).abs().clamp(min=1e-5) for z in (x, y)
            )
            loss = loss + (a - b).norm() / b.norm() + F.l1_loss(a.log(), b.log())
            if size == 32:
                loss = loss + F.mse_loss((self.mel @ a).log1p(), (self.mel @ b).log1p())
        return loss


class Spread(nn.Module):
    """VICReg and Kozachenko's entropy: covariances and nearest neighbours over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 16, 6)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x, y = self.net(a), self.net(b)
        loss = 25 * F.mse_loss(x, y)
        for z in (x, y):
            z = z - z.mean(0)
            loss = loss + F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
            cov = z.T @ z / (len(z) - 1)
            loss = loss + (cov.square().sum() - cov.diagonal().square().sum()) / z.shape[1]
        u = F.normalize(x, dim=-1)
        near = (u @ u.T).fill_diagonal_(-1).argmax(1)
        return loss - (F.pairwise_distance(u, u[near]) + 1e-4).log().mean()


class Waves(nn.Module):
    """Singular values, an eigendecomposition and a matrix exponential of learnt matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.linalg.matrix_exp(self.a - self.a.T)
        values, vectors = torch.linalg.eigh(self.a @ self.a.T)
        y = x @ turn @ vectors.abs() * values
        return y.square().mean() + torch.linalg.svdvals(self.b).sum() + torch.linalg.matrix_norm(self.b, "nuc")


class Weighted(nn.Module):
    """Bags with a weight of each entry, means of scattered rows, counts by bincount."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(32, 8, mode="sum", padding_idx=0), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, weight: Tensor, group: Tensor, target: Tensor) -> Tensor:
        h = self.bag(tokens, per_sample_weights=weight)
        mean = torch.zeros(4, 8, dtype=h.dtype).scatter_reduce(0, group[:, None].expand_as(h), h, "mean")
        often = torch.bincount(target, minlength=3).clamp(min=1).to(h.dtype)
        return F.cross_entropy(self.head(h + mean[group]), target, weight=len(target) / often)


class Losing(nn.Module):
    """OHEM: the mean of the largest losses, chosen by a threshold; and those of a given number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), target, reduction="none")
        hard = loss[loss > loss.detach().mean()]
        return hard.mean() + loss.topk(3)[0].mean()


def lengths(longest: int) -> Tensor:
    """Numbers of steps, of which the first is the largest there is."""
    return torch.cat([torch.tensor([longest]), ids(of=longest)[1:] + 1])


MODELS = {
    "volumes": lambda: (Volumes(), {"x": rows(1, 8, 8, 8), "y": some(8, 8, 8).double()}),
    "recurrent-layers": lambda: (Recurrent(), {"x": rows(5, 8), "target": ids(4, of=4)}),
    "packed": lambda: (
        Padded(),
        {"tokens": ids(6), "lengths": ids(of=6).index_fill(0, torch.tensor(0), 5) + 1, "target": ids(of=4)},
    ),
    "mapped": lambda: (Mapped(), {"x": rows(4), "wanted": rows(4)}),
    "hamiltonian": lambda: (Hamiltonian(), {"x": rows(4), "change": rows(4)}),
    "checkpointed": lambda: (Checkpointed(), {"x": rows(16), "target": ids(of=4)}),
    "cholesky-factors": lambda: (Encoded(), {"x": rows(8)}),
    "kernels": lambda: (Kernels(), {"x": image(8), "target": image(8)}),
    "grouped-queries": lambda: (Shared(), {"tokens": ids(8), "doc": ids(8, of=2).sort(1)[0]}),
    "binary": lambda: (Binary(), {"x": rows(16), "target": ids(of=4)}),
    "spectra": lambda: (Spectra(), {"x": rows(64), "y": rows(64)}),
    "vicreg": lambda: (Spread(), {"a": rows(8), "b": rows(8)}),
    "decompositions": lambda: (Waves(), {"x": rows(4)}),
    "weighted-bags": lambda: (
        Weighted(),
        {"tokens": ids(5), "weight": rows(5), "group": ids(of=4), "target": torch.arange(BATCH) % 3},
    ),
    "hard-examples": lambda: (Losing(), {"x": rows(8), "target": ids(of=4)}),
}
