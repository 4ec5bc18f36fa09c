import pytest

from autopar.answers.best_plans import best_plans
from autopar.answers.questions import why, why_not_by_hand, why_not_pinned
from autopar.errors import AutoparError
from autopar.planner.handwritten.hand_plan import hand_plan, parse_hand_plan
from autopar.plans.plan import plan_of
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import format_layout
from tests.answers.asked_plans import CLUSTER, asked

WEIGHT = "blocks.1.0.weight"


def stored(plan, fqn):
    name = next(item.value.name for item in plan.graph.inputs if item.fqn == fqn)
    return format_layout(plan.assignment.layouts[name])


def check_terms(answer):
    found = answer.comparison
    change_s = answer.other.step_s - answer.plan.step_s
    assert sum(after - before for before, after in found.terms_s.values()) == pytest.approx(change_s, abs=1e-9)
    rows_s = sum(row.change_s for row in (*found.rows, *found.followed))
    update = found.terms_s["update"]
    assert rows_s + update[1] - update[0] == pytest.approx(change_s, abs=1e-9)


def copies(ask):
    """FQNs of the copies of WEIGHT; the first block, which needs no gradient of its input, is none."""
    fqns = {item.value.name: item.fqn for item in ask.graph.inputs}
    name = next(name for name, fqn in fqns.items() if fqn == WEIGHT)
    return [fqns[each] for each in ask.copies(name)]


def test_without_a_layout_the_best_plan_is_the_best_with_any_other():
    # the independent truth: a plan for each other layout, pinned
    ask = asked("dp=2,tp=2")
    answer, fqns, chosen = why(ask, WEIGHT), copies(ask), stored(ask.plan, WEIGHT)
    assert len(fqns) >= 3
    layouts = [a + b for a in ("B", "S(0)", "S(1)") for b in ("B", "S(0)", "S(1)")]
    steps = [ask.again(pins=dict.fromkeys(fqns, text)).step_s for text in layouts if text != chosen]
    assert answer.other.step_s == pytest.approx(min(steps), rel=1e-9) or answer.other.step_s < min(steps)
    assert all(stored(answer.other, fqn) != chosen for fqn in fqns)
    assert answer.other.step_s >= ask.plan.step_s
    check_terms(answer)


@pytest.mark.parametrize("name", ["head", "blocks.2", "%linear", "head.bias"])
def test_every_kind_of_name_is_answered(name):
    answer = why(asked("dp=2,tp=2"), name)
    assert answer.other is not None and answer.other.step_s >= answer.plan.step_s
    check_terms(answer)
    assert (name in str(answer) and "more a step" in str(answer)) or "tie" in str(answer)


def test_a_collective_is_asked_about():
    ask = asked("dp=2,tp=2")
    kinds = {planned.collective.kind: planned for planned in ask.plan.costs.collectives}
    kind, planned = next(iter(kinds.items()))
    answer = why(
        ask,
        f"%{planned.where}:{kind}"
        if planned.where in {op.name for op in ask.graph.ops}
        else f"{fqn(ask, planned.where)}:{kind}",
    )
    assert answer.other is not None and answer.other.step_s >= ask.plan.step_s and kind in answer.question
    check_terms(answer)
    with pytest.raises(AutoparError, match=r"the plan has no broadcast.*its collectives there: "):
        why(ask, "%linear:broadcast")


def fqn(ask, name):
    return next(item.fqn for item in ask.graph.inputs if item.value.name == name)


def test_a_question_about_stages():
    ask = asked("pp=2,dp=2")
    answer, fqns = why(ask, WEIGHT), set(copies(ask))
    before, after = (
        {
            format_layout(stage.assignment.layouts[item.value.name])
            for stage in plan.stages
            for item in stage.graph.inputs
            if item.fqn in fqns
        }
        for plan in (ask.plan, answer.other)
    )
    assert before and after and not before & after
    change_s = answer.other.step_s - ask.plan.step_s
    assert sum(b - a for a, b in answer.comparison.terms_s.values()) == pytest.approx(change_s, abs=1e-9)


def test_why_not_a_layout_and_a_hand_plan():
    ask = asked("dp=2,tp=2")
    pinned = why_not_pinned(ask, "head.weight", "BB")
    assert stored(pinned.other, "head.weight") == "BB"
    check_terms(pinned)
    mesh, folded = ask.plan.mesh, ask.folded
    assignment = hand_plan(parse_hand_plan("ddp", mesh), ask.graph, folded, annotate(ask.graph, mesh, folded), mesh)
    tight = plan_of(ask.graph, assignment, mesh, CLUSTER, memory_limit_bytes=1000)
    answer = why_not_by_hand(ask, "ddp", tight)
    assert "it would fit" in answer.sentence and "exceeds the limit" in answer.sentence
    check_terms(answer)


def test_memory_that_does_not_bind_is_worth_nothing_and_memory_that_does_is():
    ask = asked("dp=2,tp=2")
    assert "saves nothing" in why(ask, "memory").sentence


def test_a_name_that_does_not_exist_is_told_the_nearest():
    with pytest.raises(AutoparError, match=r"blocks\.1\.0\.weigth.*close to it: blocks\.\d\.0\.weight"):
        why(asked("dp=2,tp=2"), "blocks.1.0.weigth")


def test_a_pin_of_a_name_without_its_first_modules_is_told_the_nearest():
    with pytest.raises(AutoparError, match=r"0\.wieght.*close to it: blocks\.\d\.\d\.weight"):
        why_not_pinned(asked("dp=2,tp=2"), "0.wieght", "BB")


def test_the_best_plans_differ_in_the_axes_that_split_parameters():
    ask = asked("dp=2,tp=2")
    plans = best_plans(ask, 4).plans
    steps = [each.plan.step_s for each in plans]
    assert plans[0].plan is ask.plan and steps == sorted(steps) and len(plans) == 4
    assert len({each.differs for each in plans}) == 4 and not plans[0].differs
    # the second best changes one class of parameters only in the sense of Lawler: no plan that changes one is faster
    singles = [why(ask, fqn).other.step_s for fqn in ("blocks.0.0.weight", "blocks.0.2.weight")]
    assert steps[1] >= min(steps[0], *singles) - 1e-12


def test_plans_that_split_the_same_on_a_mesh_of_other_names_are_one():
    """And one layer of a class that differs makes no other plan: what is told is how most of it is split."""
    ask = asked("4")
    elsewhere = asked("n0=2,d0=2").plan
    plans = best_plans(ask, 4, [elsewhere]).plans
    assert plans[0].plan is ask.plan and not plans[0].differs
    told = [each.differs for each in plans[1:]]
    assert told and all(": " in text and " not " in text for text in told)  # a mesh alone is no difference
    assert len(set(told)) == len(told)
