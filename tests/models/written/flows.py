"""Flows, differential equations and other generative models, as people write them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.written.draws import ids, image, mlp, rows


class RealNVP(nn.Module):
    """Affine couplings with alternating masks; the likelihood under a standard normal of torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([mlp(6, 16, 12) for _ in range(3)])
        self.register_buffer("masks", torch.tensor([[1.0, 0] * 3, [0, 1.0] * 3, [1.0, 0] * 3]))

    def forward(self, x: Tensor) -> Tensor:
        log_det = x.new_zeros(len(x))
        for mask, net in zip(self.masks, self.nets):
            s, t = net(x * mask).chunk(2, 1)
            s = s.tanh() * (1 - mask)
            x, log_det = x * mask + (1 - mask) * (x * s.exp() + t), log_det + s.sum(1)
        normal = torch.distributions.Normal(torch.zeros_like(x[0]), torch.ones_like(x[0]))
        return -(normal.log_prob(x).sum(1) + log_det).mean()


class Glow(nn.Module):
    """Act norm, an invertible 1x1 convolution with slogdet, a squeeze of pixels into channels."""

    def __init__(self) -> None:
        super().__init__()
        self.log_s, self.b = nn.Parameter(torch.zeros(1, 12, 1, 1)), nn.Parameter(torch.zeros(1, 12, 1, 1))
        self.mix, self.net = nn.Parameter(torch.linalg.qr(torch.randn(12, 12))[0]), nn.Conv2d(6, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x, 2)
        _, c, h, w = x.shape
        x = (x + self.b) * self.log_s.exp()
        x = F.conv2d(x, self.mix.view(c, c, 1, 1))
        log_det = h * w * (self.log_s.sum() + torch.slogdet(self.mix)[1])
        a, b = x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        s = (s + 2).sigmoid()
        z = torch.cat([a, (b + t) * s], 1)
        bits = 0.5 * (z.square() + math.log(2 * math.pi)).flatten(1).sum(1) - log_det - s.log().flatten(1).sum(1)
        return bits.mean() / (c * h * w * math.log(2))


class MaskedFlow(nn.Module):
    """MAF: linear layers whose weights are masked, a permutation of dims between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.ModuleList([nn.Linear(6, 24) for _ in range(2)]),
            nn.ModuleList([nn.Linear(24, 12) for _ in range(2)]),
        )
        degree, hidden = torch.arange(6), torch.arange(24) % 5
        self.register_buffer("into", (hidden[:, None] >= degree).float())
        self.register_buffer("out", (degree.repeat(2)[:, None] > hidden).float())

    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for first, second in zip(self.first, self.second):
            h = F.linear(x, first.weight * self.into, first.bias).relu()
            shift, log_s = F.linear(h, second.weight * self.out, second.bias).chunk(2, 1)
            x, total = ((x - shift) * (-log_s).exp()).flip(1), total - log_s.sum(1)
        return (0.5 * x.square().sum(1) - total).mean()


class SplineFlow(nn.Module):
    """A rational quadratic spline: bins found by searchsorted, gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 16, 3 * 13)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.sigmoid().chunk(2, 1)
        w, h, d = self.net(a).view(-1, 3, 13).split([4, 4, 5], -1)
        w, h, d = w.softmax(-1) * 0.9 + 0.025, h.softmax(-1) * 0.9 + 0.025, F.softplus(d) + 1e-3
        left, low = F.pad(w.cumsum(-1), (1, 0)), F.pad(h.cumsum(-1), (1, 0))
        at = torch.searchsorted(left[..., 1:-1].contiguous(), b.unsqueeze(-1).contiguous())
        x0, y0, width, height, d0, d1 = (
            v.gather(-1, i).squeeze(-1) for v, i in ((left, at), (low, at), (w, at), (h, at), (d, at), (d, at + 1))
        )
        s, t = height / width, ((b - x0) / width).clamp(0, 1)
        q = s + (d0 + d1 - 2 * s) * t * (1 - t)
        y = y0 + height * (s * t**2 + d0 * t * (1 - t)) / q
        log_det = (s**2 * (d1 * t**2 + 2 * s * t * (1 - t) + d0 * (1 - t) ** 2) / q**2).log()
        return ((y - 0.5) ** 2).mean() - log_det.sum(1).mean()


