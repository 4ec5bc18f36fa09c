from dataclasses import replace

import pytest

from autopar.answers.plan_rows import plan_rows
from autopar.answers.step_terms import BUBBLE, HIDDEN, UPDATE, memory_terms, step_terms
from autopar.mesh import parse_mesh
from autopar.planner.choose import choose_plan
from tests.answers.asked_plans import CLUSTER, asked, graph


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,dp=2", "pp=2,dp=2,tp=2"])
def test_terms_sum_to_the_step(mesh):
    plan = asked(mesh).plan
    terms = step_terms(plan)
    assert sum(terms.values()) == pytest.approx(plan.step_s, abs=1e-12)
    assert all(seconds >= -1e-12 for seconds in terms.values())
    assert (terms.get(BUBBLE, 0.0) > 0) == mesh.startswith("pp")
    assert sum(memory_terms(plan).values()) == max(plan.memory_bytes)


def test_terms_have_what_is_hidden():
    plan = choose_plan(graph(), parse_mesh("4"), replace(CLUSTER, overlap=0.9))
    mesh = choose_plan(graph(), parse_mesh("dp=4"), replace(CLUSTER, overlap=0.9))
    for each in (plan, mesh):
        assert sum(step_terms(each).values()) == pytest.approx(each.step_s, abs=1e-12)
    assert step_terms(mesh).get(HIDDEN, 0.0) == pytest.approx(-mesh.costs.hidden_s)


def test_rows_and_update_are_the_step():
    plan = asked("dp=2,tp=2").plan
    seconds = sum(row.time_s for row in plan_rows(plan).values())
    assert seconds + step_terms(plan)[UPDATE] == pytest.approx(plan.step_s, abs=1e-12)
