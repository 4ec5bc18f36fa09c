"""Tables and recommenders as people write them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.written.draws import BATCH, ids, mlp, rows, some

NODES, EDGES = 24, 64


class DLRM(nn.Module):
    """Bags of several tables, dot products of all pairs by tril indices."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(n, 8, mode="sum") for n in (64, 32, 16)])
        self.dense, self.top = mlp(4, 16, 8), mlp(14, 16, 1)

    def forward(self, dense: Tensor, bags: Tensor, click: Tensor) -> Tensor:
        x = self.dense(dense)
        offsets = torch.arange(0, bags.shape[0] * bags.shape[2], bags.shape[2], device=bags.device)
        all_ = [x] + [table(bags[:, i].reshape(-1), offsets) for i, table in enumerate(self.tables)]
        t = torch.stack(all_, 1)
        z = torch.bmm(t, t.mT)
        i, j = torch.tril_indices(4, 4, -1)
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, z[:, i, j]], 1)).squeeze(1), click)


class DeepFM(nn.Module):
    """One table with offsets of fields, the square of sums less the sum of squares, a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table, self.deep = nn.Embedding(48, 1), nn.Embedding(48, 8), mlp(24, 16, 1)
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("offsets", torch.tensor([0, 16, 32]), persistent=False)

    def forward(self, fields: Tensor, click: Tensor) -> Tensor:
        fields = fields + self.offsets
        v = self.table(fields)
        cross = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
        y = self.bias + self.linear(fields).sum((1, 2)) + cross + self.deep(v.flatten(1)).squeeze(-1)
        return F.binary_cross_entropy(y.sigmoid(), click)


class TwoTowers(nn.Module):
    """Softmax over the items of the batch, less the logarithm of how often each is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.tower = nn.Embedding(64, 16), nn.Embedding(64, 16), mlp(16, 32, 16)

    def forward(self, user: Tensor, item: Tensor, often: Tensor) -> Tensor:
        u, i = F.normalize(self.tower(self.users(user)), dim=-1), F.normalize(self.tower(self.items(item)), dim=-1)
        logits = u @ i.t() / 0.1 - often.log().unsqueeze(0)
        again = (item.unsqueeze(0) == item.unsqueeze(1)).triu(1)
        logits = logits.masked_fill(again | again.T, -1e4)
        return F.cross_entropy(logits, torch.arange(len(user), device=user.device))


class BPR(nn.Module):
    """Matrix factorisation with biases; a penalty on the rows that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.bias = nn.Embedding(64, 8), nn.Embedding(32, 8), nn.Embedding(32, 1)

    def forward(self, user: Tensor, better: Tensor, worse: Tensor) -> Tensor:
        u, a, b = self.users(user), self.items(better), self.items(worse)
        margin = (u * (a - b)).sum(-1) + (self.bias(better) - self.bias(worse)).squeeze(-1)
        return -F.logsigmoid(margin).mean() + 1e-2 * (u.norm(2).pow(2) + a.norm(2).pow(2) + b.norm(2).pow(2)) / len(
            user
        )


class Interest(nn.Module):
    """DIN: attention of a candidate over a history with padding; Dice activations."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.score, self.norm = (
            nn.Embedding(32, 8, padding_idx=0),
            mlp(32, 16, 1),
            nn.BatchNorm1d(16, affine=False),
        )
        self.alpha, self.deep, self.head = nn.Parameter(torch.zeros(16)), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, history: Tensor, item: Tensor, click: Tensor) -> Tensor:
        h, q = self.items(history), self.items(item).unsqueeze(1)
        q = q.expand_as(h)
        w = self.score(torch.cat([q, h, q - h, q * h], -1)).squeeze(-1)
        w = torch.where(history > 0, w, torch.zeros_like(w))
        x = self.deep(torch.cat([(w.unsqueeze(-1) * h).sum(1), q[:, 0]], -1))
        p = self.norm(x).sigmoid()
        return F.binary_cross_entropy_with_logits(self.head(p * x + (1 - p) * self.alpha * x).squeeze(-1), click)


class MMoE(nn.Module):
    """Experts shared by tasks with a gate each, weights of losses that are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([mlp(16, 16, 8) for _ in range(3)])
        self.gates = nn.ModuleList([nn.Linear(16, 3) for _ in range(2)])
        self.towers, self.log_var = nn.ModuleList([mlp(8, 8, 1) for _ in range(2)]), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, click: Tensor, price: Tensor) -> Tensor:
        e = torch.stack([expert(x) for expert in self.experts], 1)
        a, b = (
            tower(torch.einsum("be,bed->bd", gate(x).softmax(-1), e)).squeeze(-1)
            for gate, tower in zip(self.gates, self.towers)
        )
        losses = torch.stack([F.binary_cross_entropy_with_logits(a, click), F.mse_loss(b, price)])
        return ((-self.log_var).exp() * losses + self.log_var).sum()


class SASRec(nn.Module):
    """Causal attention over items; logits of the next and of a drawn item where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(32, 16, padding_idx=0), nn.Embedding(8, 16)
        self.body, self.norm = (
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True),
            nn.LayerNorm(16),
        )

    def forward(self, seen: Tensor, after: Tensor, other: Tensor) -> Tensor:
        x = self.items(seen) * 4 + self.places(torch.arange(seen.shape[1], device=seen.device))
        x = x * (seen != 0).unsqueeze(-1)
        later = torch.triu(torch.ones(8, 8, dtype=torch.bool, device=seen.device), 1)
        h = self.norm(self.body(x, src_mask=later))
        yes, no = (h * self.items(after)).sum(-1), (h * self.items(other)).sum(-1)
        there = after != 0
        loss = F.binary_cross_entropy_with_logits(yes[there], torch.ones_like(yes[there]))
        return loss + F.binary_cross_entropy_with_logits(no[there], torch.zeros_like(no[there]))