class ODE(nn.Module):
    """Runge-Kutta steps of a neural differential equation, augmented with its kinetic energy."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.head = mlp(9, 32, 8), nn.Linear(8, 4)
        self.register_buffer("times", torch.linspace(0, 1, 6))

    def rate(self, t: Tensor, y: Tensor) -> Tensor:
        return self.f(torch.cat([y, t.expand(len(y), 1)], 1))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        energy = 0
        for t0, t1 in zip(self.times[:-1], self.times[1:]):
            h = t1 - t0
            k1 = self.rate(t0, y)
            k2 = self.rate(t0 + h / 2, y + h / 2 * k1)
            k3 = self.rate(t0 + h / 2, y + h / 2 * k2)
            k4 = self.rate(t1, y + h * k3)
            y, energy = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), energy + h * k1.square().mean()
        return F.cross_entropy(self.head(y), target) + 0.01 * energy


class MixtureDensity(nn.Module):
    """A mixture of Gaussians through torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pi, self.mu, self.sigma = mlp(8, 16, 16), nn.Linear(16, 3), nn.Linear(16, 6), nn.Linear(16, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, d = self.body(x).tanh(), torch.distributions
        parts = d.Independent(d.Normal(self.mu(h).view(-1, 3, 2), F.softplus(self.sigma(h)).view(-1, 3, 2) + 1e-3), 1)
        return -d.MixtureSameFamily(d.Categorical(logits=self.pi(h)), parts).log_prob(y).mean()


class VQVAE(nn.Module):
    """The nearest code, straight through, with averages of codes as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 8, 4, 4), nn.ConvTranspose2d(8, 3, 4, 4)
        codes = torch.randn(16, 8)
        self.register_buffer("codes", codes)
        self.register_buffer("count", torch.ones(16))
        self.register_buffer("total", codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 8)
        apart = flat.square().sum(1, keepdim=True) - 2 * flat @ self.codes.T + self.codes.square().sum(1)
        index = apart.argmin(1)
        q = F.embedding(index, self.codes).view_as(z)
        if self.training:
            hot = F.one_hot(index, 16).to(flat.dtype)
            self.count.mul_(0.99).add_(hot.sum(0), alpha=0.01)
            self.total.mul_(0.99).add_(hot.T @ flat.detach(), alpha=0.01)
            self.codes.copy_(self.total / (self.count + 1e-5).unsqueeze(1))
        commit = F.mse_loss(z, q.detach())
        q = z + (q - z).detach()
        return F.mse_loss(self.decoder(q.permute(0, 3, 1, 2)), x) + 0.25 * commit


class VAE(nn.Module):
    """Given noise, a KL summed over latents and a likelihood of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(48, 32, 16), mlp(8, 32, 48)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flatten(1).sigmoid()
        mu, log_var = self.encoder(x).chunk(2, dim=-1)
        y = self.decoder(mu + noise * torch.exp(0.5 * log_var))
        pixels = F.binary_cross_entropy_with_logits(y, x, reduction="sum") / len(x)
        kl = -0.5 * torch.sum(1 + log_var - mu.pow(2) - log_var.exp()) / x.size(0)
        return pixels, kl


class Diffusion(nn.Module):
    """DDPM: coefficients gathered by time steps, sinusoidal embeddings, min-SNR weights."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.into, self.out = mlp(16, 32, 16), nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        alpha = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0)
        self.register_buffer("alpha", alpha)

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        a = self.alpha.gather(0, t).view(-1, 1, 1, 1)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        angle = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(8, device=t.device) / 8)
        code = self.time(torch.cat([angle.sin(), angle.cos()], -1).to(x.dtype))
        h = F.silu(F.group_norm(self.into(noisy), 4) + code[:, :, None, None])
        snr = (a / (1 - a)).flatten()
        weight = torch.minimum(snr, torch.full_like(snr, 5.0)) / snr
        return (F.mse_loss(self.out(h), noise, reduction="none").mean((1, 2, 3)) * weight).mean()


class OneStep(nn.Module):
    """Denoising at one time for the whole batch, drawn anew for each: tables are read at a tensor without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.linspace(0.99, 0.1, 10))
        self.times, self.net = nn.Embedding(10, 8), mlp(8, 16, 8)

    def forward(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        kept = self.kept[time]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.net(noisy + self.times.weight[time] + self.times(time)), noise)


