"""Random numbers in microbatches and stages: other ones for each sample and layer, the same where the whole batch
shares them.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.plans.staged_plan import StagedPlan
from tests.runtime.staged import Sample, gradients, plan_of_sample, under
from tests.workers import Ranks

pytestmark = pytest.mark.multirank

NUM, WIDTH, LAYERS, DROPPED = 16, 128, 4, 0.25


class Masks(nn.Module):
    """Its gradients are the masks of its dropouts: sample b reads row b of each layer's `scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(NUM, WIDTH))
        self.scales = nn.ParameterList(torch.ones(NUM, WIDTH) for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = rows @ self.first
        for scale in self.scales:
            x = x + F.dropout(rows @ scale, DROPPED)
        return x.sum()


class Dropped(nn.Module):
    """Its weight loses entries, for the whole batch alike."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, F.dropout(self.weight, DROPPED)).sum()


def masks_case() -> Sample:
    return Sample(Masks(), (torch.eye(NUM),), {}, None)


def dropped_case() -> Sample:
    return Sample(Dropped(), (torch.ones(NUM, WIDTH),), {}, None)


CASES = {"masks": masks_case, "dropped": dropped_case}


def two_steps(name: str, plan: StagedPlan) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    case = CASES[name]()
    model = under(plan, case)
    found = []
    for _ in range(2):
        model.zero_grad()
        model.train_step(*case.args)
        found.append(gradients(model))
    return found


@pytest.mark.parametrize(("mesh", "schedule"), [("pp=2,dp=2", "1f1b"), ("dp=4", None)])
def test_dropout_differs_between_microbatches_stages_and_steps(ranks4: Ranks, mesh: str, schedule: str | None) -> None:
    plan = plan_of_sample(masks_case(), mesh, 4, schedule)
    results = ranks4.run(two_steps, "masks", plan)
    rows = []
    for step in range(2):
        merged: dict[str, torch.Tensor] = {}
        for result in results:
            for name, mask in result[step].items():
                assert torch.equal(merged.setdefault(name, mask), mask), "ranks that hold the same parameter agree"
        del merged["first"]
        assert len(merged) == LAYERS
        rows += [row for mask in merged.values() for row in mask]
    kept = torch.stack(rows)[torch.stack(rows) != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - DROPPED)))
    dropped = torch.stack(rows) == 0
    assert abs(float(dropped.double().mean()) - DROPPED) < 0.02
    same = [(dropped[i] == dropped[j]).double().mean() for i in range(len(rows)) for j in range(i)]
    assert max(same) < 0.9, "two samples, layers or steps drew the same numbers"


def test_what_the_batch_shares_is_dropped_alike_in_all_microbatches(ranks4: Ranks) -> None:
    plan = plan_of_sample(dropped_case(), "dp=2,tp=2", 4)
    results = ranks4.run(two_steps, "dropped", plan)
    for step in range(2):
        found = results[0][step]["weight"]
        assert all(torch.equal(result[step]["weight"], found) for result in results)
        expected = torch.where(found == 0, 0.0, NUM / (1 - DROPPED))
        torch.testing.assert_close(found, expected)
        assert abs(float((found == 0).double().mean()) - DROPPED) < 0.02
    assert not torch.equal(results[0][0]["weight"], results[0][1]["weight"])
