"""One row of a benchmark, measured in this process: `python -m bench.measure KIND CASE STARTED` prints it as JSON.

CASE: a `suite.Case` as JSON; STARTED: `time.monotonic()` when this process was started. See `bench.spawn`.
"""

import json
import math
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from time import monotonic, process_time
from typing import Any, TypeVar

import autopar
from autopar.costmodel.cluster.load_cluster import Cluster, load_cluster
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.training import WHOLE_BATCH
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh, as_mesh, parse_mesh
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.budget import Budget
from autopar.planner.choose import choose_plan
from autopar.planner.layouts.search_mesh import solve_mesh
from autopar.planner.layouts.search_meshes import make_plan
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from autopar.search.deadline import Deadline
from autopar.search.solve import solve
from bench.alone import PARTS, SEARCH_LIMIT_S, after_bound, binding_limit
from bench.by_hand import best_by_hand
from bench.problem import example_of, graph_of, problem_of
from bench.simulated import one_rank_of
from bench.suite import Case

Result = TypeVar("Result")
Row = dict[str, Any]

# CP-SAT alone may run for ever.
PART_LIMIT_S = 10.0
# A search that takes longer is timed once, a quicker one three times.
_LONG_S = 10.0


def measure_plan(case: Case, started: float) -> Row:
    """Model in to plan out, as `autopar.plan` plans: the plan beside the best of all plans by hand, and seconds of what
    was done.
    """
    times = {"start": monotonic() - started, "peaks": 0.0}
    example = _timed(times, "build", partial(example_of, case))
    before = monotonic(), process_time()
    graph = _timed(times, "trace", partial(graph_of, example))
    mesh, cluster = as_mesh(case.mesh), load_cluster(case.cluster)

    def predict(plan: Plan | StagedPlan) -> tuple[int, ...]:
        start = monotonic()
        found = rank_peaks(plan)
        times["peaks"] += monotonic() - start
        return found

    try:
        plan = choose_plan(graph, mesh, cluster, PlanRequest(time_limit_s=case.time_limit_s), predict=predict)
    except InfeasibleError as error:
        return {"error": str(error)}
    used = {"plan_s": monotonic() - before[0], "cpu_s": process_time() - before[1]}
    limit = usable_memory_bytes(cluster)
    fits = {"limit_bytes": limit, "predicted_peak_bytes": max(plan.peak_bytes or rank_peaks(plan))}
    schedule = str(plan.schedule) if isinstance(plan, StagedPlan) else "one stage, one pass"
    hand = _timed(times, "by hand", partial(_by_hand, graph, mesh, cluster, limit))
    return {"times_s": times, **used, "ops": len(graph.ops), **_found(plan), "schedule": schedule, **fits, **hand}


def _by_hand(graph: Graph, mesh: Mesh | Devices, cluster: Cluster, limit_bytes: float) -> Row:
    """The fields of `ByHand` with "hand_" before each; "hand_unknown" says why it is not known."""
    try:
        found = asdict(best_by_hand(graph, mesh, cluster, WHOLE_BATCH, limit_bytes))
    except InfeasibleError as error:
        return {"hand_unknown": str(error)}
    return {f"hand_{name}": x for name, x in found.items()}


def _found(plan: Plan | StagedPlan) -> Row:
    return {
        "mesh": str(plan.mesh),
        "step_s": plan.step_s,
        "bound_s": plan.lower_bound_s,
        "gap": plan.gap,
        "memory_bytes": max(plan.memory_bytes),
    }


def measure_whole(case: Case, started: float) -> Row:
    """Model in to plan out without stages or microbatches: seconds by stage of planning."""
    times = {"start": monotonic() - started}
    example = _timed(times, "build", partial(example_of, case))
    before = monotonic(), process_time()
    graph = _timed(times, "trace", partial(graph_of, example))
    limit = None if case.is_limited else math.inf
    budget = Budget.of(case.time_limit_s)
    plan = make_plan(
        graph, as_mesh(case.mesh), load_cluster(case.cluster), PlanRequest(memory_limit_bytes=limit), budget=budget
    )
    used = {"plan_s": monotonic() - before[0], "cpu_s": process_time() - before[1]}
    return {"times_s": {**times, **plan.timings}, **used, "ops": len(graph.ops), **_found(plan)}


def measure_depth(case: Case, started: float) -> Row:
    """Model in to plan out, as `autopar.plan` plans: CPU seconds, those of child processes too, in a process that has
    planned the same model with two layers before.
    """
    _planned(replace(case, layers=2))
    return _planned(case)


def _planned(case: Case) -> Row:
    limit = None if case.is_limited else math.inf
    mesh, cluster, example = as_mesh(case.mesh), load_cluster(case.cluster), example_of(case)
    times, request = {"peaks": 0.0}, PlanRequest(memory_limit_bytes=limit, time_limit_s=case.time_limit_s)

    def predict(plan: Plan | StagedPlan) -> tuple[int, ...]:
        start = _cpu_s()
        peaks = rank_peaks(plan)
        times["peaks"] += _cpu_s() - start
        return peaks

    start = _cpu_s()
    graph = graph_of(example)
    traced = _cpu_s()
    plan = choose_plan(graph, mesh, cluster, request, predict=predict)
    times |= {"trace": traced - start, "plan": _cpu_s() - traced}
    schedule = str(plan.schedule) if isinstance(plan, StagedPlan) else "one stage, one pass"
    return {"times_s": times, "ops": len(graph.ops), **_found(plan), "schedule": schedule}


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime


