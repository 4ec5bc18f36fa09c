"""One deadline for all of planning, and Ctrl-C."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import InfeasibleError, MicrobatchError
from autopar.explain.batch_size import notes
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_devices
from autopar.models.catalogue import build_model
from autopar.peak_memory.predict import rank_peaks
from autopar.planner import choose, fit_memory
from autopar.planner.budget import Budget, Interrupted
from autopar.planner.choose import choose_plan
from autopar.planner.fit_memory import AnyPlan
from autopar.planner.pipeline import search_stages
from autopar.planner.pipeline.stage_tables import RankTask, SolvedStages
from autopar.planner.pipeline.wanted_stages import StagePlans, Stages
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.sbp.placement import format_layout
from autopar.search.deadline import Deadline


@pytest.fixture(scope="module")
def graph() -> Callable[..., Graph]:
    made: dict[tuple, Graph] = {}

    def graph_of(name: str, **sizes: int) -> Graph:
        key = (name, *sorted(sizes.items()))
        if key not in made:
            example = build_model(name, **sizes)
            made[key] = trace(skeleton(example.model), example.args, dict(example.kwargs))
        return made[key]

    return graph_of


def test_a_part_ends_with_the_whole():
    whole = Deadline.after(100.0)
    half = whole.part(0.5)
    assert 49.0 < half.remaining_s <= 50.0 and 24.0 < half.part(0.5).remaining_s <= 25.0
    inner = half.part(1.0)
    half.stop()
    assert half.is_past and inner.is_past and not whole.is_past
    assert Deadline.after(0.0).is_past and not Deadline().part(0.5).is_past


@pytest.mark.parametrize("time_limit_s", [0.0, 6.0])
def test_planning_that_cannot_fit_or_hardly_can_ends_in_time(graph: Callable[..., Graph], time_limit_s: float):
    whole = graph("gpt2", layers=4)
    start = time.process_time()
    with pytest.raises(InfeasibleError, match=r"lightest hand plan|in the time|predicted peak"):
        request = PlanRequest(memory_limit_bytes=2**27, time_limit_s=time_limit_s)
        choose_plan(whole, parse_devices("2x4"), load_cluster("h100"), request, predict=rank_peaks)
    assert time.process_time() - start < 1.2 * time_limit_s + 12.0  # without a deadline it takes minutes


@pytest.mark.parametrize("mesh", ["8", "2x4", "pp=2,dp=4"])
def test_without_time_a_plan_by_hand_that_fits_is_returned(graph: Callable[..., Graph], mesh: str):
    whole, cluster = graph("gpt2", layers=4), load_cluster("v100")
    plan = choose_plan(whole, parse_devices(mesh), cluster, PlanRequest(time_limit_s=0.0), predict=rank_peaks)
    assert plan.found_by.startswith("hand plan ") and max(plan.peak_bytes) <= plan.memory_limit_bytes
    assert 0 < plan.lower_bound_s <= plan.step_s
    assert f"found by {plan.found_by}" in plan.explain()


def test_without_time_parameters_that_lie_as_no_plan_by_hand_has_them_stay(graph: Callable[..., Graph]):
    """As for a call of other shapes, such as the first one in eval mode."""
    whole, cluster = graph("gpt2", layers=4), load_cluster("v100")
    stored = {item.fqn: ("BS(0)", "S(0)B")[number % 2] for number, item in enumerate(whole.of_kind("parameter"))}
    request = PlanRequest(time_limit_s=0.0, stored=stored, num_microbatches=1, memory_limit_bytes=2.0**40)
    plan = choose_plan(whole, parse_devices("2x2"), cluster, request, predict=rank_peaks)
    found = {item.fqn: format_layout(plan.assignment.layouts[item.value.name]) for item in whole.of_kind("parameter")}
    assert found == stored and max(plan.peak_bytes) > 0


@pytest.mark.parametrize("mesh", ["8", "2x4", "pp=2,dp=4"])
def test_after_the_deadline_lighter_plans_by_hand_are_tried(graph: Callable[..., Graph], mesh: str):
    whole, mesh, cluster = graph("gpt2", layers=4), parse_devices(mesh), load_cluster("v100")
    plentiful = choose_plan(whole, mesh, cluster, PlanRequest(memory_limit_bytes=float("inf"), time_limit_s=0.0))
    limit, asked = 0.9 * max(plentiful.memory_bytes), []

    def first_is_too_large(plan: AnyPlan) -> tuple[int, ...]:
        asked.append(max(plan.memory_bytes))
        return tuple(round(1.1 * limit) if size > 0.97 * asked[0] else size for size in plan.memory_bytes)

    plan = choose_plan(
        whole, mesh, cluster, PlanRequest(memory_limit_bytes=limit, time_limit_s=0.0), predict=first_is_too_large
    )
    assert len(asked) > 1 and max(plan.peak_bytes) <= 0.97 * asked[0] and "ended by its time limit" in plan.found_by


def test_what_is_named_as_least_memory_is_not_above_what_microbatches_need(graph: Callable[..., Graph]):
    """Without microbatches 10 GiB are the least; the error names what all plans need."""
    whole, mesh, cluster = graph("gpt2", layers=4), parse_devices("2x4"), load_cluster("h100")

    def planned(limit: float):
        return choose_plan(
            whole, mesh, cluster, PlanRequest(memory_limit_bytes=limit, time_limit_s=20.0), predict=rank_peaks
        )

    with pytest.raises(InfeasibleError, match="microbatches") as refused:
        planned(2**28)
    named = float(str(refused.value).split("lightest hand plan")[1].split("needs ")[1].split(" bytes")[0])
    assert max(planned(1.25 * named).peak_bytes) <= 1.25 * named


def test_a_plan_of_one_stage_keeps_its_bound_and_timings(graph: Callable[..., Graph]):
    request = PlanRequest(time_limit_s=10.0)
    whole = graph("gpt2", layers=4)
    gc.disable()  # a collection of what planning and other tests left may come once the timings are read
    start = time.perf_counter()
    plan = choose_plan(whole, parse_devices("8"), load_cluster("h100"), request, predict=rank_peaks)
    spent_s = time.perf_counter() - start
    gc.enable()
    assert sum(plan.timings.values()) == pytest.approx(spent_s, rel=0.02) and plan.timings["rest"] >= 0.0
    assert plan.lower_bound_s > 0 and plan.gap < 0.9
    assert {"stages by hand", "search", "price", "peak"} <= plan.timings.keys()


def test_a_deadline_between_ranks_that_share_a_parameter_leaves_a_plan(
    graph: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
):
    """GPT-2's first and last stage share the embedding: searched on one, it may be stored otherwise than by hand."""
    plans_of, solved = search_stages._solved, []

    def solved_and_ended(at: RankTask, stages: Stages, best: StagePlans) -> SolvedStages:
        solved.append(stages)
        at.budget.deadline.stop()
        return plans_of(at, stages, best)

    monkeypatch.setattr(search_stages, "_solved", solved_and_ended)
    asked = {"num_microbatches": 4, "schedule": "interleaved"}
    plan = choose_plan(
        graph("gpt2", layers=4),
        parse_devices("pp=2,dp=2"),
        load_cluster("v100"),
        PlanRequest(**asked),
        predict=rank_peaks,
    )
    assert len(solved) >= 2 and max(plan.peak_bytes) <= plan.memory_limit_bytes


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background has it ignored
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.mesh import parse_devices
from autopar.models.catalogue import build_model
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
example = build_model("gpt2", layers=12)
graph = trace(skeleton(example.model), example.args, dict(example.kwargs))
print("ready", flush=True)
def tell(text):
    print(text, flush=True)
