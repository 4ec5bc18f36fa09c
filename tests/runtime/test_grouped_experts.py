"""Mixtures of experts in torchtitan's own forms train as one device does, their rows exchanged by expert."""

import pytest

from autopar.mesh import Mesh
from autopar.sbp.analysis.expert_routing import num_exchanged
from tests.grouped_experts import GROUPED
from tests.runtime.any_plan import all_gradients_arrive
from tests.runtime.as_priced import are_as_priced
from tests.runtime.test_local_routing import TOLERANCE, built, plan_called, train_under
from tests.runtime.training import traced
from tests.workers import Ranks

KINDS = {(4,): ("megatron:ep=4,zero2",), (2, 2): ("zero3", "megatron:dp=2,tp=2,ep=2")}


@pytest.mark.multirank
@pytest.mark.parametrize("shape", KINDS, ids=str)
@pytest.mark.parametrize("name", GROUPED)
def test_trains_like_one_device(ranks4: Ranks, name: str, shape: tuple[int, ...]) -> None:
    graph, mesh = traced(built(name, 4)), Mesh(shape, ("dp", "tp")[: len(shape)])
    assert num_exchanged(graph) == 4
    is_exact = all_gradients_arrive(graph)
    plans = {kind: plan_called(kind, graph, mesh) for kind in KINDS[shape]}
    for reports in zip(*ranks4.run(train_under, name, 4, plans)):
        assert all(report["found"][0] < TOLERANCE for report in reports), reports
        assert any(one.kind == "all_to_all" for one in reports[0]["issued"]) == ("ep=" in reports[0]["kind"])
        assert are_as_priced(reports, is_exact=is_exact), reports