class TabNet(nn.Module):
    """Sparsemax masks over features in steps, ghost-free batch norm, gated linear units."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.steps, self.attend = (
            nn.BatchNorm1d(12),
            nn.ModuleList([nn.Linear(12, 32) for _ in range(2)]),
            nn.Linear(8, 12),
        )
        self.head = nn.Linear(8, 3)

    @staticmethod
    def sparsemax(z: Tensor) -> Tensor:
        ordered = z.sort(-1, descending=True)[0]
        sums, k = ordered.cumsum(-1), torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
        size = (1 + k * ordered > sums).sum(-1, keepdim=True)
        return (z - (sums.gather(-1, size - 1) - 1) / size.to(z.dtype)).clamp(min=0)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x, prior = self.norm(x), torch.ones_like(x)
        a, total, sparse = x.new_zeros(len(x), 8), 0, 0
        for step in self.steps:
            mask = self.sparsemax(self.attend(a) * prior)
            prior = prior * (1.3 - mask)
            d, a = F.glu(step(mask * x)).split([8, 8], 1)
            total, sparse = total + d.relu(), sparse - (mask * (mask + 1e-6).log()).sum(1).mean()
        return F.cross_entropy(self.head(total), target) + 1e-3 * sparse


class Trees(nn.Module):
    """NODE: soft oblivious trees, products over the bits of leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.pick, self.cut, self.leaf = (
            nn.Parameter(torch.randn(12, 6, 3)),
            nn.Parameter(torch.zeros(6, 3)),
            nn.Parameter(torch.randn(6, 4, 8)),
        )
        bits = torch.arange(8)[:, None] >> torch.arange(3) & 1
        self.register_buffer("bits", bits.bool())

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        p = (torch.einsum("bi,itd->btd", x, self.pick.softmax(0)) - self.cut).sigmoid()
        leaf = torch.where(self.bits, p.unsqueeze(2), 1 - p.unsqueeze(2)).prod(-1)
        return F.cross_entropy(torch.einsum("btl,tcl->btc", leaf, self.leaf).mean(1), target)


class FTTransformer(nn.Module):
    """Numbers and categories as tokens, a class token, numbers missing where NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 16)), nn.Parameter(torch.randn(5, 16))
        self.kinds, self.token = nn.ModuleList([nn.Embedding(n, 16) for n in (4, 6)]), nn.Parameter(torch.randn(16))
        self.body, self.head = nn.TransformerEncoderLayer(16, 4, 32, 0.0, F.gelu, batch_first=True), nn.Linear(16, 1)

    def forward(self, numbers: Tensor, kinds: Tensor, target: Tensor) -> Tensor:
        numbers = torch.nan_to_num(numbers)
        tokens = [numbers.unsqueeze(-1) * self.weight + self.bias]
        tokens += [table(kinds[:, i]).unsqueeze(1) for i, table in enumerate(self.kinds)]
        x = torch.cat([self.token.expand(len(numbers), 1, -1), *tokens], 1)
        return F.poisson_nll_loss(self.head(self.body(x)[:, 0]).squeeze(-1), target)


def _clicks() -> Tensor:
    return torch.randint(0, 2, (BATCH,)).double()


MODELS = {
    "dlrm": lambda: (DLRM(), {"dense": rows(4), "bags": ids(3, 5, of=16), "click": _clicks()}),
    "deepfm": lambda: (DeepFM(), {"fields": ids(3, of=16), "click": _clicks()}),
    "two-towers": lambda: (TwoTowers(), {"user": ids(of=64), "item": ids(of=64), "often": torch.rand(BATCH) + 0.01}),
    "bpr": lambda: (BPR(), {"user": ids(of=64), "better": ids(), "worse": ids()}),
    "din": lambda: (Interest(), {"history": ids(6), "item": ids(), "click": _clicks()}),
    "mmoe": lambda: (MMoE(), {"x": rows(16), "click": _clicks(), "price": rows()}),
    "sasrec": lambda: (SASRec(), {"seen": ids(8), "after": ids(8), "other": ids(8) // 2 + 1}),
    "tabnet": lambda: (TabNet(), {"x": rows(12), "target": ids(of=3)}),
    "soft-trees": lambda: (Trees(), {"x": rows(12), "target": ids(of=4)}),
    "ft-transformer": lambda: (
        FTTransformer(),
        {"numbers": rows(5).masked_fill(some(5, share=0.2), float("nan")), "kinds": ids(2, of=4), "target": _clicks()},
    ),
}