request = PlanRequest(memory_limit_bytes=float(sys.argv[2]), time_limit_s=300.0)
plan = choose_plan(graph, parse_devices(sys.argv[1]), load_cluster("h100"), request, progress=tell)
print("planned", plan.found_by, max(plan.memory_bytes) <= plan.memory_limit_bytes)
"""


@pytest.mark.parametrize(("mesh", "when"), [("2x4", "search ("), ("pp=2,dp=4", "search ("), ("8", "stages by hand")])
def test_one_ctrl_c_ends_all_of_planning_with_a_plan(mesh: str, when: str):
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, mesh, str(4 * 2**30)], stdout=subprocess.PIPE, text=True
    ) as process:
        while when not in next(process.stdout):
            pass
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 0 and time.monotonic() - start < 30.0
    assert "interrupted: taking the best plan so far" in rest
    assert rest.strip().splitlines()[-1].startswith("planned ") and rest.strip().endswith("True")


@pytest.mark.parametrize("stage", ["price", "hand plans"])
def test_ctrl_c_before_the_search_leaves_that_way_for_a_plan_by_hand(graph: Callable[..., Graph], stage: str):
    """What comes before the first search is not waited for if stages are tried next, which give a plan sooner."""
    stages, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)

    def tell(text: str) -> None:
        stages.append(text)
        if text == stage and len(stages) <= 4:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        found = choose_plan(graph("gpt2", layers=4), parse_devices("2x4"), load_cluster("v100"), progress=tell)
    finally:
        signal.signal(signal.SIGINT, before)
    interrupted = next(i for i, text in enumerate(stages) if "interrupted" in text)
    assert stages[interrupted - 1] == stage and stages[interrupted + 1] == "stages by hand"
    assert found.found_by.endswith("ended by Ctrl-C") and max(found.memory_bytes) <= found.memory_limit_bytes


def test_where_stages_give_no_plan_the_way_that_ctrl_c_left_is_gone_to_the_end(
    graph: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
):
    def refused(*_: Any, **__: Any) -> None:
        raise MicrobatchError("the batch cannot be cut")

    monkeypatch.setattr(choose, "plan_in_stages", refused)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def tell(text: str) -> None:
        if text == "price" and not struck:
            struck.append(text)
            os.kill(os.getpid(), signal.SIGINT)

    struck: list[str] = []
    try:
        found = choose_plan(graph("gpt2", layers=4), parse_devices("2x4"), load_cluster("v100"), progress=tell)
    finally:
        signal.signal(signal.SIGINT, before)
    assert struck and found.found_by.endswith("ended by Ctrl-C") and found.step_s > 0


def test_a_second_ctrl_c_gives_up_and_handlers_are_put_back():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        budget = Budget.of(60.0)
        with pytest.raises(KeyboardInterrupt), budget.ended_by_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            assert budget.is_spent and budget.part(1.0).is_spent
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_work_is_left_though_ctrl_c_comes_while_a_callback_of_a_weak_reference_runs():
    """Python drops what is raised there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        budget, start = Budget.of(60.0), time.monotonic()
        with pytest.raises(Interrupted), budget.ended_by_interrupt(), budget.left_at_interrupt():
            held = {1}
            reference = weakref.ref(held, lambda _: os.kill(os.getpid(), signal.SIGINT))
            del held
            assert reference() is None and budget.is_spent
            while time.monotonic() - start < 20.0:
                pass
        assert time.monotonic() - start < 10.0
    finally:
        signal.signal(signal.SIGINT, before)


