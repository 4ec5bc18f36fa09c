"""How long planning takes, how good the plans are, and how near to the best they are proven to be.

    python -m bench.search [--tables plans stages modules parts scope] [--rows 'llama.*h100'] [--resume] [--repeat 1]

Every row is measured in a process of its own. Nothing of a plan is run: steps are predicted by the cost model, for the
plans that autopar finds and the plans by hand alike. Ends with 1 if a plan by hand is faster than the one found, or if
the one found does not fit.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.report import Cells, Row, Table, add
from bench.rows import parser, selected
from bench.spawn import measured
from bench.suite import LLAMA_8B, REFINED, STAGED, SUITE, TABLES, Case

# A plan in stages changes the training loop: autopar chooses it where it gains more than this part of a step.
WORTH = 0.05


@dataclass(frozen=True)
class Kind:
    """A table: `measure` is the kind of `bench.measure`; `cells` makes the table's lines of one row."""

    measure: str
    cases: tuple[Case, ...]
    text: str
    header: Cells
    cells: Callable[[Row], Iterable[Cells]]


def plan_cells(row: Row) -> Iterable[Cells]:
    """The plan beside the best plan by hand."""
    times = row["times_s"]
    found = (
        milliseconds(row["step_s"]),
        milliseconds(row["bound_s"]),
        percent(row["gap"]),
        share(row["predicted_peak_bytes"], row),
    )
    took = (
        seconds(row["plan_s"]),
        seconds(times["trace"]),
        seconds(times["peaks"]),
        seconds(row["cpu_s"]),
        mib(row["peak_bytes"]),
    )
    yield (*asked(row), row["mesh"], row["schedule"], *found, *by_hand(row), *took, seconds(times["by hand"]))


def by_hand(row: Row) -> Cells:
    """The best plan by hand that fits, its step, peak and how many times as long as the plan's it takes; how many fit
    as estimated.
    """
    if row.get("hand_name") is None:
        return row.get("hand_unknown", "none fits")[:60], "-", "-", "-", str(row.get("hand_num_fitting", "-"))
    times = f"{row['hand_step_s'] / row['step_s']:.3f}x"
    return (
        row["hand_name"],
        milliseconds(row["hand_step_s"]),
        share(row["hand_peak_bytes"], row),
        times,
        str(row["hand_num_fitting"]),
    )


def is_as_good(row: Row) -> bool:
    """Whether the plan fits and no plan by hand is faster by more than what autopar asks of stages."""
    if "error" in row or row["predicted_peak_bytes"] > row["limit_bytes"]:
        return False
    return row.get("hand_step_s") is None or row["step_s"] * (1 - WORTH) <= row["hand_step_s"]


def module_cells(row: Row) -> Iterable[Cells]:
    """Times of compiling and of one step."""
    times = row["times_s"]
    yield (
        *asked(row),
        seconds(times["compile"]),
        seconds(times["first step"]),
        mib(row["peak_bytes"]),
        str(row["lines"]),
    )


def part_cells(row: Row) -> Iterable[Cells]:
    """One line a part and limit; costs over that of all three."""
    whole = {found["limit"]: found["step_s"] for found in row["rows"] if found["part"] == "all three"}
    for found in row["rows"]:
        best_s = whole[found["limit"]]
        cost = "none found" if found["step_s"] is None else f"{found['step_s'] / best_s:.4f}"
        bound = "-" if found["bound_s"] is None else f"{found['bound_s'] / best_s:.4f}"
        yield row["row"], found["limit"], found["part"], cost, bound, seconds(found["search_s"])


def refine_cells(row: Row) -> Iterable[Cells]:
    """One line a limit: what the bound, labels and CP-SAT leave; costs over the least of them."""
    for limit in dict.fromkeys(found["limit"] for found in row["rows"]):
        parts = {found["part"]: found for found in row["rows"] if found["limit"] == limit}
        best_s = min(found["step_s"] for found in parts.values())
        cells = [_left(parts[name], best_s) if name in parts else ("-",) * 3 for name in ("bound", "labels", "refine")]
        yield row["row"], limit, *(cell for three in cells for cell in three)


def _left(found: Row, best_s: float) -> Cells:
    gap = (found["step_s"] - found["bound_s"]) / found["step_s"]
    return f"{found['step_s'] / best_s:.5f}", percent(gap), seconds(found["search_s"])


def scope_cells(row: Row) -> Iterable[Cells]:
    """One line a table: the search without a limit, then planning under the binding one."""
    free, bound = row["none"], row["binding"]
    limits = seconds(free["search_s"]), percent(free["gap"]), seconds(bound["search_s"]), percent(bound["gap"])
    yield row["row"], str(row["nodes"]), str(row["most_options"]), *limits, seconds(bound["plan_s"])


def asked(row: Row) -> Cells:
    """What is planned."""
    return row["row"].split(" " + row["cluster"])[0], row["cluster"], row["devices"], str(row["batch"])


def seconds(x: float) -> str:
    """
    >>> seconds(0.0123), seconds(12.3)
    ('0.012', '12.3')
    """
    return f"{x:.3f}" if x < 1 else f"{x:.3g}"


def milliseconds(x: float) -> str:
    """
    >>> milliseconds(0.4859)
    '486'
    """
    return f"{1e3 * x:.3g}" if x < 1 else f"{1e3 * x:.0f}"


def percent(x: float) -> str:
    """
    >>> percent(0.00776), percent(1e-10), percent(0.0)
    ('0.78 %', '0 %', '0 %')
    """
    return f"{100 * x:.2g} %" if x > 1e-6 else "0 %"


def share(num_bytes: float, row: Row) -> str:
    """Bytes as a part of what a device may take."""
    return f"{num_bytes / row['limit_bytes']:.0%}"


