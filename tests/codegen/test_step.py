"""Split programs: the gradients of the whole batch from its microbatches, each parameter converted once a step."""

from collections import Counter

import pytest

from autopar.mesh import Mesh
from tests.codegen.split import accumulate, logits_case, microbatch, planned_collectives
from tests.codegen.training import AXES, plan_called, traced
from tests.workers import Ranks


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "shape", "kinds", "count"),
    [
        ("mlp", (4,), ("ddp", "zero2", "zero3", "random:1"), 2),
        ("gpt2", (2, 2), ("megatron", "random:2"), 4),
        ("mlp", (2, 2), ("random:3",), 1),
    ],
    ids=str,
)
def test_microbatches_add_up_to_the_batch(ranks4: Ranks, name: str, shape: tuple[int, ...], kinds: tuple[str, ...], count: int) -> None:
    graph = traced(microbatch(logits_case(name), 0, count))
    plans = {kind: plan_called(kind, graph, Mesh(shape, AXES[: len(shape)])) for kind in kinds}
    for reports in ranks4.run(accumulate, name, plans, count, timeout_s=240):
        for report in reports:
            plan = plans[report["kind"]]
            assert report["difference"] < 1e-9, report
            assert report["issued"] == planned_collectives(plan, count), report["kind"]
            in_gather, in_forward = (part.count(" B backward") for part in report["code"].split("def forward"))
            assert in_gather and (in_forward or report["kind"] in ("ddp", "zero2"))
    everything = sum((planned_collectives(plan, count) for plan in plans.values()), Counter())
    assert len({c.kind for c in everything}) > 1
