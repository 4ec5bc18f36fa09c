"""Models of sequences as people write them: recurrences in Python, losses with masks, forecasts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.written.draws import BATCH, ids, mlp, rows, some


class Attended(nn.Module):
    """Seq2seq of LSTMs, with additive attention at each step of the decoder and a loss over real tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(32, 16, padding_idx=0), nn.Embedding(32, 16, padding_idx=0)
        self.encoder, self.cell = nn.LSTM(16, 16, bidirectional=True, batch_first=True), nn.LSTMCell(48, 32)
        self.query, self.key, self.score = nn.Linear(32, 16), nn.Linear(32, 16, bias=False), nn.Linear(16, 1)
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory, (h, c) = self.encoder(self.source(x))
        h, c = h.transpose(0, 1).reshape(len(x), -1), c.transpose(0, 1).reshape(len(x), -1)
        keys, context, logits = self.key(memory), torch.zeros_like(h), []
        for t in range(y.shape[1] - 1):
            h, c = self.cell(torch.cat([self.target(y[:, t]), context], -1), (h, c))
            scores = self.score(torch.tanh(self.query(h).unsqueeze(1) + keys)).squeeze(-1)
            weights = scores.masked_fill(x == 0, float("-inf")).softmax(-1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            logits.append(self.head(torch.cat([h, context], -1)))
        return F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), y[:, 1:].flatten(), ignore_index=0)


class TimeMix(nn.Module):
    """RWKV: exponential decay of keys and values in a loop over time, in the stable form."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.r, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.decay, self.first, self.mix = (nn.Parameter(torch.randn(16)) for _ in range(3))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        x = x + (F.pad(x, (0, 0, 1, -1)) - x) * self.mix.sigmoid()
        r, k, v = self.r(x).sigmoid(), self.k(x), self.v(x)
        top = bottom = torch.zeros_like(k[:, 0])
        largest, w, out = torch.full_like(k[:, 0], -1e30), -self.decay.exp(), []
        for t in range(k.shape[1]):
            now = torch.maximum(largest, self.first + k[:, t])
            a, b = (largest - now).exp(), (self.first + k[:, t] - now).exp()
            out.append((a * top + b * v[:, t]) / (a * bottom + b))
            now = torch.maximum(largest + w, k[:, t])
            a, b = (largest + w - now).exp(), (k[:, t] - now).exp()
            top, bottom, largest = a * top + b * v[:, t], a * bottom + b, now
        y = self.out(r * torch.stack(out, 1))
        return F.cross_entropy(F.linear(y, self.embed.weight).mT, labels)


class SelectiveScan(nn.Module):
    """Mamba's slow path: a causal depthwise convolution and a scan in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.conv = nn.Linear(16, 64), nn.Conv1d(32, 32, 4, groups=32, padding=3)
        self.project, self.step = nn.Linear(32, 2 + 8), nn.Linear(2, 32)
        self.log_a, self.d = nn.Parameter(torch.arange(1.0, 5).repeat(32, 1).log()), nn.Parameter(torch.ones(32))
        self.out, self.head = nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        length = x.shape[1]
        u, gate = self.inner(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :length]).transpose(1, 2)
        dt, b, c = self.project(u).split([2, 4, 4], -1)
        dt = F.softplus(self.step(dt))
        decay = torch.exp(dt.unsqueeze(-1) * -self.log_a.exp())
        drive = dt.unsqueeze(-1) * b.unsqueeze(2) * u.unsqueeze(-1)
        state, ys = torch.zeros_like(decay[:, 0]), []
        for t in range(length):
            state = decay[:, t] * state + drive[:, t]
            ys.append((state @ c[:, t].unsqueeze(-1)).squeeze(-1))
        y = (torch.stack(ys, 1) + u * self.d) * F.silu(gate)
        return F.cross_entropy(self.head(self.out(y)[:, -1]), target)


class Speech(nn.Module):
    """Convolutions and a GRU under CTC with lengths of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(8, 16, 3, padding=1), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor, label_lengths: Tensor) -> Tensor:
        h = F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        log_p = self.head(self.rnn(h)[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_p, y, lengths, label_lengths, blank=0, zero_infinity=True)


class SpectralMask(nn.Module):
    """A signal times a mask of its spectrum, found by convolutions over complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.register_buffer("window", torch.hann_window(32))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        spectrum = torch.stft(x, 32, 8, window=self.window, return_complex=True)
        mask = self.last(F.gelu(self.first(torch.view_as_real(spectrum).permute(0, 3, 1, 2))))
        spectrum = spectrum * torch.view_as_complex(mask.tanh().permute(0, 2, 3, 1).contiguous())
        return F.l1_loss(torch.istft(spectrum, 32, 8, window=self.window, length=x.shape[1]), y)


