"""Operators of numbers, memories and parametrised weights, as people write them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.written.draws import ids, image, mlp, rows, some


class Fourier(nn.Module):
    """FNO: spectral weights in complex numbers written into slices of a zero spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip, self.out = nn.Linear(3, 8), nn.Conv2d(8, 8, 1), mlp(8, 16, 1)
        self.one, self.two = (nn.Parameter(0.1 * torch.randn(8, 8, 4, 4, 2)) for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        n, h, w, _ = x.shape
        y = self.lift(x).permute(0, 3, 1, 2)
        spectrum = torch.fft.rfft2(y)
        out = torch.zeros(n, 8, h, w // 2 + 1, dtype=spectrum.dtype, device=x.device)
        a, b = torch.view_as_complex(self.one), torch.view_as_complex(self.two)
        out[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :4, :4], a)
        out[:, :, -4:, :4] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -4:, :4], b)
        y = F.gelu(torch.fft.irfft2(out, s=(h, w)) + self.skip(y))
        error = self.out(y.permute(0, 2, 3, 1)).squeeze(-1) - target
        return (error.flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)).mean()


class DeepONet(nn.Module):
    """Products of a branch and a trunk net, boundary points weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk, self.bias = mlp(12, 32, 16), mlp(2, 32, 16), nn.Parameter(torch.zeros(1))

    def forward(self, f: Tensor, at: Tensor, target: Tensor) -> Tensor:
        y = torch.einsum("bk,pk->bp", self.branch(f), self.trunk(at)) + self.bias
        edge = (at[:, 0].abs() > 1).to(y.dtype)
        return ((y - target).square() * (1 + 4 * edge)).mean()


class KAN(nn.Module):
    """B-splines on every edge by the recursion of Cox and de Boor."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.spline = nn.Parameter(torch.randn(8, 6) / 3), nn.Parameter(torch.randn(8, 6, 7) / 3)
        self.register_buffer("grid", torch.linspace(-2.2, 2.2, 11).expand(6, -1).contiguous())

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        g, z = self.grid, x.unsqueeze(-1)
        b = ((z >= g[:, :-1]) & (z < g[:, 1:])).to(x.dtype)
        for k in range(1, 4):
            left = (z - g[:, : -(k + 1)]) / (g[:, k:-1] - g[:, : -(k + 1)]) * b[..., :-1]
            b = left + (g[:, k + 1 :] - z) / (g[:, k + 1 :] - g[:, 1:-k]) * b[..., 1:]
        y = F.linear(F.silu(x), self.base) + F.linear(b.flatten(1), self.spline.flatten(1))
        l1 = self.spline.abs().mean(-1)
        p = l1 / l1.sum()
        return F.cross_entropy(y, target) + 0.01 * (l1.sum() - (p * (p + 1e-9).log()).sum())


class Hyper(nn.Module):
    """A network that makes the weights of another one for each sample (bmm)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.biases = mlp(4, 16, 6 * 5), nn.Linear(4, 5)

    def forward(self, x: Tensor, task: Tensor, target: Tensor) -> Tensor:
        w = self.weights(task).view(-1, 5, 6)
        y = torch.baddbmm(self.biases(task).unsqueeze(1), x, w.transpose(1, 2))
        return F.mse_loss(torch.sin(y), target)


class Turing(nn.Module):
    """A neural Turing machine: content addressing, interpolation, a circular shift, sharpening."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.out = (
            nn.GRUCell(8 + 6, 16),
            nn.Linear(16, 6 + 1 + 1 + 3 + 1 + 6 + 6),
            nn.Linear(22, 8),
        )
        self.memory = nn.Parameter(torch.randn(10, 6))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        n = len(x)
        memory, h, read = self.memory.expand(n, -1, -1), x.new_zeros(n, 16), x.new_zeros(n, 6)
        w, out = x.new_full((n, 10), 0.1), []
        for t in range(x.shape[1]):
            h = self.cell(torch.cat([x[:, t], read], 1), h)
            key, beta, gate, shift, gamma, erase, add = self.head(h).split([6, 1, 1, 3, 1, 6, 6], 1)
            near = (F.softplus(beta) * F.cosine_similarity(memory, key.unsqueeze(1), dim=-1)).softmax(-1)
            w = gate.sigmoid() * near + (1 - gate.sigmoid()) * w
            s = shift.softmax(-1)
            w = s[:, :1] * torch.roll(w, 1, 1) + s[:, 1:2] * w + s[:, 2:] * torch.roll(w, -1, 1)
            w = (w + 1e-8) ** (1 + F.softplus(gamma))
            w = w / w.sum(-1, keepdim=True)
            memory = memory * (1 - w.unsqueeze(2) * erase.sigmoid().unsqueeze(1)) + w.unsqueeze(2) * add.unsqueeze(1)
            read = torch.einsum("bn,bnd->bd", w, memory)
            out.append(self.out(torch.cat([h, read], 1)))
        return F.binary_cross_entropy_with_logits(torch.stack(out, 1), target)