def mib(num_bytes: int) -> str:
    """Whole MiB."""
    return f"{num_bytes / 2**20:.0f}"


_HAND = ("best by hand", "its step, ms", "its peak", "by hand / plan", "by hand, estimates that fit")
_TOOK = ("model to plan, s", "of it tracing, s", "of it peaks, s", "CPU, s", "peak, MiB", "by hand, s")
_PLAN = (
    "model",
    "cluster",
    "devices",
    "batch",
    "plan",
    "stages, microbatches",
    "step, ms",
    "at least, ms",
    "gap",
    "predicted peak",
    *_HAND,
    *_TOOK,
)
_TEXT = (
    "Predicted, plans and plans by hand alike, by the cost model and under the same limit. Model in to plan out as"
    " `autopar.plan` does it, with its default time limit{limit}: stages, microbatches and recomputed blocks where"
    " they gain, the peak of memory checked. By hand: every product pp x dp x tp with tp within two nodes (of a mesh"
    " with its axes given: every choice of tensor axes), every schedule (1F1B, GPipe, zero-bubble, interleaved with 2"
    " and 4 stages a rank), every number of microbatches, ddp, ZeRO-2 and ZeRO-3, with and without sequence"
    " parallelism, as many layers on each stage or balanced cuts, none, all or as few blocks recomputed as fit; the"
    " fastest of those of which estimate and predicted peak fit. Peaks are parts of what a device may take. A plan in"
    f" stages is chosen where it gains more than {WORTH:.0%}, so that a plan by hand may be faster by as much. Peak"
    " memory is that of the planning process."
)
KINDS: Mapping[str, Kind] = {
    "plans": Kind("plan", SUITE, _TEXT.format(limit=""), _PLAN, plan_cells),
    "stages": Kind("plan", STAGED, _TEXT.format(limit=" raised to 90 s"), _PLAN, plan_cells),
    "modules": Kind(
        "compile",
        (LLAMA_8B,),
        "Model in to runnable sharded module out: `autopar.compile` of a model on the meta device as one rank of the "
        "mesh, on process groups without peers. The module runs one step on the meta device; weights, which every "
        "rank draws for itself, are not drawn.",
        ("model", "cluster", "mesh", "batch", "compile, s", "one step, s", "peak, MiB", "lines of code"),
        module_cells,
    ),
    "parts": Kind(
        "parts",
        (TABLES[0], TABLES[1], TABLES[4]),
        "Each part of the search by itself, on the same tables; costs and bounds are relative to the cost found by "
        "all three. The binding limit is half way from the least memory that would do to what the cheapest plan "
        "takes. CP-SAT alone has 10 s, and the best hand plan as its hint.",
        ("table", "memory limit", "part", "cost", "bound", "time, s"),
        part_cells,
    ),
    "refine": Kind(
        "refine",
        REFINED,
        "When CP-SAT improves a plan or a bound. The descents and the bound run first; where they leave a gap, labels "
        "(Pareto fronts) and CP-SAT each have 10 s from the same state. Costs are relative to the least of the three. "
        "The memory limit lies so far on the way from the least that would do to what the cheapest plan takes. A "
        "search of a plan under a binding limit ends at a gap of 0.5 %.",
        ("table", "limit", *(f"{part}: {x}" for part in ("bound", "labels", "CP-SAT") for x in ("cost", "gap", "s"))),
        refine_cells,
    ),
    "scope": Kind(
        "scope",
        TABLES,
        "The search alone, after tracing and pricing: the median of three, but one where it takes more than 10 s. The "
        "binding limit is as above. Under it the search is what planning does on this graph, mesh and limit: it ends "
        "at a gap of 0.5 %, and where the table, in which all inner layers are alike, leaves more, goes on in a "
        "second one, in which they may be of two kinds; the time is that of both searches. Planning is all of it, "
        "from the traced graph: folding, listing strategies, pricing and hand plans as well.",
        ("table", "nodes", "most options", "no limit: time, s", "gap", "binding limit: time, s", "gap", "planning, s"),
        scope_cells,
    ),
}
RESULT_TABLES = tuple(
    Table(name, kind.text, kind.header, tuple(case.title for case in kind.cases), kind.cells)
    for name, kind in KINDS.items()
)


def row_of(name: str, case: Case, repeat: int) -> Row:
    """The row of one case; one that fails has an "error"."""
    return {
        "row": case.title,
        **asdict(case),
        "devices": case.mesh,
        **measured(KINDS[name].measure, case, repeat=repeat),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, and save after each row."""
    options = parser(__doc__)
    options.add_argument("--tables", nargs="+", choices=KINDS, default=list(KINDS))
    options.add_argument("--repeat", type=int, default=1, help="times are medians of so many runs")
    settings = options.parse_args(arguments)
    wanted = selected([table for table in RESULT_TABLES if table.title in settings.tables], settings, "search")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    worse: list[str] = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=sum(map(len, wanted.values())))
        tasks = [(name, case) for name, rows in wanted.items() for case in KINDS[name].cases if case.title in rows]
        for table, case in tasks:
            progress.update(task, description=f"{table}: {case.title}")
            row = row_of(table, case, settings.repeat)
            add("search", RESULT_TABLES, {table: [row]}, {"repeat": settings.repeat})
            progress.advance(task)
            worse += [f"{table}: {case.title}"] if KINDS[table].measure == "plan" and not is_as_good(row) else []
    print("written to bench/results/search.md and search.json")
    sys.exit(f"a plan by hand is faster, or the plan does not fit: {'; '.join(worse)}" if worse else 0)


if __name__ == "__main__":
    main()
