"""Objectives over a whole batch as people write them: preferences, reinforcement, contrast."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.written.draws import ids, mlp, rows, some


class Preferences(nn.Module):
    """DPO: chosen and rejected in one batch, log-probabilities of real tokens, a frozen reference."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
        self.reference = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)).requires_grad_(False)

    @staticmethod
    def score(net: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
        log_p = net(tokens[:, :-1]).log_softmax(-1)
        return (log_p.gather(2, tokens[:, 1:, None]).squeeze(2) * mask[:, 1:]).sum(-1)

    def forward(self, chosen: Tensor, rejected: Tensor, chosen_mask: Tensor, rejected_mask: Tensor) -> Tensor:
        tokens, mask = torch.cat([chosen, rejected]), torch.cat([chosen_mask, rejected_mask])
        better, worse = self.score(self.policy, tokens, mask).chunk(2)
        with torch.no_grad():
            better_then, worse_then = self.score(self.reference, tokens, mask).chunk(2)
        margin = 0.1 * ((better - worse) - (better_then - worse_then))
        return -F.logsigmoid(margin).mean() - 0.1 * better.mean()


class Rewards(nn.Module):
    """A reward model: the score at each sample's last token, chosen above rejected."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(32, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        tokens = torch.cat([chosen, rejected], 0)
        scores = self.head(self.rnn(self.embed(tokens))[0]).squeeze(-1)
        last = (tokens != 0).long().cumsum(1).argmax(1)
        scores = scores[torch.arange(len(tokens), device=tokens.device), last]
        n = len(chosen)
        return -F.logsigmoid(scores[:n] - scores[n:]).mean()


class PolicyGradient(nn.Module):
    """PPO: advantages by a reversed loop, normalised over the batch, clipped ratios, value and entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = mlp(8, 32, 32), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x: Tensor, action: Tensor, reward: Tensor, before: Tensor, done: Tensor) -> Tensor:
        h = self.body(x)
        values, distribution = self.value(h).squeeze(-1), torch.distributions.Categorical(logits=self.policy(h))
        with torch.no_grad():
            last, advantages = torch.zeros_like(reward[:, 0]), []
            for t in reversed(range(reward.shape[1] - 1)):
                alive = 1.0 - done[:, t].to(reward.dtype)
                last = reward[:, t] + 0.99 * values[:, t + 1] * alive - values[:, t] + 0.95 * alive * last
                advantages.insert(0, last)
            advantage = torch.stack(advantages, 1)
            returns = advantage + values[:, :-1]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (distribution.log_prob(action) - before)[:, :-1].exp()
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -clipped.mean() + 0.5 * F.mse_loss(values[:, :-1], returns) - 0.01 * distribution.entropy().mean()


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(16, 24, 8), mlp(16, 48, 8).requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.student(x)
        with torch.no_grad():
            wanted = (self.teacher(x) / 2).softmax(-1)
        soft = F.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean") * 4
        return 0.5 * soft + 0.5 * F.cross_entropy(logits, target, weight=torch.arange(1.0, 9).to(x))


class Pairs(nn.Module):
    """Sentence pairs in one batch: contrastive logits of the whole batch with a learnt temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.EmbeddingBag(32, 16, mode="mean"), mlp(16, 32, 16)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x, y = F.normalize(self.body(self.embed(torch.cat([a, b]))), dim=-1).chunk(2)
        logits = self.scale.exp().clamp(max=100) * x @ y.T
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class SimCLR(nn.Module):
    """NT-Xent of two views in one batch, the diagonal masked out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(self.body(torch.cat([a, b])), dim=1)
        n = len(z)
        scores = (z @ z.T / 0.5).masked_fill(torch.eye(n, dtype=torch.bool, device=z.device), float("-inf"))
        labels = (torch.arange(n, device=z.device) + n // 2) % n
        return F.cross_entropy(scores, labels)


class SupCon(nn.Module):
    """Supervised contrast: the mean over all other samples of a class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(16, 32, 16)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        z = F.normalize(self.body(x), dim=1)
        scores = z @ z.T / 0.1
        scores = scores - scores.max(1, keepdim=True)[0].detach()
        other = ~torch.eye(len(z), dtype=torch.bool, device=z.device)
        same = (label[:, None] == label[None]) & other
        log_p = scores - (scores.exp() * other).sum(1, keepdim=True).log()
        return -((log_p * same).sum(1) / same.sum(1).clamp(min=1)).mean()


class HardTriplets(nn.Module):
    """Within the batch: the farthest of each class and the nearest of others; and given triplets."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(16, 32, 8)

    def forward(self, x: Tensor, label: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        z = self.body(x)
        apart = torch.cdist(z, z)
        same = label.unsqueeze(0) == label.unsqueeze(1)
        far = apart.masked_fill(~same, 0).amax(1)
        near = apart.masked_fill(same, 1e9).amin(1)
        given = F.triplet_margin_loss(z, self.body(positive), self.body(negative))
        return F.relu(far - near + 0.3).mean() + given


class ArcFace(nn.Module):
    """An angular margin on the logit of the right class, written by index."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = mlp(16, 32, 16), nn.Parameter(torch.randn(12, 16))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight)).clamp(-0.999, 0.999)
        moved = torch.cos(torch.acos(cosine) + 0.3)
        hot = torch.zeros_like(cosine)
        hot.scatter_(1, label.view(-1, 1), 1)
        return F.cross_entropy(8 * (hot * moved + (1 - hot) * cosine), label)


MODELS = {
    "dpo": lambda: (
        Preferences(),
        {"chosen": ids(8), "rejected": ids(8), "chosen_mask": some(8), "rejected_mask": some(8)},
    ),
    "reward": lambda: (Rewards(), {"chosen": ids(8), "rejected": ids(8)}),
    "ppo": lambda: (
        PolicyGradient(),
        {"x": rows(6, 8), "action": ids(6, of=4), "reward": rows(6), "before": rows(6) - 1, "done": some(6, share=0.2)},
    ),
    "distilled": lambda: (Distilled(), {"x": rows(16), "target": ids(of=8)}),
    "sentence-pairs": lambda: (Pairs(), {"a": ids(6), "b": ids(6)}),
    "simclr": lambda: (SimCLR(), {"a": rows(16), "b": rows(16)}),
    "supcon": lambda: (SupCon(), {"x": rows(16), "label": ids(of=3)}),
    "hard-triplets": lambda: (
        HardTriplets(),
        {"x": rows(16), "label": ids(of=3), "positive": rows(16), "negative": rows(16)},
    ),
    "arcface": lambda: (ArcFace(), {"x": rows(16), "label": ids(of=12)}),
}