class Slots(nn.Module):
    """Slot attention: softmax over slots, weighted means over inputs, a GRU cell, broadcast decoding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mu = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 3, 16))
        self.q, self.k, self.v, self.cell = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.GRUCell(16, 16)
        self.decoder = mlp(18, 32, 49)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        tokens = self.embed(x).flatten(2).mT
        k, v, slots = self.k(tokens), self.v(tokens), self.mu.expand(n, -1, -1)
        for _ in range(3):
            a = (self.q(F.layer_norm(slots, (16,))) @ k.mT / 4).softmax(1) + 1e-8
            update = (a / a.sum(-1, keepdim=True)) @ v
            slots = self.cell(update.reshape(-1, 16), slots.reshape(-1, 16)).reshape(n, -1, 16)
        grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4), indexing="ij"), -1)
        spread = torch.cat(
            [slots[:, :, None].expand(-1, -1, 16, -1), grid.to(x).view(1, 1, 16, 2).expand(n, 3, -1, -1)], -1
        )
        colours, alpha = self.decoder(spread).split([48, 1], -1)
        whole = (colours * alpha.softmax(1)).sum(1)
        patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(n, 16, 48)
        return F.mse_loss(whole, patches)


class Sinkhorn(nn.Module):
    """Optimal transport between two sets in log space, with unequal masses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 16, 8)

    def forward(self, x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
        cost = torch.cdist(self.net(x), self.net(y)) ** 2
        log_a, log_b = mass.log_softmax(-1), y.new_full(y.shape[:2], -math.log(y.shape[1]))
        f, g = torch.zeros_like(log_a), torch.zeros_like(log_b)
        for _ in range(5):
            f = -torch.logsumexp(g.unsqueeze(1) + log_b.unsqueeze(1) - cost, 2)
            g = -torch.logsumexp(f.unsqueeze(2) + log_a.unsqueeze(2) - cost, 1)
        plan = (f.unsqueeze(2) + g.unsqueeze(1) - cost + log_a.unsqueeze(2) + log_b.unsqueeze(1)).exp()
        return (plan * cost).sum((1, 2)).mean()


class LongConvolution(nn.Module):
    """S4D: a kernel from complex poles, applied by FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.log_dt, self.c = nn.Parameter(torch.randn(8) - 2), nn.Parameter(torch.randn(8, 4, 2))
        self.log_re, self.im = nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.arange(4.0).repeat(8, 1))
        self.d, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, 4)

    def forward(self, u: Tensor, target: Tensor) -> Tensor:
        length = u.shape[-1]
        a = torch.complex(-self.log_re.exp(), self.im) * self.log_dt.exp().unsqueeze(-1)
        k = torch.arange(length, device=u.device)
        c = torch.view_as_complex(self.c) * (torch.exp(a) - 1) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(a.unsqueeze(-1) * k)).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)
        y = F.gelu(y[..., :length] + u * self.d.unsqueeze(-1))
        return F.cross_entropy(self.head(y.mean(-1)), target)


class Performer(nn.Module):
    """FAVOR+: positive random features kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 4)
        self.register_buffer("omega", torch.randn(8, 12))

    def features(self, x: Tensor) -> Tensor:
        y = x @ self.omega - x.square().sum(-1, keepdim=True) / 2
        return (y - y.amax((-1, -2), keepdim=True).detach()).exp() + 1e-6

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = self.features(q / 8**0.25), self.features(k / 8**0.25)
        y = (q @ (k.mT @ v)) / (q @ k.sum(2).unsqueeze(-1))
        return F.soft_margin_loss(self.out(y.transpose(1, 2).flatten(2)).mean(1), target)