class GaussianProcess(nn.Module):
    """Deep kernel learning: Cholesky of a kernel over the batch, the marginal likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_noise, self.log_scale = (
            mlp(6, 16, 3),
            nn.Parameter(torch.tensor(-1.0)),
            nn.Parameter(torch.zeros(())),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        k = (-0.5 * torch.cdist(z, z).square() * self.log_scale.exp()).exp()
        k = k + (self.log_noise.exp() + 1e-4) * torch.eye(len(x), dtype=x.dtype, device=x.device)
        low = torch.linalg.cholesky(k)
        a = torch.cholesky_solve(y.unsqueeze(1), low).squeeze(1)
        return 0.5 * y @ a + low.diagonal().log().sum()


class Kalman(nn.Module):
    """A filter whose dynamics are learnt: batched products, solves and determinants in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Parameter(torch.eye(3) * 0.9), nn.Parameter(torch.randn(2, 3))
        self.log_q, self.log_r, self.drive = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2)), nn.Linear(4, 3)

    def forward(self, y: Tensor, u: Tensor) -> Tensor:
        n = len(y)
        m, p = y.new_zeros(n, 3), torch.eye(3, dtype=y.dtype, device=y.device).expand(n, 3, 3)
        q, r, loss = torch.diag(self.log_q.exp()), torch.diag(self.log_r.exp()), 0
        for t in range(y.shape[1]):
            m, p = m @ self.a.T + self.drive(u[:, t]), self.a @ p @ self.a.T + q
            s, e = self.c @ p @ self.c.T + r, y[:, t] - m @ self.c.T
            gain = torch.linalg.solve(s, self.c @ p).mT
            loss = loss + 0.5 * (torch.logdet(s) + (e * torch.linalg.solve(s, e)).sum(-1)).mean()
            m, p = m + (gain @ e.unsqueeze(-1)).squeeze(-1), p - gain @ self.c @ p
        return loss


MODELS = {
    "one-step": lambda: (OneStep(), {"x": rows(8), "noise": rows(8), "time": torch.randint(0, 10, ())}),
    "realnvp": lambda: (RealNVP(), {"x": rows(6)}),
    "glow": lambda: (Glow(), {"x": image(8)}),
    "maf": lambda: (MaskedFlow(), {"x": rows(6)}),
    "spline-flow": lambda: (SplineFlow(), {"x": rows(6)}),
    "neural-ode": lambda: (ODE(), {"y": rows(8), "target": ids(of=4)}),
    "mixture-density": lambda: (MixtureDensity(), {"x": rows(8), "y": rows(2)}),
    "vq-vae": lambda: (VQVAE(), {"x": image()}),
    "vae": lambda: (VAE(), {"x": image(4), "noise": rows(8)}),
    "ddpm": lambda: (Diffusion(), {"x": image(8), "t": ids(of=50), "noise": image(8)}),
    "gaussian-process": lambda: (GaussianProcess(), {"x": rows(6), "y": rows()}),
    "kalman": lambda: (Kalman(), {"y": rows(5, 2), "u": rows(5, 4)}),
}