class CRF(nn.Module):
    """A linear chain: forward algorithm in log space, masked, and the score of the gold path."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.emit = nn.Embedding(32, 16), nn.Linear(16, 5)
        self.start, self.move = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5, 5))

    def forward(self, tokens: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        emit = self.emit(self.embed(tokens))
        alpha = self.start + emit[:, 0]
        gold = self.start[tags[:, 0]] + emit[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, tokens.shape[1]):
            step = torch.logsumexp(alpha.unsqueeze(2) + self.move + emit[:, t].unsqueeze(1), 1)
            alpha = torch.where(mask[:, t].unsqueeze(1), step, alpha)
            path = self.move[tags[:, t - 1], tags[:, t]] + emit[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            gold = gold + path * mask[:, t]
        return (alpha.logsumexp(1) - gold).mean()


class Copying(nn.Module):
    """A pointer-generator: probabilities of source tokens are added to those of the vocabulary by scatter_add."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(32, 16), nn.GRU(16, 16, batch_first=True)
        self.head, self.gate = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, _ = self.rnn(self.embed(source))
        h, _ = self.rnn(self.embed(target[:, :-1]))
        attention = (h @ memory.mT).softmax(-1)
        gate = self.gate(torch.cat([h, attention @ memory], -1)).sigmoid()
        p = gate * self.head(h).softmax(-1)
        where = source.unsqueeze(1).expand(-1, h.shape[1], -1)
        p = p.scatter_add(2, where, (1 - gate) * attention)
        return -(p.gather(2, target[:, 1:, None]) + 1e-9).log().mean()


class Characters(nn.Module):
    """Convolutions of several widths over characters, the largest over time, highway layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.convs = nn.ModuleList([nn.Conv1d(8, 8, k) for k in (2, 3, 4)])
        self.gate, self.change, self.head = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 8)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        y = torch.cat([conv(x).relu().max(-1)[0] for conv in self.convs], 1)
        t = self.gate(y).sigmoid()
        y = t * self.change(y).relu() + (1 - t) * y
        return F.multi_margin_loss(self.head(y), target)


class Smoothed(nn.Module):
    """nn.Transformer with a causal tgt_mask; label smoothing written as a KL divergence over real tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(32, 16), nn.Transformer(16, 4, 1, 1, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        y = self.body(self.embed(source), self.embed(target), tgt_mask=mask, src_key_padding_mask=source == 0)
        log_p = self.head(y).log_softmax(-1).flatten(0, 1)
        wanted = torch.full_like(log_p, 0.1 / 30).scatter_(1, target.reshape(-1, 1), 0.9)
        wanted[:, 0] = 0
        wanted = wanted.masked_fill((target.reshape(-1) == 0).unsqueeze(1), 0.0)
        return F.kl_div(log_p, wanted, reduction="sum") / (target != 0).sum()


class Rotary(nn.Module):
    """Rotary positions by complex numbers, and a loss over the tokens of answers only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(32, 32), nn.Linear(32, 96), nn.Linear(32, 32)
        angles = torch.outer(torch.arange(12.0), 10.0 ** -torch.arange(4.0))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * self.turns[:, None].to(torch.complex128)
        return torch.view_as_real(z).flatten(3).type_as(x)

    def forward(self, tokens: Tensor, weight: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(*tokens.shape, 3, 4, 8).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (self.turn(q), self.turn(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = F.linear(self.out(y) + x, self.embed.weight)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        weight = weight[:, 1:].flatten()
        return (loss * weight).sum() / weight.sum()


class Answers(nn.Module):
    """The loss over the tokens that a boolean mask picks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(32, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 32)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        logits = self.head(self.rnn(self.embed(tokens))[0])[:, :-1]
        picked, wanted = logits[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]]
        return F.cross_entropy(picked, wanted) + 0.01 * picked.square().mean()


class Retention(nn.Module):
    """Linear attention by cumulative sums, and retention with decays of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(16, 48), nn.GroupNorm(4, 16), nn.Linear(16, 4)
        self.register_buffer("decay", 1 - 2.0 ** (-5 - torch.arange(4.0)))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        n, time, _ = x.shape
        q, k, v = (y.view(n, time, 4, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        t = torch.arange(time, device=x.device)
        apart = t[:, None] - t[None]
        d = torch.where(apart >= 0, self.decay[:, None, None] ** apart.clamp(min=0), 0.0)
        kept = ((q @ k.mT) * d) @ v
        f, g = F.elu(q) + 1, F.elu(k) + 1
        sums = torch.einsum("bhtd,bhte->bhtde", g, v).cumsum(2)
        linear = torch.einsum("bhtd,bhtde->bhte", f, sums) / ((f * g.cumsum(2)).sum(-1, keepdim=True) + 1e-6)
        y = (kept + linear).transpose(1, 2).reshape(n * time, 16)
        return F.huber_loss(self.out(self.norm(y)).view(n, time, 4), target, delta=0.5)


class Relative(nn.Module):
    """Transformer-XL: scores of relative positions shifted by padding and a view, memory of an earlier segment."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.r = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.u, self.w, self.out = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4)), nn.Linear(16, 8)
        self.register_buffer("positions", torch.randn(12, 16))

    def forward(self, x: Tensor, memory: Tensor, target: Tensor) -> Tensor:
        n, time = x.shape[:2]
        whole = torch.cat([memory, x], 1)
        k, v = self.kv(whole).view(n, -1, 2, 4, 4).unbind(2)
        q, r = self.q(x).view(n, time, 4, 4), self.r(self.positions).view(-1, 4, 4)
        content = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        where = torch.einsum("bihd,jhd->bhij", q + self.w, r)
        where = F.pad(where, (1, 0)).view(n, 4, -1, time)[:, :, 1:].reshape(n, 4, time, -1)
        later = torch.ones(time, whole.shape[1], dtype=torch.bool, device=x.device).triu(whole.shape[1] - time + 1)
        a = ((content + where) / 2).masked_fill(later, -1e9).softmax(-1)
        return F.cross_entropy(self.out(torch.einsum("bhij,bjhd->bihd", a, v).flatten(2)).mT, target)


