"""Arguments of which not all are rows of the batch, or whose rows are read in another order, in microbatches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import MicrobatchError
from autopar.ir.trace import trace
from autopar.sbp.microbatch.microbatch_graph import microbatch_counts, microbatched
from tests.sbp.microbatch.test_microbatch_graph import check

Tensor = torch.Tensor


class Operators(nn.Module):
    """A net of functions and one of points, of which all samples have the same ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_points, self.of_functions = nn.Linear(2, 6), nn.Linear(5, 6)

    def forward(self, points: Tensor, functions: Tensor, target: Tensor) -> Tensor:
        values = torch.einsum("bk,pk->bp", self.of_functions(functions).tanh(), self.of_points(points).tanh())
        return ((values - target).square() * (1 + (points[:, 0] > 0).to(values.dtype))).mean()


@pytest.mark.parametrize("num_points", [10, 8])  # eight, by chance, as samples
def test_points_that_all_samples_share_are_no_batch(num_points: int) -> None:
    points, functions, target = torch.randn(num_points, 2), torch.randn(8, 5), torch.randn(8, num_points)
    check(Operators().double(), (points.double(), functions.double(), target.double()), {}, counts=(2, 4))


def test_of_arguments_that_are_no_rows_nothing_is_split() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.layer(x).softmax(0) * self.layer(y).softmax(0)).sum()

    graph = trace(Alike(), (torch.randn(8, 5), torch.randn(8, 5)), {})
    assert microbatch_counts(graph) == (1,)
    with pytest.raises(MicrobatchError, match="softmax"):
        microbatched(graph, 2)


def mixed(x: Tensor, label: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return 0.3 * x + 0.7 * x[order], label[order]


def rolled(x: Tensor, label: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return 0.3 * x + 0.7 * x.roll(1, 0), label.flip(0)


def alike(x: Tensor, label: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Each row with the mean of those that have its label."""
    same = (label[:, None] == label).to(x.dtype)
    return x + same @ x / same.sum(1, keepdim=True), (label + order.argsort()) % 4


@pytest.mark.parametrize("how", [mixed, rolled, alike], ids=lambda how: how.__name__)
def test_rows_of_arguments_are_mixed_before(how) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(5, 4)

        def forward(self, x: Tensor, label: Tensor, order: Tensor) -> Tensor:
            x, other = how(x, label, order)
            y = self.layer(x)
            return 0.3 * F.cross_entropy(y, label) + 0.7 * F.cross_entropy(y, other)

    label, order = torch.tensor([3, 1, 1, 0, 2, 2, 3, 0]), torch.tensor([5, 0, 7, 1, 2, 6, 4, 3])
    check(Mixed().double(), (torch.randn(8, 5).double(), label, order), {}, counts=(2, 4))
