"""Models that loop over many steps in Python, each of which reads what the step before computed."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.written.draws import BATCH, ids, rows

STEPS = 64


class SelectiveScan(nn.Module):
    """Mamba's recurrence in Python: states decay, are written and read at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.enter, self.leave = nn.Embedding(32, 8), nn.Linear(8, 32), nn.Linear(16, 32)
        self.step, self.read = nn.Linear(16, 16), nn.Linear(16, 8)
        self.decay, self.skip = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        u, gate = self.enter(self.embed(x)).chunk(2, -1)
        delta, (b, c) = F.softplus(self.step(u)), self.read(u).split(4, -1)
        kept = torch.exp(-delta[..., None] * self.decay.exp())
        written = delta[..., None] * b[:, :, None] * u[..., None]
        state, read = torch.zeros(len(x), 16, 4, dtype=u.dtype), []
        for t in range(x.shape[1]):
            state = kept[:, t] * state + written[:, t]
            read.append((state @ c[:, t, :, None])[..., 0])
        out = (torch.stack(read, 1) + u * self.skip) * F.silu(gate)
        return F.cross_entropy(self.leave(out).flatten(0, 1), y.flatten())


class Cells(nn.Module):
    """A layer of LSTM cells, one of GRU cells that reads it backwards, and a loss at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(6, 8), nn.GRUCell(8, 8), nn.Linear(8, 4)
        self.start = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 8)
        forward = []
        for step in x.unbind(1):
            h, c = self.first(step, (h, c))
            forward.append(h)
        h, backward = self.start.expand(len(x), -1), []
        for t in reversed(range(len(forward))):
            h = self.second(forward[t], h)
            backward.append(h)
        backward.reverse()
        loss = sum(F.cross_entropy(self.head(out), y[:, t]) for t, out in enumerate(backward))
        return loss / len(backward) + torch.cat(backward, 0).square().mean() + c.mean()


class DecayedMemory(nn.Module):
    """Linear attention as RWKV has it, that writes each position's result into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.r, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.decay = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        r, k, v = self.r(x).sigmoid(), self.k(x), self.v(x)
        above = below = torch.zeros_like(k[:, 0])
        most, read = torch.full_like(k[:, 0], -1e9), torch.zeros_like(k)
        for t in range(x.shape[1]):
            key, value = k[:, t : t + 1].squeeze(1), v[:, t]
            new = torch.maximum(most - self.decay, key)
            kept, added = torch.exp(most - self.decay - new), torch.exp(key - new)
            above, below, most = kept * above + added * value, kept * below + added, new
            read[:, t] = above / below
        return F.mse_loss(self.out(r * read), y)


class Solver(nn.Module):
    """A neural ODE with fixed steps of Runge and Kutta, whose times are a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.head = nn.Linear(4, 8), nn.Linear(9, 8), nn.Linear(8, 3)

    def rate(self, t: Tensor, z: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.cat([z, t.expand(len(z), 1)], -1)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z, times = self.enter(x), torch.linspace(0, 1, STEPS + 1, dtype=x.dtype)
        for start, stop in pairwise(times):
            h = stop - start
            half = self.rate(start + h / 2, z + h / 2 * self.rate(start, z))
            z = z + h * half
        return F.cross_entropy(self.head(z), y)


class Kalman(nn.Module):
    """A Kalman filter with learned dynamics and noise, and the likelihood of what is observed."""

    def __init__(self) -> None:
        super().__init__()
        self.moves, self.seen = nn.Parameter(torch.eye(4) + 0.01 * torch.randn(4, 4)), nn.Parameter(torch.randn(2, 4))
        self.noise, self.error = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = x.new_zeros(len(x), 4, 1), torch.eye(4, dtype=x.dtype).expand(len(x), 4, 4)
        noise, error, loss = torch.diag(self.noise.exp()), torch.diag(self.error.exp()), 0
        for t in range(x.shape[1]):
            mean, spread = self.moves @ mean, self.moves @ spread @ self.moves.T + noise
            expected = self.seen @ spread @ self.seen.T + error
            gain = torch.linalg.solve(expected, self.seen @ spread).transpose(1, 2)
            apart = x[:, t, :, None] - self.seen @ mean
            mean, spread = mean + gain @ apart, spread - gain @ self.seen @ spread
            far = (apart.transpose(1, 2) @ torch.linalg.solve(expected, apart)).squeeze()
            loss = loss + far + torch.logdet(expected)
        return loss.mean()


class Greedy(nn.Module):
    """A decoder that reads what it found most likely at the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
        self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, token, logits = self.encoder(self.embed(x))[1][0], torch.zeros(len(x), dtype=torch.long), []
        for _ in range(y.shape[1]):
            h = self.cell(self.embed(token), h)
            logits.append(self.head(h))
            token = logits[-1].argmax(-1)
        return F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), y.flatten())


MODELS = {
    "selective-scan": lambda: (SelectiveScan(), {"x": ids(STEPS), "y": ids(STEPS)}),
    "cells": lambda: (Cells(), {"x": rows(STEPS, 6), "y": ids(STEPS, of=4)}),
    "decayed-memory": lambda: (DecayedMemory(), {"x": rows(STEPS, 8), "y": rows(STEPS, 8)}),
    "kalman": lambda: (Kalman(), {"x": rows(STEPS, 2)}),
    "greedy": lambda: (Greedy(), {"x": ids(6, of=20), "y": ids(STEPS, of=20)}),
    "ode-solver": lambda: (Solver(), {"x": rows(4), "y": torch.randint(0, 3, (BATCH,))}),
}
