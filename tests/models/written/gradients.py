"""Models that take gradients in their forward."""

import torch
import torch.nn.functional as F
from torch import Tensor, autograd, nn

from tests.models.written.draws import BATCH, ids, image, mlp, rows


class Forces(nn.Module):
    """Energies, and forces as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net, self.out = (nn.Embedding(10, 8), mlp(8 + 8 + 1, 16, 8), mlp(8, 8, 1))

    def forward(self, z: Tensor, place: Tensor, energy: Tensor, force: Tensor) -> Tensor:
        with torch.enable_grad():
            place = place.detach().requires_grad_(True)
            h = self.embed(z)
            d = (place.unsqueeze(2) - place.unsqueeze(1)).pow(2).sum(-1, keepdim=True).add(1e-06).sqrt()
            n = z.shape[1]
            m = self.net(
                torch.cat([h.unsqueeze(2).expand(-1, -1, n, -1), h.unsqueeze(1).expand(-1, n, -1, -1), d], -1)
            ).sum(2)
            e = self.out(h + m).sum((1, 2))
            f = -torch.autograd.grad(e.sum(), place, create_graph=True)[0]
        return F.mse_loss(e, energy) + F.mse_loss(f, force)


class Curl(nn.Module):
    """Energies of graphs, forces, and stress by a displacement that is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.radial, self.out = (
            nn.Embedding(10, 8),
            mlp(5, 8, 8),
            nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1)),
        )
        self.register_buffer("centres", torch.linspace(0, 3, 5))

    def forward(self, z: Tensor, pos: Tensor, edge: Tensor, batch: Tensor, energy: Tensor, force: Tensor) -> Tensor:
        pos.requires_grad_(True)
        displacement = torch.zeros(3, 3, dtype=pos.dtype, requires_grad=True)
        p = pos + pos @ (0.5 * (displacement + displacement.T))
        i, j = edge
        r = p[i] - p[j]
        d = r.norm(dim=-1, keepdim=True) + 0.001
        f = self.radial(torch.exp(-((d - self.centres) ** 2)))
        m = torch.zeros(len(z), 8, dtype=pos.dtype).index_add(0, i, f * self.embed(z)[j])
        e = torch.zeros(2, dtype=pos.dtype).scatter_add(0, batch, self.out(self.embed(z) + m).squeeze(-1))
        f, st = torch.autograd.grad(
            [e], [pos, displacement], [torch.ones_like(e)], create_graph=True, retain_graph=True
        )
        return F.mse_loss(e, energy) + F.l1_loss(-f, force) + st.pow(2).mean()


class ConvGP(nn.Module):
    """A critic with a penalty on its gradient between real and made."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 8, 4, 2, 1),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(128, 1),
        )

    def forward(self, real: Tensor, fake: Tensor, eps: Tensor) -> Tensor:
        mid = autograd.Variable(eps * real + (1 - eps) * fake, requires_grad=True)
        out = self.d(mid)
        g = autograd.grad(
            outputs=out, inputs=mid, grad_outputs=torch.ones(out.size()).to(out), create_graph=True, retain_graph=True
        )[0]
        g = g.view(g.size(0), -1)
        return self.d(fake).mean() - self.d(real).mean() + 10 * ((g.norm(2, dim=1) - 1) ** 2).mean()


class R1(nn.Module):
    """A penalty on the gradient at what is real; spectral, group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3, padding=1)),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 4, 3),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 1),
        )

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        real.requires_grad = True
        r = self.d(real)
        (g,) = torch.autograd.grad(outputs=r.sum(), inputs=real, create_graph=True)
        return F.softplus(-r).mean() + F.softplus(self.d(fake)).mean() + 5 * g.pow(2).reshape(len(g), -1).sum(1).mean()


class PINN(nn.Module):
    """Burgers' equation: second derivatives of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.nu = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, t: Tensor, u: Tensor) -> Tensor:
        x, t = (x.requires_grad_(), t.requires_grad_())
        y = self.net(torch.cat([x, t], 1))
        one = torch.ones_like(y)
        dx = torch.autograd.grad(y, x, one, create_graph=True)[0]
        dt = torch.autograd.grad(y, t, one, create_graph=True)[0]
        dxx = torch.autograd.grad(dx, x, one, create_graph=True)[0]
        return F.mse_loss(y, u) + (dt + y * dx - self.nu * dxx).pow(2).mean()


class Divergence(nn.Module):
    """A Laplacian, coordinate by coordinate."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        u = self.net(x)
        g = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        lap = 0
        for i in range(3):
            lap = lap + torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i]
        return ((lap + u.squeeze(-1)) ** 2).mean()


class ScoreMatching(nn.Module):
    """Sliced: the score's gradient along a direction."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 6))

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        score = self.net(x)
        g = torch.autograd.grad((score * v).sum(), x, create_graph=True)[0]
        return ((g * v).sum(1) + 0.5 * (score * v).sum(1) ** 2).mean()


class Energy(nn.Module):
    """Langevin steps, which keep no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.e = mlp(6, 16, 16, 1)

    def forward(self, x: Tensor, start: Tensor, noise: Tensor) -> Tensor:
        y = start.detach()
        for k in range(4):
            y = y.detach().requires_grad_(True)
            g = torch.autograd.grad(self.e(y).sum(), y)[0]
            y = y - 0.1 * g + 0.01 * noise[:, k]
        y = y.detach()
        a, b = (self.e(x), self.e(y))
        return a.mean() - b.mean() + 0.1 * (a**2 + b**2).mean()


