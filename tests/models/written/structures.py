"""Graphs and sets as people write them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.written.draws import Built, ids, mlp, rows, some

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
        self.lin, self.score, self.out = (
            nn.Linear(8, 16, bias=False),
            nn.Parameter(torch.randn(2, 4, 4)),
            nn.Linear(16, 4),
        )

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
        self.eps, self.one, self.norm, self.head = (
            nn.Parameter(torch.zeros(1)),
            mlp(8, 16, 16),
            nn.BatchNorm1d(16),
            nn.Linear(32, 1),
        )

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
        self.atoms, self.filter, self.lin, self.out = (
            nn.Embedding(10, 16),
            mlp(12, 16, 16),
            nn.Linear(16, 16),
            mlp(16, 16, 1),
        )
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
        self.embed, self.induce, self.seed = (
            nn.Linear(4, 16),
            nn.Parameter(torch.randn(1, 4, 16)),
            nn.Parameter(torch.randn(1, 2, 16)),
        )
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


def _graph() -> Built:
    graph = torch.arange(NODES) // 3
    return GIN(), {"x": nodes(), "edge": edges(), "graph": graph, "target": rows()}


def _molecules() -> Built:
    given = {"z": ids(6, of=10), "place": rows(6, 3), "mask": some(6), "energy": rows()}
    return SchNet(), given


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
}
