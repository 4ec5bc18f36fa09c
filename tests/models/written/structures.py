"""Graphs, sets, tables and recommenders as people write them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.written.draws import BATCH, Built, ids, mlp, rows, some

NODES, EDGES = 24, 64


def edges() -> Tensor:
    return torch.randint(0, NODES, (2, EDGES))


def nodes(width: int = 8) -> Tensor:
    return torch.randn(NODES, width)


class GCN(nn.Module):
    """Degrees and sums by index_add; the loss over training nodes by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, edge: Tensor, label: Tensor, train: Tensor) -> Tensor:
        source, to = edge
        degree = torch.zeros(len(x), dtype=x.dtype, device=x.device).index_add(0, to, x.new_ones(len(to)))
        scale = degree.clamp(min=1).rsqrt()
        weight = (scale[source] * scale[to]).unsqueeze(1)
        for layer in (self.first, self.second):
            h = layer(x)
            x = torch.zeros_like(h).index_add_(0, to, h[source] * weight) + h
            x = x.relu() if layer is self.first else x
        return F.cross_entropy(x[train], label[train])


class GAT(nn.Module):
    """Softmax over the edges of a node by scatter_reduce and scatter_add."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.score, self.out = nn.Linear(8, 16, bias=False), nn.Parameter(torch.randn(2, 4, 4)), nn.Linear(16, 4)

    def forward(self, x: Tensor, edge: Tensor, label: Tensor) -> Tensor:
        source, to = edge[0], edge[1]
        h = self.lin(x).view(-1, 4, 4)
        e = F.leaky_relu((h * self.score[0]).sum(-1)[source] + (h * self.score[1]).sum(-1)[to], 0.2)
        where = to.unsqueeze(1).expand_as(e)
        top = torch.full((len(x), 4), -1e9, dtype=x.dtype).scatter_reduce(0, where, e, "amax")
        w = (e - top[to]).exp()
        total = torch.zeros(len(x), 4, dtype=x.dtype).scatter_add(0, where, w)
        message = h[source] * (w / (total[to] + 1e-9)).unsqueeze(-1)
        y = torch.zeros_like(h).index_add(0, to, message)
        return F.cross_entropy(self.out(F.elu(y.flatten(1))), label)


class GIN(nn.Module):
    """Sums of neighbours, mean and largest of each graph, batch norm over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.one, self.norm, self.head = nn.Parameter(torch.zeros(1)), mlp(8, 16, 16), nn.BatchNorm1d(16), nn.Linear(32, 1)

    def forward(self, x: Tensor, edge: Tensor, graph: Tensor, target: Tensor) -> Tensor:
        around = torch.zeros_like(x).scatter_add_(0, edge[1].unsqueeze(1).expand(-1, x.shape[1]), x[edge[0]])
        h = self.norm(self.one((1 + self.eps) * x + around)).relu()
        n = len(target)
        count = torch.bincount(graph, minlength=n).clamp(min=1).unsqueeze(1)
        mean = h.new_zeros(n, 16).index_add(0, graph, h) / count
        top = h.new_zeros(n, 16).scatter_reduce(0, graph.unsqueeze(1).expand_as(h), h, "amax", include_self=False)
        return F.mse_loss(self.head(torch.cat([mean, top], 1)).squeeze(1), target)


class EGNN(nn.Module):
    """Coordinates moved along edges; energies and distances."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.move, self.node, self.energy = mlp(17, 16, 16), mlp(16, 16, 1), mlp(24, 16, 8), mlp(8, 16, 1)

    def forward(self, x: Tensor, place: Tensor, edge: Tensor, wanted: Tensor) -> Tensor:
        for _ in range(2):
            apart = place[edge[0]] - place[edge[1]]
            m = self.edge(torch.cat([x[edge[0]], x[edge[1]], apart.square().sum(1, keepdim=True)], 1))
            place = place.index_add(0, edge[0], apart * self.move(m).tanh() / 10)
            x = x + self.node(torch.cat([x, x.new_zeros(len(x), 16).index_add(0, edge[0], m)], 1))
        return F.l1_loss(self.energy(x), wanted) + place.square().mean()


class SchNet(nn.Module):
    """A batch of molecules with all pairs, radial bases, a cutoff and masked atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.filter, self.lin, self.out = nn.Embedding(10, 16), mlp(12, 16, 16), nn.Linear(16, 16), mlp(16, 16, 1)
        self.register_buffer("centres", torch.linspace(0, 3, 12))

    def forward(self, z: Tensor, place: Tensor, mask: Tensor, energy: Tensor) -> Tensor:
        x = self.atoms(z)
        apart = (place.unsqueeze(2) - place.unsqueeze(1)).square().sum(-1).clamp(min=1e-9).sqrt()
        basis = torch.exp(-4 * (apart.unsqueeze(-1) - self.centres) ** 2)
        cut = 0.5 * (torch.cos(apart * torch.pi / 3) + 1) * (apart < 3)
        pair = mask.unsqueeze(1) & mask.unsqueeze(2) & ~torch.eye(mask.shape[1], dtype=torch.bool)
        w = self.filter(basis) * (cut * pair).unsqueeze(-1)
        x = x + torch.einsum("bijf,bjf->bif", w, self.lin(x))
        return F.mse_loss((self.out(x).squeeze(-1) * mask).sum(1), energy)