def test_work_is_left_by_what_no_handler_of_exceptions_takes():
    """torch makes a RuntimeError of what is raised in the backward of a stage, which predicting a peak runs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        budget = Budget.of(60.0)
        with pytest.raises(Interrupted), budget.ended_by_interrupt(), budget.left_at_interrupt():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5.0)
            except Exception as error:
                raise RuntimeError("Failed to run stage backward") from error
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_program_and_other_threads_are_left_alone():
    struck, before = [], signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda *_: struck.append(True))
    try:
        budget = Budget.of(60.0)
        with budget.ended_by_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
        assert struck == [True] and not budget.is_spent
    finally:
        signal.signal(signal.SIGINT, before)

    def in_a_thread() -> None:
        with Budget.of(1.0).ended_by_interrupt():
            struck.append(False)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert struck == [True, False]


@pytest.mark.parametrize("is_in_prediction", [False, True])
def test_a_long_prediction_of_the_peak_is_left_out_after_ctrl_c_and_the_plan_says_so(
    graph: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch, is_in_prediction: bool
):
    monkeypatch.setattr(fit_memory, "_PATIENCE_S", 0.0)
    predicted, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)

    def predict(plan: Plan) -> tuple[int, ...]:
        predicted.append(plan)
        os.kill(os.getpid(), signal.SIGINT)
        return rank_peaks(plan)

    def tell(text: str) -> None:
        if not is_in_prediction and "search" in text and not predicted:
            predicted.append(text)
            os.kill(os.getpid(), signal.SIGINT)

    try:
        found = choose_plan(
            graph("gpt2", layers=2),
            parse_devices("2x2"),
            load_cluster("v100"),
            PlanRequest(num_microbatches=1),
            progress=tell,
            predict=predict,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(predicted) == 1 and not found.peak_bytes
    assert "without a predicted peak, ended by Ctrl-C" in found.found_by
    assert any("its peak may not" in note for note in notes(found)) and "its peak may not" in found.explain()


def test_a_short_prediction_of_the_peak_is_made_after_ctrl_c(graph: Callable[..., Graph]):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def predict(plan: Plan) -> tuple[int, ...]:
        os.kill(os.getpid(), signal.SIGINT)
        return rank_peaks(plan)

    asked = graph("gpt2", layers=2), parse_devices("2x2"), load_cluster("v100"), PlanRequest(num_microbatches=1)
    try:
        found = choose_plan(*asked, predict=predict)
    finally:
        signal.signal(signal.SIGINT, before)
    assert found.peak_bytes and found.found_by.endswith("ended by Ctrl-C") and not notes(found)