def measure_compile(case: Case, started: float) -> Row:
    """Model in to runnable sharded module out, as one rank of the mesh; then one step, to show that it runs."""
    times = {"start": monotonic() - started}
    example = _timed(times, "build", partial(example_of, case))
    with one_rank_of(as_mesh(case.mesh)) as mesh:
        # Tensors on the meta device have no numbers that ranks could compare.
        call = {"args": example.args, "kwargs": dict(example.kwargs), "check": False}
        work = partial(autopar.compile, example.model, mesh, cluster=case.cluster, **call)
        before = process_time()
        module = _timed(times, "compile", work)
        used_s = process_time() - before
        _timed(times, "first step", lambda: module(*example.args, **example.kwargs)[0].backward())
        num_lines = len(module.code.splitlines())
        return {
            "times_s": times,
            "plan_s": times["compile"],
            "cpu_s": used_s,
            "lines": num_lines,
            **_found(module.plan),
        }


def measure_parts(case: Case, started: float) -> Row:
    """What each part of the search finds and takes by itself, without and with a memory limit that binds."""
    problem = problem_of(case)
    limits = {"none": math.inf, "binding": binding_limit(problem.table, SEARCH_LIMIT_S)}
    rows = []
    for limit, num_bytes in limits.items():
        limited = replace(problem, table=replace(problem.table, memory_limit_bytes=num_bytes))
        for name, part in PARTS.items():
            times: dict[str, float] = {}
            found = _timed(times, "search", partial(part, limited, PART_LIMIT_S))
            row = {"limit": limit, "part": name, "search_s": times["search"]}
            rows.append({**row, "step_s": _finite(found.cost_s), "bound_s": _finite(found.bound_s)})
    return {"rows": rows}


def measure_refine(case: Case, started: float) -> Row:
    """What labels and CP-SAT each make of what the bound leaves, under limits that bind more and less."""
    problem, rows = problem_of(case), []
    for limit, part in (("none", math.inf), ("90 %", 0.9), ("50 %", 0.5), ("25 %", 0.25), ("10 %", 0.1)):
        num_bytes = part if part == math.inf else binding_limit(problem.table, SEARCH_LIMIT_S, part)
        limited = replace(problem, table=replace(problem.table, memory_limit_bytes=num_bytes))
        for name, (found, took_s) in after_bound(limited, PART_LIMIT_S).items():
            row = {"limit": limit, "part": name, "search_s": took_s}
            rows.append({**row, "step_s": _finite(found.cost_s), "bound_s": _finite(found.bound_s)})
    return {"rows": rows}


def measure_scope(case: Case, started: float) -> Row:
    """The search alone, without a memory limit and with one that binds: as planning searches, and what planning takes
    in all.
    """
    problem = problem_of(case)
    sizes = [node.cost_s.size for node in problem.table.nodes]
    free = replace(problem.table, memory_limit_bytes=math.inf)
    limit = binding_limit(problem.table, SEARCH_LIMIT_S)
    request, mesh, cluster = PlanRequest(memory_limit_bytes=limit), parse_mesh(case.mesh), load_cluster(case.cluster)

    def search() -> Row:
        times: dict[str, float] = {}
        choice = _timed(
            times, "search", partial(solve, free, starts=problem.starts, deadline=Deadline.after(SEARCH_LIMIT_S))
        )
        return {"search_s": times["search"], "step_s": choice.cost_s, "gap": choice.gap}

    def plan() -> Row:
        times, budget = {}, Budget.of(SEARCH_LIMIT_S)
        work = partial(solve_mesh, problem.graph, mesh, cluster, request, budget=budget)
        found = _timed(times, "plan", work)
        gap = (found.cost_s - found.lower_bound_s) / found.cost_s
        return {"search_s": budget.timings["search"], "plan_s": times["plan"], "step_s": found.cost_s, "gap": gap}

    return {"nodes": len(sizes), "most_options": max(sizes), "none": _median_of(search), "binding": _median_of(plan)}


def _median_of(work: Callable[[], Row]) -> Row:
    """The row of which the search takes the median time of three; of one where it takes long."""
    rows = [work()]
    while rows[0]["search_s"] < _LONG_S and len(rows) < 3:
        rows.append(work())
    return sorted(rows, key=lambda row: row["search_s"])[len(rows) // 2]


MEASURES: Mapping[str, Callable[[Case, float], Row]] = {
    "plan": measure_plan,
    "compile": measure_compile,
    "parts": measure_parts,
    "refine": measure_refine,
    "scope": measure_scope,
    "whole": measure_whole,
    "depth": measure_depth,
}


def _finite(x: float) -> float | None:
    """JSON has no infinity."""
    return x if math.isfinite(x) else None


def _timed(times: dict[str, float], stage: str, work: Callable[[], Result]) -> Result:
    start = monotonic()
    result = work()
    times[stage] = monotonic() - start
    return result


def main() -> None:
    """Measure what the arguments say."""
    kind, case, started = sys.argv[1:]
    print(json.dumps(MEASURES[kind](Case(**json.loads(case)), float(started))))


if __name__ == "__main__":
    main()