class Points(nn.Module):
    """PointNet: a transform of each sample, the largest over points, orthogonality of the transform."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.where = nn.Conv1d(3, 16, 1), nn.Linear(16, 9)
        self.body = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        one = torch.eye(3, dtype=x.dtype, device=x.device)
        t = self.where(self.turn(x).relu().max(2)[0]).view(-1, 3, 3) + one
        y = torch.bmm(x.transpose(1, 2), t).transpose(1, 2)
        apart = (one - t @ t.transpose(1, 2)).norm(dim=(1, 2)).mean()
        return F.cross_entropy(self.head(torch.max(self.body(y), 2)[0]), target) + 0.001 * apart


class EdgeConv(nn.Module):
    """DGCNN: neighbours by topk of distances, features gathered by flat indices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(6, 16, 1), nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        n, points, width = x.shape
        inner = x @ x.transpose(2, 1)
        square = (x**2).sum(-1, keepdim=True)
        near = (2 * inner - square - square.transpose(2, 1)).topk(4, dim=-1)[1]
        flat = (near + torch.arange(n, device=x.device).view(-1, 1, 1) * points).view(-1)
        around = x.reshape(n * points, -1)[flat].view(n, points, 4, width)
        here = x.unsqueeze(2).expand(-1, -1, 4, -1)
        y = self.conv(torch.cat([around - here, here], 3).permute(0, 3, 1, 2)).amax(-1)
        return F.cross_entropy(self.head(y.mean(-1)), target)


class SetTransformer(nn.Module):
    """Induced set attention and pooling by learnt seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.induce, self.seed = nn.Linear(4, 16), nn.Parameter(torch.randn(1, 4, 16)), nn.Parameter(torch.randn(1, 2, 16))
        self.a, self.b, self.c = (nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        x = self.embed(x)
        h, _ = self.a(self.induce.repeat(len(x), 1, 1), x, x, key_padding_mask=~mask)
        x = x + self.b(x, h, h, need_weights=False)[0]
        y, _ = self.c(self.seed.expand(len(x), -1, -1), x, x, key_padding_mask=~mask)
        return F.cross_entropy(self.head(y.flatten(1)), target)


class DeepSets(nn.Module):
    """Means of real elements by a mask; several outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.rho = mlp(4, 16, 16), mlp(32, 16, 3)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        h = self.phi(x) * mask.unsqueeze(-1)
        mean = h.sum(1) / mask.sum(1, keepdim=True)
        spread = ((h - mean.unsqueeze(1)).square() * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return {"out": self.rho(torch.cat([mean, spread], -1)), "mean": mean}


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
        return -F.logsigmoid(margin).mean() + 1e-2 * (u.norm(2).pow(2) + a.norm(2).pow(2) + b.norm(2).pow(2)) / len(user)


class Interest(nn.Module):
    """DIN: attention of a candidate over a history with padding; Dice activations."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.score, self.norm = nn.Embedding(32, 8, padding_idx=0), mlp(32, 16, 1), nn.BatchNorm1d(16, affine=False)
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
        self.body, self.norm = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True), nn.LayerNorm(16)

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
        self.norm, self.steps, self.attend = nn.BatchNorm1d(12), nn.ModuleList([nn.Linear(12, 32) for _ in range(2)]), nn.Linear(8, 12)
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
        self.pick, self.cut, self.leaf = nn.Parameter(torch.randn(12, 6, 3)), nn.Parameter(torch.zeros(6, 3)), nn.Parameter(torch.randn(6, 4, 8))
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


def _graph() -> Built:
    graph = torch.arange(NODES) // 3
    return GIN(), {"x": nodes(), "edge": edges(), "graph": graph, "target": rows()}


def _molecules() -> Built:
    given = {"z": ids(6, of=10), "place": rows(6, 3), "mask": some(6), "energy": rows()}
    return SchNet(), given


def _clicks() -> Tensor:
    return torch.randint(0, 2, (BATCH,)).double()


MODELS = {
    "gcn": lambda: (
        GCN(),
        {"x": nodes(), "edge": edges(), "label": torch.randint(0, 4, (NODES,)), "train": torch.rand(NODES) < 0.5},
    ),
    "gat": lambda: (GAT(), {"x": nodes(), "edge": edges(), "label": torch.randint(0, 4, (NODES,))}),
    "gin": _graph,
    "egnn": lambda: (EGNN(), {"x": nodes(), "place": nodes(3), "edge": edges(), "wanted": nodes(1)}),
    "schnet": _molecules,
    "pointnet": lambda: (Points(), {"x": rows(3, 20), "target": ids(of=8)}),
    "dgcnn": lambda: (EdgeConv(), {"x": rows(10, 3), "target": ids(of=8)}),
    "set-transformer": lambda: (SetTransformer(), {"x": rows(6, 4), "mask": some(6), "target": ids(of=8)}),
    "deep-sets": lambda: (DeepSets(), {"x": rows(6, 4), "mask": some(6)}),
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