class Lagrangian(nn.Module):
    """Accelerations from the Hessian of a Lagrangian."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, q: Tensor, v: Tensor, a: Tensor) -> Tensor:
        q, v = (q.requires_grad_(True), v.requires_grad_(True))
        L = self.net(torch.cat([q, v], -1)).sum() + v.pow(2).sum()
        dq, dv = torch.autograd.grad(L, (q, v), create_graph=True)
        H, C = ([], [])
        for i in range(2):
            h, c = torch.autograd.grad(dv[:, i].sum(), (v, q), create_graph=True)
            H.append(h)
            C.append(c)
        H, C = (torch.stack(H, 1), torch.stack(C, 1))
        acc = torch.linalg.solve(
            H + 0.1 * torch.eye(2), (dq - (C @ v.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)
        ).squeeze(-1)
        return F.mse_loss(acc, a)


class FFJORD(nn.Module):
    """A flow whose divergence is estimated by Hutchinson's way."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        z, logp = (x.requires_grad_(True), 0)
        for k in range(3):
            t = torch.full_like(z[:, :1], k / 3)
            f = self.f(torch.cat([z, t], 1))
            ejz = torch.autograd.grad(f, z, e, create_graph=True)[0]
            logp = logp - (ejz * e).sum(1) / 3
            z = z + f / 3
        return (0.5 * z.pow(2).sum(1) + logp).mean()


class MAML(nn.Module):
    """Two inner steps, differentiated through."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, xs: Tensor, ys: Tensor, xq: Tensor, yq: Tensor) -> Tensor:
        w = dict(self.net.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(torch.func.functional_call(self.net, w, (xs,)), ys)
            g = torch.autograd.grad(loss, list(w.values()), create_graph=True)
            w = {k: p - 0.1 * d for (k, p), d in zip(w.items(), g)}
        return F.mse_loss(torch.func.functional_call(self.net, w, (xq,)), yq)


class VAT(nn.Module):
    """Embeddings moved by their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = (nn.Embedding(32, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4))

    def logits(self, e: Tensor) -> Tensor:
        return self.head(self.rnn(e)[1][0])

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        e = self.embed(tokens)
        loss = F.cross_entropy(self.logits(e), target)
        g = torch.autograd.grad(loss, e, retain_graph=True)[0]
        d = 0.5 * F.normalize(g.flatten(1), dim=1).view_as(g)
        return loss + F.cross_entropy(self.logits(e + d), target)


class GradNorm(nn.Module):
    """Tasks weighed by the norms of their gradients of a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b, self.w = (
            nn.Linear(6, 8),
            nn.Linear(8, 1),
            nn.Linear(8, 3),
            nn.Parameter(torch.ones(2)),
        )

    def forward(self, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        losses = torch.stack([F.mse_loss(self.a(h), y), F.cross_entropy(self.b(h), target)])
        norms = torch.stack(
            [
                torch.autograd.grad(w * l, self.body.weight, retain_graph=True, create_graph=True)[0].norm()
                for w, l in zip(self.w, losses)
            ]
        )
        return (self.w.detach() * losses).sum() + (norms - norms.mean().detach()).abs().sum()


MODELS = {
    "forces": lambda: (Forces(), {"z": ids(5, of=10), "place": rows(5, 3), "energy": rows(), "force": rows(5, 3)}),
    "stress": lambda: (
        Curl(),
        {
            "z": torch.randint(0, 10, (8,)),
            "pos": torch.randn(8, 3),
            "edge": torch.randint(0, 8, (2, 20)),
            "batch": torch.arange(8) // 4,
            "energy": torch.randn(2),
            "force": torch.randn(8, 3),
        },
    ),
    "wgan-gp": lambda: (ConvGP(), {"real": image(), "fake": image(), "eps": torch.rand(BATCH, 1, 1, 1)}),
    "r1-penalty": lambda: (R1(), {"real": image(8), "fake": image(8)}),
    "pinn": lambda: (PINN(), {"x": rows(1), "t": rows(1), "u": rows(1)}),
    "laplacian": lambda: (Divergence(), {"x": rows(3)}),
    "score-matching": lambda: (ScoreMatching(), {"x": rows(6), "v": rows(6)}),
    "energy-based": lambda: (Energy(), {"x": rows(6), "start": rows(6), "noise": rows(4, 6)}),
    "lagrangian": lambda: (Lagrangian(), {"q": rows(2), "v": rows(2), "a": rows(2)}),
    "ffjord": lambda: (FFJORD(), {"x": rows(3), "e": rows(3)}),
    "maml": lambda: (MAML(), {"xs": rows(4), "ys": rows(1), "xq": rows(4), "yq": rows(1)}),
    "adversarial-embeddings": lambda: (VAT(), {"tokens": ids(5), "target": ids(of=4)}),
    "grad-norm": lambda: (GradNorm(), {"x": rows(6), "y": rows(1), "target": ids(of=3)}),
}
