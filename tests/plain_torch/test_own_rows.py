"""Models whose results on parts of a batch have no mean that is theirs are refused by name; the model itself is run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import PlanError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.plain_torch.module_calls import ExampleRun
from autopar.plain_torch.own_rows import check_own_rows

ROWS, CLASSES, PARTS = 8, 5, 4
LOSSES = {
    "mean": F.cross_entropy,
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "sum over its rows": lambda x, y: F.cross_entropy(x, y, reduction="sum") / len(y),
    "sum over rows known by heart": lambda x, y: F.cross_entropy(x, y, reduction="sum") / ROWS,
    "sum times a number": lambda x, y: F.cross_entropy(x, y, reduction="sum") * (1 / x.shape[0]),
    "mean of squares": lambda x, y: 3 * x.square().mean() - x.mean() / 2,
    "mean and sum": lambda x, y: x.square().mean() + x.sum(),
    "mean over classes, sum over rows": lambda x, y: x.square().mean(-1).sum(),
    "root of a mean": lambda x, y: x.square().mean().sqrt(),
    "rows with rows": lambda x, y: F.cross_entropy(x @ x.T, torch.arange(len(x))),
    "numbers of rows": lambda x, y: (x * torch.arange(len(x)).unsqueeze(1)).mean(),
    "the same for all rows": lambda x, y: (x * torch.ones(len(x), 1)).mean(),
    "less the mean row": lambda x, y: (x - x.mean(0)).square().mean(),
    "above the largest label": lambda x, y: (x * (torch.arange(CLASSES) < y.max())).mean(),
    "by the spread of labels": lambda x, y: (x.square() / ((y * y * y).float().std() + 1)).mean(),
    "largest of a column": lambda x, y: x.logsumexp(0).mean(),
    "weights": lambda x, y: F.cross_entropy(x, y, weight=torch.linspace(0.1, 2, CLASSES)),
    "none counts": lambda x, y: F.cross_entropy(x, y, ignore_index=1),
    "counted by hand": lambda x, y: (F.cross_entropy(x, y, reduction="none") * (y != 1)).sum() / (y != 1).sum(),
    "counted by hand, one at least": lambda x, y: (
        (F.cross_entropy(x, y, reduction="none") * (y != 1)).sum() / (y != 1).sum().clamp(min=1)
    ),
    "counted in a weight": lambda x, y: (
        F.cross_entropy(x, y, reduction="none") * ((y != 1) / (y != 1).float().sum())
    ).sum(),
    "picked rows": lambda x, y: F.cross_entropy(x[y != 1], y[y != 1]),
    "mean of picked rows": lambda x, y: x[y != 1].square().mean(),
    "mean of samples that are sums": lambda x, y: F.mse_loss(x, torch.ones_like(x), reduction="sum") / x.size(0),
}


class Net(nn.Module):
    def __init__(self, loss: str, penalty: float = 0.0) -> None:
        super().__init__()
        self.loss, self.penalty = loss, penalty
        self.one, self.two = nn.Linear(6, 7), nn.Linear(7, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = LOSSES[self.loss](self.two(self.one(x).relu()), y)
        return loss + self.penalty * sum(p.square().sum() for p in self.parameters()) if self.penalty else loss


def example(*given: object) -> tuple[Net, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Net(*given), torch.randn(ROWS, 6), torch.arange(ROWS) % CLASSES


def refusal(model: nn.Module, *args: torch.Tensor) -> tuple[str, tuple[str, ...]]:
    """(why it is refused, remarks)."""
    graph = trace(skeleton(model), args, {})
    try:
        return "", check_own_rows(graph, PARTS, ExampleRun(skeleton(model), args, {}, [graph]))
    except PlanError as error:
        return str(error), ()


@pytest.mark.parametrize("penalty", (0.0, 0.1))
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_refused_if_and_only_if_the_mean_of_its_parts_is_another_one(loss, penalty):
    model, x, y = example(loss, penalty)
    parts = [model(*rows) for rows in zip(x.chunk(PARTS), y.chunk(PARTS))]
    is_mean = torch.allclose(torch.stack(parts).mean(), model(x, y), rtol=1e-5)
    told, remarks = refusal(model, x, y)
    if told:
        assert not is_mean and "test_own_rows.py" in told, told
    else:
        assert is_mean or any("if each has as many labels" in one for one in remarks)


def test_a_loss_whose_labels_all_count_depends_on_no_count():
    assert refusal(*example("mean of squares")) == ("", ())


class Normed(nn.Module):
    def __init__(self, by: nn.Module) -> None:
        super().__init__()
        self.by, self.last = by, nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.by(x)).square().mean()


class OwnNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, training=True)


def test_batch_norm_is_told_and_one_that_torch_cannot_join_refused():
    x = torch.randn(ROWS, 6)
    told, remarks = refusal(Normed(nn.BatchNorm1d(6)), x)
    assert not told and "SyncBatchNorm" in remarks[0] and "trains another model" in remarks[0]
    assert "SyncBatchNorm for modules" in refusal(Normed(OwnNorm()), x)[0]
    assert refusal(Normed(nn.BatchNorm1d(6).eval()), x) == ("", ())
