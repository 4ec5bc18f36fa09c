"""Flows, differential equations, operators and other models of numbers, as people write them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.written.draws import ids, image, mlp, rows, some


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
        n, c, h, w = x.shape
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
        self.first, self.second = nn.ModuleList([nn.Linear(6, 24) for _ in range(2)]), nn.ModuleList([nn.Linear(24, 12) for _ in range(2)])
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


class GaussianProcess(nn.Module):
    """Deep kernel learning: Cholesky of a kernel over the batch, the marginal likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_noise, self.log_scale = mlp(6, 16, 3), nn.Parameter(torch.tensor(-1.0)), nn.Parameter(torch.zeros(()))

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


class Turing(nn.Module):
    """A neural Turing machine: content addressing, interpolation, a circular shift, sharpening."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.out = nn.GRUCell(8 + 6, 16), nn.Linear(16, 6 + 1 + 1 + 3 + 1 + 6 + 6), nn.Linear(22, 8)
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
        spread = torch.cat([slots[:, :, None].expand(-1, -1, 16, -1), grid.to(x).view(1, 1, 16, 2).expand(n, 3, -1, -1)], -1)
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
        self.a, self.b, self.size = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.zeros(32, 2)), nn.Parameter(torch.ones(32, 1))

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
        self.read, self.think = nn.MultiheadAttention(16, 2, batch_first=True), nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
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
    "realnvp": lambda: (RealNVP(), {"x": rows(6)}),
    "glow": lambda: (Glow(), {"x": image(8)}),
    "maf": lambda: (MaskedFlow(), {"x": rows(6)}),
    "spline-flow": lambda: (SplineFlow(), {"x": rows(6)}),
    "neural-ode": lambda: (ODE(), {"y": rows(8), "target": ids(of=4)}),
    "fno": lambda: (Fourier(), {"x": rows(12, 12, 3), "target": rows(12, 12)}),
    "deeponet": lambda: (DeepONet(), {"f": rows(12), "at": torch.randn(10, 2), "target": rows(10)}),
    "kan": lambda: (KAN(), {"x": rows(6), "target": ids(of=8)}),
    "hypernetwork": lambda: (Hyper(), {"x": rows(4, 6), "task": rows(4), "target": rows(4, 5)}),
    "mixture-density": lambda: (MixtureDensity(), {"x": rows(8), "y": rows(2)}),
    "vq-vae": lambda: (VQVAE(), {"x": image()}),
    "vae": lambda: (VAE(), {"x": image(4), "noise": rows(8)}),
    "ddpm": lambda: (Diffusion(), {"x": image(8), "t": ids(of=50), "noise": image(8)}),
    "gaussian-process": lambda: (GaussianProcess(), {"x": rows(6), "y": rows()}),
    "kalman": lambda: (Kalman(), {"y": rows(5, 2), "u": rows(5, 4)}),
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
