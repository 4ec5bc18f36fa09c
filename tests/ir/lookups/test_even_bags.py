"""Lookups of bags of one size: an op of its own, in microbatches too; others stay lists with offsets."""

import pytest
import torch
from torch import nn

from autopar.ir.lookups.even_bags import EVEN_BAGS
from autopar.ir.trace import trace
from tests.sbp.microbatch.test_microbatch_graph import check

IDS = torch.tensor([[0, 7, 3], [5, 1, 2], [0, 0, 0], [6, 6, 0]])


class Bags(nn.Module):
    """The mean square of what `function` makes of a table of eight rows, ids and weights."""

    def __init__(self, mode: str, padding: int | None, is_weighted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.is_weighted = nn.EmbeddingBag(8, 6, mode=mode, padding_idx=padding), is_weighted
        self.head = nn.Linear(6, 2)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids, per_sample_weights=weights if self.is_weighted else None)).square().mean()


@pytest.mark.parametrize(
    ("mode", "padding", "is_weighted"),
    [("sum", None, True), ("sum", 0, False), ("mean", 0, False), ("max", None, False)],
)
def test_bags_of_one_size_in_microbatches(mode: str, padding: int | None, is_weighted: bool) -> None:
    model, args = Bags(mode, padding, is_weighted).double(), (IDS, torch.rand(4, 3).double())
    check(model, args, {}, counts=(2, 4))
    targets = [op.target for op in trace(model, args, {}).ops]
    assert EVEN_BAGS in targets and "aten.reshape.default" not in targets


def test_other_bags_keep_their_offsets() -> None:
    table = nn.EmbeddingBag(8, 6)
    for args in ((IDS.flatten(), torch.tensor([0, 3, 5, 9])), (IDS.flatten(), torch.tensor([0, 3, 6, 9]))):
        assert EVEN_BAGS not in [op.target for op in trace(table, args, {}).ops]
