"""Plans in stages and microbatches train as one device does: every schedule, on real processes."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from autopar.plans.staged_plan import StagedPlan
from tests.runtime.staged import plan_of_sample, sample, train_under, with_any_layouts
from tests.workers import Ranks

pytestmark = pytest.mark.multirank

# Of a loss and gradients relative to the largest entry: transformers computes some norms and losses in float32.
EXACT = {True: 1e-9, False: 1e-5}
Job = tuple[str, int, str, int, str | None]  # model, blocks, mesh, microbatches, schedule
SEEDS = {"gpt2": 1, "llama": 2, "t5": 3, "vit": 4}


def jobs_of(cases: Sequence[Job]) -> list[tuple[dict[str, Any], StagedPlan]]:
    jobs = []
    for name, blocks, mesh, num_microbatches, schedule in cases:
        options = {"name": name, "blocks": blocks, "has_loss_fn": name == "gpt2"}
        jobs.append((options, plan_of_sample(sample(**options), mesh, num_microbatches, schedule)))
    return jobs


def check(ranks: Ranks, cases: Sequence[Job], *, has_any_layouts: bool = False) -> None:
    jobs = jobs_of(cases)
    if has_any_layouts:
        jobs = [(options, with_any_layouts(plan, SEEDS[options["name"]])) for options, plan in jobs]
    for case, (_, plan) in zip(cases, jobs):
        num_ranks = int((re.search(r"pp=(\d)", case[2]) or ["", "1"])[1])
        assert (plan.schedule.num_ranks, plan.schedule.num_microbatches) == (num_ranks, case[3])
    results = ranks.run(train_under, jobs)
    for number, (case, (_, plan)) in enumerate(zip(cases, jobs)):
        reports = [result[number] for result in results]
        limit = EXACT[case[0] not in ("llama", "t5")]
        for report in reports:
            assert max(report["first"], report["last"])[0] < limit, (
                case,
                report["rank"],
                report["first"],
                report["last"],
            )
            assert report["issued"] == report["planned"], (
                case,
                report["issued"] - report["planned"],
                report["planned"] - report["issued"],
            )
            assert report["issued"] and report["local"] < 0.9, "the plan must split tensors"
        everything = set.union(*(report["own"] for report in reports))
        assert everything == {name for name, _ in sample(case[0], blocks=case[1]).model.named_parameters()}, case
        if plan.schedule.num_ranks > 1:
            assert all(report["own"] < everything for report in reports), "each rank holds its own stages only"


@pytest.mark.parametrize(
    ("mesh", "num_microbatches", "schedule"),
    [
        ("pp=2,dp=2", 4, "1f1b"),
        ("pp=2,tp=2", 8, "zero-bubble"),
        ("pp=2,tp=2", 4, "interleaved"),
        ("pp=2,dp=2", 1, "gpipe"),
        ("pp=2,tp=2", 2, "1f1b"),
    ],
)
def test_every_schedule(ranks4: Ranks, mesh: str, num_microbatches: int, schedule: str) -> None:
    check(ranks4, [("gpt2", 5, mesh, num_microbatches, schedule)])


def test_models(ranks4: Ranks) -> None:
    dp, tp = "pp=2,dp=2", "pp=2,tp=2"
    check(
        ranks4,
        [
            ("llama", 5, dp, 4, "interleaved"),
            ("llama", 4, tp, 2, "zero-bubble"),
            ("t5", 4, dp, 4, "1f1b"),
            ("t5", 4, tp, 2, "interleaved"),
            ("vit", 5, dp, 2, "gpipe"),
            ("vit", 4, tp, 8, "1f1b"),
        ],
    )


def test_a_model_that_is_odd_in_every_way(ranks4: Ranks) -> None:
    cases = [
        ("pp=2,dp=2", 4, "1f1b"),
        ("pp=2,tp=2", 2, "interleaved"),
        ("pp=2,dp=2", 2, "zero-bubble"),
        ("dp=2,tp=2", 4, None),
    ]
    check(ranks4, [("odd", 5, *case) for case in cases] + [("batch norm", 6, "pp=2,dp=2", 1, "gpipe")])


@pytest.mark.slow
def test_three_axes(ranks8: Ranks) -> None:
    mesh = "pp=2,dp=2,tp=2"
    check(
        ranks8,
        [
            ("gpt2", 5, mesh, 4, "zero-bubble"),
            ("llama", 4, mesh, 2, "1f1b"),
            ("t5", 4, mesh, 2, "1f1b"),
            ("vit", 4, mesh, 4, "interleaved"),
        ],
    )


def test_microbatches_without_stages(ranks4: Ranks) -> None:
    check(ranks4, [("gpt2", 4, "dp=2,tp=2", 4, None), ("vit", 4, "dp=4", 2, None)])


def test_any_layouts(ranks4: Ranks) -> None:
    dp, tp = "pp=2,dp=2", "pp=2,tp=2"
    check(
        ranks4,
        [
            ("gpt2", 5, tp, 2, "interleaved"),
            ("llama", 4, dp, 4, "1f1b"),
            ("t5", 4, dp, 2, "zero-bubble"),
            ("vit", 4, tp, 2, "gpipe"),
        ],
        has_any_layouts=True,
    )
