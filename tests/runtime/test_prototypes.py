"""Expert prototyping (examples/experts.py) is planned and run, with the bytes as derived, as top-k at equal work."""

from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.plans.plan import Plan
from tests.runtime.as_priced import are_as_priced
from tests.runtime.test_local_routing import TOLERANCE
from tests.runtime.training import forward_backward, issued, plan_called, planned, under, worst
from tests.workers import Ranks, device_mesh
from tests.zoo import Case

LAYERS, BATCH, SEQUENCE, RANKS = 4, 8, 32, 4
KINDS = [("prototypes", 1), ("prototypes", 2), ("prototypes", 4), ("top", 2)]


def experts() -> Any:
    spec = spec_from_file_location("experts", Path(__file__).parents[2] / "examples/experts.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def case_of(kind: str, k: int) -> Case:
    model, args, kwargs = experts().example(kind, k, layers=LAYERS, batch=BATCH, sequence=SEQUENCE)
    return Case(model, args, kwargs, lambda loss: loss)


def by_expert(kind: str, k: int) -> Plan:
    """Experts divided among as many ranks as each group allows."""
    case, num = case_of(kind, k), min(RANKS, 8 // k if kind == "prototypes" else 8)
    mesh = Mesh((RANKS // num, num), ("dp", "ep"))
    return plan_called(f"ep={num}", trace(case.model, case.args, case.kwargs), mesh)


@pytest.mark.parametrize(("kind", "k"), KINDS)
def test_rows_are_exchanged_as_derived(kind: str, k: int) -> None:
    """To the experts and back, in forward and backward: 2 x 2 x tokens x hidden x k, of which (n - 1) / n leave."""
    sent = sum(
        each.num_bytes * n for each, n in Counter(planned(by_expert(kind, k))).items() if each.kind == "all_to_all"
    )
    tokens = BATCH * SEQUENCE // RANKS
    assert sent == LAYERS * 2 * 2 * tokens * experts().HIDDEN * k * 4


def train(kind: str, k: int, plan: Plan) -> dict[str, Any]:
    mesh = device_mesh(plan.mesh.shape, plan.mesh.axis_names)
    case = under(plan, case_of(kind, k), mesh)
    found = worst(forward_backward(case), forward_backward(case_of(kind, k)), 1e-6)
    return {"found": found, "issued": issued(case, mesh), "planned": Counter(planned(plan))}


@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "k"), KINDS)
def test_trains_like_one_device(ranks4: Ranks, kind: str, k: int) -> None:
    reports = ranks4.run(train, kind, k, by_expert(kind, k))
    assert all(report["found"][0] < TOLERANCE for report in reports), reports
    assert are_as_priced(reports, is_exact=True), reports
