"""Loops over experts train on several ranks as on one device: each rank's own rows, and rows exchanged by expert."""

import pytest

from autopar.mesh import Mesh
from tests.expert_loops import LOOPS
from tests.runtime.any_plan import all_gradients_arrive
from tests.runtime.as_priced import are_as_priced
from tests.runtime.test_local_routing import TOLERANCE, built, exchanges, plan_called, train_under
from tests.runtime.training import traced
from tests.workers import Ranks

KINDS = {
    (4,): ("ddp", "zero3", "megatron:ep=4,zero2", "searched"),
    (2, 2): ("megatron:dp=2,tp=2,ep=2", "megatron:ep=2"),
}


@pytest.mark.multirank
@pytest.mark.parametrize("shape", KINDS, ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_trains_like_one_device(ranks4: Ranks, name: str, shape: tuple[int, ...]) -> None:
    num_layers, mesh = 3, Mesh(shape, ("dp", "tp")[: len(shape)])
    graph = traced(built(name, num_layers))
    plans = {kind: plan_called(kind, graph, mesh) for kind in KINDS[shape]}
    assert all(exchanges(plan) for kind, plan in plans.items() if "ep" in kind)
    is_exact = all_gradients_arrive(graph)
    for reports in zip(*ranks4.run(train_under, name, num_layers, plans)):
        assert all(report["found"][0] < TOLERANCE for report in reports), reports
        assert are_as_priced(reports, is_exact=is_exact), reports