class Lora(nn.Module):
    """A frozen base, low-rank updates merged in two ways, DoRA's magnitude."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(16, 32).requires_grad_(False), nn.Linear(32, 4)
        self.a, self.b, self.size = (
            nn.Parameter(torch.randn(2, 16)),
            nn.Parameter(torch.zeros(32, 2)),
            nn.Parameter(torch.ones(32, 1)),
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weight = self.base.weight + 2.0 * (self.b @ self.a)
        weight = self.size * weight / weight.norm(p=2, dim=1, keepdim=True).detach()
        y = F.linear(x, weight, self.base.bias) + (x @ self.a.T) @ self.b.T
        return F.cross_entropy(self.head(y.relu()), target)


class Spectral(nn.Module):
    """A GAN's critic with spectral_norm, hinge losses of real and fake in one batch, minibatch deviation."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.body = nn.Sequential(norm(nn.Conv2d(3, 8, 4, 4)), nn.LeakyReLU(0.2), norm(nn.Conv2d(8, 16, 2, 2)))
        self.head = norm(nn.Linear(17 * 4, 1))

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        y = self.body(torch.cat([real, fake]))
        spread = y.std(0, unbiased=False).mean().expand(len(y), 1, 2, 2)
        a, b = self.head(torch.cat([y, spread], 1).flatten(1)).chunk(2)
        return F.relu(1 - a).mean() + F.relu(1 + b).mean()


class Equilibrium(nn.Module):
    """A fixed point found without a gradient, then one step with it."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u, self.head = nn.Linear(16, 16), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros(len(x), 16, dtype=x.dtype, device=x.device)
            for _ in range(6):
                z = torch.tanh(0.5 * self.w(z) + self.u(x))
        return F.multilabel_soft_margin_loss(self.head(torch.tanh(0.5 * self.w(z) + self.u(x))), target)


class Siren(nn.Module):
    """Sines, and gradients of a target field given as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList([nn.Linear(2, 16), nn.Linear(16, 16)]), nn.Linear(16, 1)

    def forward(self, at: Tensor, target: Tensor) -> Tensor:
        y = at
        for layer in self.layers:
            y = torch.sin(30 * layer(y))
        return torch.logaddexp(self.out(y) - target, target - self.out(y)).mean()


class Perceiver(nn.Module):
    """Latents that read bytes by cross attention, decoded by queries of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.latents = nn.Embedding(64, 16), nn.Parameter(torch.randn(4, 16))
        self.read, self.think = (
            nn.MultiheadAttention(16, 2, batch_first=True),
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True),
        )
        self.position, self.write = nn.Parameter(torch.randn(12, 16)), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.bytes(tokens.masked_fill(mask, 0)) + self.position
        z = self.read(self.latents.expand(len(x), -1, -1), x, x)[0]
        z = self.think(self.think(z))
        y = self.write(self.position.expand(len(x), -1, -1), z, z)[0] @ self.bytes.weight.T
        loss = F.cross_entropy(y.permute(0, 2, 1), tokens, reduction="none")
        return (loss * mask).sum() / mask.sum().clamp(min=1)


class Hopfield(nn.Module):
    """Stored patterns, retrieved by iterated softmax; a Hopfield energy by logsumexp."""

    def __init__(self) -> None:
        super().__init__()
        self.stored, self.beta = nn.Parameter(torch.randn(10, 8)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(2):
            y = (self.beta * y @ self.stored.T).softmax(-1) @ self.stored
        energy = -torch.logsumexp(self.beta * x @ self.stored.T, -1) / self.beta + 0.5 * x.pow(2).sum(-1)
        return energy.mean() + F.cosine_embedding_loss(y, x, torch.ones(len(x), device=x.device))


MODELS = {
    "fno": lambda: (Fourier(), {"x": rows(12, 12, 3), "target": rows(12, 12)}),
    "deeponet": lambda: (DeepONet(), {"f": rows(12), "at": torch.randn(10, 2), "target": rows(10)}),
    "kan": lambda: (KAN(), {"x": rows(6), "target": ids(of=8)}),
    "hypernetwork": lambda: (Hyper(), {"x": rows(4, 6), "task": rows(4), "target": rows(4, 5)}),
    "turing-machine": lambda: (Turing(), {"x": rows(5, 8), "target": some(5, 8).double()}),
    "slots": lambda: (Slots(), {"x": image()}),
    "sinkhorn": lambda: (Sinkhorn(), {"x": rows(5, 4), "y": rows(7, 4), "mass": rows(5)}),
    "s4d": lambda: (LongConvolution(), {"u": rows(8, 16), "target": ids(of=4)}),
    "performer": lambda: (Performer(), {"x": rows(6, 16), "target": rows(4).sign()}),
    "dora": lambda: (Lora(), {"x": rows(16), "target": ids(of=4)}),
    "spectral-gan": lambda: (Spectral(), {"real": image(), "fake": image()}),
    "equilibrium": lambda: (Equilibrium(), {"x": rows(8), "target": some(4).double()}),
    "siren": lambda: (Siren(), {"at": rows(2), "target": rows(1)}),
    "perceiver": lambda: (Perceiver(), {"tokens": ids(12, of=64), "mask": some(12)}),
    "hopfield": lambda: (Hopfield(), {"x": rows(8)}),
}
