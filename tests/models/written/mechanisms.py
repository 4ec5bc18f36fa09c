"""Mechanisms of published models: memories, alignments, routes, sorted sums."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.written.draws import BATCH, ids, mlp, rows, some


class ACT(nn.Module):
    """A universal transformer that halts each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.halt, self.head = (nn.Linear(16, 1), nn.Linear(16, 4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        halted = torch.zeros(x.shape[:2], device=x.device, dtype=x.dtype)
        left, updates, out = (torch.zeros_like(halted), torch.zeros_like(halted), torch.zeros_like(x))
        for _ in range(4):
            p = torch.sigmoid(self.halt(x)).squeeze(-1)
            running = (halted < 1.0).to(x.dtype)
            new = (halted + p * running > 0.9).to(x.dtype) * running
            running = (halted + p * running <= 0.9).to(x.dtype) * running
            halted = halted + p * running
            left = left + new * (1 - halted)
            halted = halted + new * left
            updates = updates + running + new
            w = p * running + new * left
            x = self.layer(x)
            out = x * w.unsqueeze(-1) + out * (1 - w.unsqueeze(-1))
        return F.cross_entropy(self.head(out.mean(1)), target) + 0.01 * (left + updates).mean()


class PointerNet(nn.Module):
    """A decoder that points at its inputs, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = (nn.LSTM(2, 16, batch_first=True), nn.LSTMCell(2, 16))
        self.w1, self.w2, self.v = (
            nn.Linear(16, 16, bias=False),
            nn.Linear(16, 16, bias=False),
            nn.Linear(16, 1, bias=False),
        )

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        e, (h, c) = self.enc(x)
        h, c = (h[0], c[0])
        at = x.new_zeros(len(x), 2)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        loss = 0.0
        for t in range(x.shape[1]):
            h, c = self.dec(at, (h, c))
            score = self.v(torch.tanh(self.w1(e) + self.w2(h)[:, None])).squeeze(-1).masked_fill(mask, -1000000000.0)
            loss = loss + F.cross_entropy(score, order[:, t])
            mask = mask.scatter(1, order[:, t : t + 1], True)
            at = x.gather(1, order[:, t].view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)
        return loss / x.shape[1]


class Transducer(nn.Module):
    """RNN-T: the lattice of emissions, cell by cell."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.embed, self.pred, self.joint = (
            nn.GRU(8, 16, batch_first=True),
            nn.Embedding(8, 16),
            nn.GRU(16, 16, batch_first=True),
            nn.Linear(16, 8),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        e = self.enc(x)[0]
        p = self.pred(F.pad(self.embed(y), (0, 0, 1, 0)))[0]
        logp = self.joint(torch.tanh(e.unsqueeze(2) + p.unsqueeze(1))).log_softmax(-1)
        blank = logp[..., 0]
        emit = logp[:, :, :-1].gather(-1, y[:, None, :, None].expand(-1, x.shape[1], -1, 1)).squeeze(-1)
        T, U = (x.shape[1], y.shape[1])
        alpha = [[None] * (U + 1) for _ in range(T)]
        for t in range(T):
            for u in range(U + 1):
                if t == 0 and u == 0:
                    alpha[t][u] = torch.zeros_like(blank[:, 0, 0])
                    continue
                ways = []
                if t > 0:
                    ways.append(alpha[t - 1][u] + blank[:, t - 1, u])
                if u > 0:
                    ways.append(alpha[t][u - 1] + emit[:, t, u - 1])
                alpha[t][u] = torch.logsumexp(torch.stack(ways), 0)
        return -(alpha[T - 1][U] + blank[:, T - 1, U]).mean()


class Evoformer(nn.Module):
    """Rows of an alignment and pairs: outer products, triangles."""

    def __init__(self) -> None:
        super().__init__()
        self.nm, self.np = (nn.LayerNorm(16), nn.LayerNorm(8))
        self.qkv, self.bias, self.gate, self.o = (
            nn.Linear(16, 48, bias=False),
            nn.Linear(8, 2, bias=False),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
        )
        self.a, self.b, self.opm = (nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(16, 8))
        self.ta, self.tb, self.ga, self.gb, self.tn, self.tout, self.tg = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )
        self.head = nn.Linear(8, 6)

    def forward(self, msa: Tensor, pair: Tensor, target: Tensor) -> Tensor:
        m, z = (self.nm(msa), self.np(pair))
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(-2, -3) for y in self.qkv(m).chunk(3, -1))
        score = q @ k.transpose(-1, -2) / 8**0.5 + self.bias(z).permute(0, 3, 1, 2).unsqueeze(1)
        y = (score.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
        msa = msa + self.o(torch.sigmoid(self.gate(m)) * y)
        outer = torch.einsum("bsic,bsjd->bijcd", self.a(msa), self.b(msa)) / msa.shape[1]
        pair = pair + self.opm(outer.flatten(-2))
        z = self.np(pair)
        a, b = (torch.sigmoid(self.ga(z)) * self.ta(z), torch.sigmoid(self.gb(z)) * self.tb(z))
        pair = pair + torch.sigmoid(self.tg(z)) * self.tout(self.tn(torch.einsum("bikc,bjkc->bijc", a, b)))
        logits = self.head(pair + pair.transpose(1, 2))
        return F.cross_entropy(logits.permute(0, 3, 1, 2), target)


class Mamba2(nn.Module):
    """State spaces in chunks (SSD)."""

    def __init__(self) -> None:
        super().__init__()
        self.inn, self.conv = (nn.Linear(8, 16 + 16 + 8 + 2, bias=False), nn.Conv1d(24, 24, 4, groups=24, padding=3))
        self.dt_bias, self.A, self.D = (
            nn.Parameter(torch.randn(2)),
            nn.Parameter(torch.rand(2).log()),
            nn.Parameter(torch.ones(2)),
        )
        self.norm, self.out = (nn.RMSNorm(16), nn.Linear(16, 8, bias=False))

    def segsum(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        x = x.unsqueeze(-1).expand(*x.shape, n)
        low = torch.tril(torch.ones(n, n, device=x.device, dtype=bool), -1)
        x = x.masked_fill(~low, 0).cumsum(-2)
        return x.masked_fill(~torch.tril(torch.ones(n, n, device=x.device, dtype=bool), 0), -torch.inf)

    def forward(self, u: Tensor, target: Tensor) -> Tensor:
        b, n, _ = u.shape
        z, xbc, dt = torch.split(self.inn(u), [16, 24, 2], -1)
        xbc = F.silu(self.conv(xbc.transpose(1, 2))[..., :n].transpose(1, 2))
        x, B, C = torch.split(xbc, [16, 4, 4], -1)
        dt = F.softplus(dt + self.dt_bias)
        A = -self.A.exp() * dt
        x = x.view(b, n, 2, 8)
        X = (x * dt.unsqueeze(-1)).view(b, n // 4, 4, 2, 8)
        B, C = (y.view(b, n // 4, 4, 1, 4).expand(-1, -1, -1, 2, -1) for y in (B, C))
        A = A.view(b, n // 4, 4, 2).permute(0, 3, 1, 2)
        cum = A.cumsum(-1)
        L = self.segsum(A).exp()
        diag = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, L, X)
        decay = (cum[..., -1:] - cum).exp()
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, decay, X)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        chunk = self.segsum(F.pad(cum[..., -1], (1, 0))).exp()
        states = torch.einsum("bhzc,bchpn->bzhpn", chunk, states)[:, :-1]
        off = torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states, cum.exp())
        y = (diag + off).reshape(b, n, 2, 8) + self.D.view(2, 1) * x
        return F.mse_loss(self.out(self.norm(y.flatten(2) * F.silu(z))), target)


class DeltaNet(nn.Module):
    """The delta rule, a memory written step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.beta, self.out = (nn.Linear(8, 48), nn.Linear(8, 2), nn.Linear(16, 8))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        k, beta = (F.normalize(F.silu(k), dim=-1), self.beta(x).sigmoid().transpose(1, 2))
        S = x.new_zeros(len(x), 2, 8, 8)
        o = torch.zeros_like(v)
        for i in range(x.shape[1]):
            ki, vi = (k[:, :, i], v[:, :, i])
            vi = vi - (S * ki[..., None]).sum(-2)
            vi = vi * beta[:, :, i, None]
            S = S + ki.unsqueeze(-1) * vi.unsqueeze(-2)
            o[:, :, i] = torch.einsum("bhd,bhdm->bhm", q[:, :, i], S)
        return F.mse_loss(self.out(o.transpose(1, 2).flatten(2)), target)


class SwitchCapacity(nn.Module):
    """Experts of a fixed capacity, by dispatch masks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w1, self.w2 = (
            nn.Linear(8, 4, bias=False),
            nn.Parameter(torch.randn(4, 8, 16) / 3),
            nn.Parameter(torch.randn(4, 16, 8) / 4),
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        b, n, d = x.shape
        flat = x.reshape(-1, d)
        p = self.gate(flat).softmax(-1)
        w, i = p.max(-1)
        hot = F.one_hot(i, 4)
        cap = 2 * len(flat) // 4
        place = (hot.cumsum(0) - 1) * hot
        keep = hot * (place < cap)
        loss = 4 * (hot.to(x.dtype).mean(0) * p.mean(0)).sum()
        slot = F.one_hot((place * keep).sum(-1), cap)
        dispatch = (keep.unsqueeze(-1) * slot.unsqueeze(1)).to(x.dtype)
        e = torch.einsum("sec,sm->ecm", dispatch, flat)
        e = torch.bmm(F.relu(torch.bmm(e, self.w1)), self.w2)
        y = torch.einsum("sec,ecm->sm", dispatch * w[:, None, None], e).view(b, n, d)
        return F.mse_loss(x + y, target) + 0.01 * loss


class ExpertChoice(nn.Module):
    """Experts choose their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w1, self.w2 = (
            nn.Linear(8, 4, bias=False),
            nn.Parameter(torch.randn(4, 8, 16) / 3),
            nn.Parameter(torch.randn(4, 16, 8) / 4),
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        g, i = p.transpose(1, 2).topk(3, -1)
        e = x.unsqueeze(1).expand(-1, 4, -1, -1).gather(2, i.unsqueeze(-1).expand(-1, -1, -1, 8))
        h = torch.einsum("beki,eih->bekh", e, self.w1).relu()
        y = torch.einsum("bekh,eho->beko", h, self.w2) * g.unsqueeze(-1)
        out = torch.zeros_like(x).scatter_add(1, i.flatten(1).unsqueeze(-1).expand(-1, -1, 8), y.flatten(1, 2))
        return F.mse_loss(x + out, target)


class DepthMixture(nn.Module):
    """Only some tokens go through a block."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.block, self.head = (
            nn.Linear(8, 1),
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        w = self.router(x).squeeze(-1)
        top, i = torch.topk(w, 3, dim=1, sorted=False)
        i, order = torch.sort(i, dim=1)
        top = top.gather(1, order)
        at = i.unsqueeze(-1).expand(-1, -1, 8)
        y = self.block(x.gather(1, at)) * top.sigmoid().unsqueeze(-1)
        x = x.scatter_add(1, at, y)
        mark = torch.zeros_like(w).scatter_(1, i, 1.0)
        return F.cross_entropy(self.head(x.mean(1)), target) + F.binary_cross_entropy_with_logits(w, mark)


class VTrace(nn.Module):
    """An actor and critic with corrected returns."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pi, self.v = (mlp(6, 16), nn.Linear(16, 3), nn.Linear(16, 1))

    def forward(self, obs: Tensor, action: Tensor, mu: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        h = torch.relu(self.body(obs))
        logp, v = (self.pi(h).log_softmax(-1), self.v(h).squeeze(-1))
        taken = logp.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            rho = (taken - mu).exp()
            c = rho.clamp(max=1.0)
            after = torch.cat([v[:, 1:], v[:, -1:]], 1)
            delta = c * (reward + discount * after - v)
            acc, out = (torch.zeros_like(v[:, 0]), [])
            for t in reversed(range(v.shape[1])):
                acc = delta[:, t] + discount[:, t] * c[:, t] * acc
                out.append(acc)
            vs = torch.stack(out[::-1], 1) + v
            adv = c * (reward + discount * torch.cat([vs[:, 1:], v[:, -1:]], 1) - v)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        return -(taken * adv).mean() + 0.5 * (vs - v).pow(2).mean() - 0.01 * entropy


class EMAVQ(nn.Module):
    """Codes that are moving averages, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = (mlp(8, 16, 4), mlp(4, 16, 8))
        w = torch.randn(12, 4)
        self.register_buffer("codes", w)
        self.register_buffer("size", torch.ones(12))
        self.register_buffer("avg", w.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.enc(x).flatten(0, 1)
        i = torch.cdist(z, self.codes).argmin(1)
        q = F.embedding(i, self.codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(i, 12).to(z.dtype)
                self.size.mul_(0.99).add_(hot.sum(0), alpha=0.01)
                self.avg.mul_(0.99).add_(hot.t() @ z, alpha=0.01)
                n = self.size.sum()
                size = (self.size + 1e-05) / (n + 0.00012) * n
                self.codes.copy_(self.avg / size.unsqueeze(1))
        loss = 0.25 * F.mse_loss(z, q.detach())
        q = z + (q - z).detach()
        return loss + F.mse_loss(self.dec(q.view(*x.shape[:-1], 4)), x)


class Cox(nn.Module):
    """Risks of all that are still there, sorted by time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 16, 1)

    def forward(self, x: Tensor, time: Tensor, event: Tensor) -> Tensor:
        order = torch.argsort(time, descending=True)
        risk, event = (self.net(x).squeeze(-1)[order], event[order])
        return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum().clamp(min=1)


MODELS = {
    "adaptive-halting": lambda: (ACT(), {"x": rows(6, 16), "target": ids(of=4)}),
    "pointer-network": lambda: (PointerNet(), {"x": rows(5, 2), "order": torch.rand(BATCH, 5).argsort(1)}),
    "transducer": lambda: (Transducer(), {"x": rows(4, 8), "y": ids(3, of=7) + 1}),
    "evoformer": lambda: (Evoformer(), {"msa": rows(4, 6, 16), "pair": rows(6, 6, 8), "target": ids(6, 6, of=6)}),
    "chunked-states": lambda: (Mamba2(), {"u": rows(8, 8), "target": rows(8, 8)}),
    "delta-rule": lambda: (DeltaNet(), {"x": rows(6, 8), "target": rows(6, 8)}),
    "switch-capacity": lambda: (SwitchCapacity(), {"x": rows(4, 8), "target": rows(4, 8)}),
    "expert-choice": lambda: (ExpertChoice(), {"x": rows(6, 8), "target": rows(6, 8)}),
    "depth-mixture": lambda: (DepthMixture(), {"x": rows(6, 8), "target": ids(of=4)}),
    "v-trace": lambda: (
        VTrace(),
        {
            "obs": rows(5, 6),
            "action": ids(5, of=3),
            "mu": -torch.rand(BATCH, 5),
            "reward": rows(5),
            "discount": torch.full((BATCH, 5), 0.9),
        },
    ),
    "moving-codes": lambda: (EMAVQ(), {"x": rows(4, 8)}),
    "proportional-hazards": lambda: (Cox(), {"x": rows(6), "time": torch.rand(BATCH), "event": some().double()}),
}