class Forecast(nn.Module):
    """WaveNet's gated dilated convolutions, quantile losses and a Gaussian likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 1)
        self.dilated = nn.ModuleList([nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3)])
        self.skips = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(3)])
        self.head = nn.Linear(8, 5)
        self.register_buffer("quantiles", torch.tensor([0.1, 0.5, 0.9]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = x.abs().mean(1, keepdim=True) + 1e-5
        h, skip = self.first((x / scale).unsqueeze(1)), 0
        for i, (conv, out) in enumerate(zip(self.dilated, self.skips)):
            a, b = conv(F.pad(h, (2**i, 0))).chunk(2, 1)
            z = out(a.tanh() * b.sigmoid())
            h, skip = h + z, skip + z
        out = self.head(F.relu(skip).transpose(1, 2)) * scale.unsqueeze(-1)
        error = y.unsqueeze(-1) - out[..., :3]
        pinball = torch.maximum(self.quantiles * error, (self.quantiles - 1) * error).mean()
        return pinball + F.gaussian_nll_loss(out[..., 3], y, F.softplus(out[..., 4]) + 1e-3)


class Residues(nn.Module):
    """N-BEATS: blocks that subtract what they explain, with a basis of sines as a buffer; sMAPE."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.trend = nn.ModuleList([mlp(12, 32, 12 + 4) for _ in range(3)]), mlp(12, 16, 6)
        t = torch.arange(16.0) / 12
        self.register_buffer("basis", torch.stack([f(k * t) for k in (1, 2, 3) for f in (torch.sin, torch.cos)]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        whole = self.trend(x) @ self.basis
        x, forecast = x - whole[:, :12], whole[:, 12:]
        for block in self.blocks:
            back, ahead = block(x).split([12, 4], 1)
            x, forecast = x - back, forecast + ahead
        return 200 * (2 * (forecast - y).abs() / (forecast.abs() + y.abs() + 1e-6)).nan_to_num().mean()


MODELS = {
    "spectral-mask": lambda: (SpectralMask(), {"x": rows(128), "y": rows(128)}),
    "seq2seq-attention": lambda: (Attended(), {"x": ids(7) + 0, "y": ids(6)}),
    "rwkv-loop": lambda: (TimeMix(), {"tokens": ids(10), "labels": ids(10)}),
    "mamba-loop": lambda: (SelectiveScan(), {"x": rows(9, 16), "target": ids(of=8)}),
    "ctc": lambda: (
        Speech(),
        {
            "x": rows(12, 8),
            "y": ids(4, of=5) + 1,
            "lengths": torch.full((BATCH,), 12) - ids(of=3),
            "label_lengths": ids(of=3) + 1,
        },
    ),
    "crf": lambda: (CRF(), {"tokens": ids(7), "tags": ids(7, of=5), "mask": some(7)}),
    "copying": lambda: (Copying(), {"source": ids(7), "target": ids(6)}),
    "char-cnn": lambda: (Characters(), {"tokens": ids(12), "target": ids(of=8)}),
    "nn-transformer": lambda: (Smoothed(), {"source": ids(8), "target": ids(6)}),
    "rotary-complex": lambda: (Rotary(), {"tokens": ids(12), "weight": some(12).double()}),
    "picked-tokens": lambda: (Answers(), {"tokens": ids(10), "mask": some(10)}),
    "retention": lambda: (Retention(), {"x": rows(8, 16), "target": rows(8, 4)}),
    "transformer-xl": lambda: (Relative(), {"x": rows(6, 16), "memory": rows(6, 16), "target": ids(6, of=8)}),
    "wavenet": lambda: (Forecast(), {"x": rows(16), "y": rows(16)}),
    "n-beats": lambda: (Residues(), {"x": rows(12), "y": rows(4)}),
}
