"""How long planning takes, how good the plans are, and how near to the best they are proven to be.

    python -m bench.search [--quick] [--repeat 3] [--rows REGEX] [--sections plans modules parts scope]

Every row is measured in a process of its own. Nothing of a plan is run: steps are predicted by the cost model, for the plan found and the
plans by hand alike.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.report import Section, save_sections
from bench.spawn import measured
from bench.suite import LLAMA_8B, QUICK, QUICK_TABLES, SUITE, TABLES, Case

Row = dict[str, Any]
Cells = tuple[str, ...]

STAGES = ("trace", "fold", "annotate", "price", "hand plans", "search")


@dataclass(frozen=True)
class Kind:
    """A section: `measure` is the kind of `bench.measure`; `format` makes the table's lines of one row.

    Rows of the kinds that `time_processes` are measured in several processes, the others in one.
    """

    measure: str
    cases: tuple[Case, ...]
    quick: tuple[Case, ...]
    text: str
    header: Cells
    format: Callable[[Case, Row], Iterable[Cells]]
    time_processes: bool = True


def format_plan(case: Case, row: Row) -> Iterable[Cells]:
    """Times by stage, then the plan beside the best plan by hand."""
    times = row["times_s"]
    rest = row["plan_s"] - sum(times.get(stage, 0.0) for stage in STAGES)
    stages = (seconds(times.get(stage, 0.0)) for stage in STAGES)
    cost = milliseconds(row["step_s"]), milliseconds(row["bound_s"]), percent(row["gap"])
    total = seconds(rest), seconds(row["plan_s"]), mib(row["peak_bytes"])
    hf = "-" if row["hf_s"] is None else milliseconds(row["hf_s"])
    yield (*named(case, row), *stages, *total, *cost, *by_hand(row), seconds(times["sweep"]), hf)


def format_module(case: Case, row: Row) -> Iterable[Cells]:
    """Times of compiling and of one step."""
    times = row["times_s"]
    yield (*named(case, row), seconds(times["compile"]), seconds(times["first step"]), mib(row["peak_bytes"]), str(row["lines"]))


def format_parts(case: Case, row: Row) -> Iterable[Cells]:
    """One line a part and limit; costs over that of all three."""
    whole = {found["limit"]: found["step_s"] for found in row["rows"] if found["part"] == "all three"}
    for found in row["rows"]:
        best_s = whole[found["limit"]]
        cost = "none found" if found["step_s"] is None else f"{found['step_s'] / best_s:.4f}"
        bound = "-" if found["bound_s"] is None else f"{found['bound_s'] / best_s:.4f}"
        yield case.title, found["limit"], found["part"], cost, bound, seconds(found["search_s"])


def format_scope(case: Case, row: Row) -> Iterable[Cells]:
    """One line a table: the search without a limit, then planning under the binding one."""
    found = [(seconds(row[limit]["search_s"]), percent(row[limit]["gap"])) for limit in ("none", "binding")]
    yield case.title, str(row["nodes"]), str(row["most_options"]), *found[0], *found[1], seconds(row["binding"]["plan_s"])


def named(case: Case, row: Row) -> Cells:
    """Model, cluster, and the mesh with the batch."""
    mesh = row["mesh"] if row["mesh"] == case.mesh else f"{case.mesh} as {row['mesh']}"
    return case.model, case.cluster, mesh, str(case.batch)


def by_hand(row: Row) -> Cells:
    """The best plan by hand that fits, its step, and how much longer that is."""
    if row["hand"] is None:
        return "none fits", "-", "-"
    return row["hand"], milliseconds(row["hand_s"]), f"{row['hand_s'] / row['step_s']:.2f}x"


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


def mib(num_bytes: int) -> str:
    """Whole MiB."""
    return f"{num_bytes / 2**20:.0f}"


_FOUND = ("step, ms", "at least, ms", "gap", "best by hand", "its step, ms", "gain", "sweep, s", "hf, ms")
_STAGES = (*(f"{stage}, s" for stage in STAGES), "rest, s", "model to plan, s")
KINDS: Mapping[str, Kind] = {
    "plans": Kind(
        "plan", SUITE, QUICK,
        "Model in to plan out; the model is built and the interpreter started before. A mesh given as a number of devices is factorised by "
        "the search. Peak memory is that of the process and its children. The best by hand is the fastest that fits the devices, of data "
        "parallel, ZeRO and Megatron in all flavours, priced alike: on every grid of dp x tp where the mesh is left open, else with every "
        "choice of the mesh's axes; sweep is the time that took, no part of planning. Gain is its step over that of the plan found. hf is "
        "the model's own tensor-parallel plan in transformers, if it has one that fits, within nodes of 8 with ddp or ZeRO-3 between them.",
        ("model", "cluster", "mesh", "batch", *_STAGES, "peak, MiB", *_FOUND), format_plan,
    ),
    "modules": Kind(
        "compile", (LLAMA_8B,), (LLAMA_8B,),
        "Model in to runnable sharded module out: `autopar.compile` of a model on the meta device as one rank of the mesh, on process "
        "groups without peers. The module runs one step on the meta device; weights, which every rank draws for itself, are not drawn.",
        ("model", "cluster", "mesh", "batch", "compile, s", "one step, s", "peak, MiB", "lines of code"), format_module,
    ),
    "parts": Kind(
        "parts", (TABLES[0], TABLES[1], TABLES[4]), QUICK_TABLES,
        "Each part of the search by itself, on the same tables; costs and bounds are relative to the cost found by all three. The binding "
        "limit is half way from the least memory that would do to what the cheapest plan takes. CP-SAT alone has 10 s, and the best hand "
        "plan as its hint.",
        ("table", "memory limit", "part", "cost", "bound", "time, s"), format_parts, False,
    ),
    "scope": Kind(
        "scope", TABLES, QUICK_TABLES,
        "The search alone, after tracing and pricing: the median of three, but one where it takes more than 10 s. The binding limit is as "
        "above. Under it the search is what planning does on this graph, mesh and limit: it ends at a gap of 0.5 %, and where the table, "
        "in which all inner layers are alike, leaves more, goes on in a second one, in which they may be of two kinds; the time is that "
        "of both searches. Planning is all of it, from the traced graph: folding, listing strategies, pricing and hand plans as well.",
        ("table", "nodes", "most options", "no limit: time, s", "gap", "binding limit: time, s", "gap", "planning, s"), format_scope, False,
    ),
}  # fmt: skip


def section_of(name: str, cases: Iterable[Case], repeat: int, tell: Callable[[str], None]) -> Section:
    """Measure the cases of one section; a case that fails is a line that says so."""
    kind, cells, rows = KINDS[name], [], []
    for case in cases:
        tell(f"{name}: {case.title}")
        row = measured(kind.measure, case, repeat=repeat if kind.time_processes else 1)
        rows.append({**asdict(case), **row})
        lines = [(case.title, row["error"][:200])] if "error" in row else kind.format(case, row)
        cells += [(*line, *[""] * (len(kind.header) - len(line))) for line in lines]
    return Section(name, kind.text, kind.header, tuple(cells), tuple(rows))


def selected(settings: argparse.Namespace) -> dict[str, list[Case]]:
    """Section -> its cases that are asked for."""
    found = {}
    for name in settings.sections:
        cases = KINDS[name].quick if settings.quick else KINDS[name].cases
        found[name] = [case for case in cases if re.search(settings.rows, case.title)]
    return {name: cases for name, cases in found.items() if cases}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rows of each section, once")
    parser.add_argument("--repeat", type=int, help="times are medians of so many runs (default 3; 1 if quick)")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose model, cluster and mesh match, e.g. 'llama.*h100'")
    parser.add_argument("--sections", nargs="+", choices=KINDS, default=list(KINDS))
    settings = parser.parse_args(arguments)
    repeat = settings.repeat or (1 if settings.quick else 3)
    wanted = selected(settings)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=sum(map(len, wanted.values())))

        def tell(text: str) -> None:
            progress.update(task, description=text, advance=0 if progress.tasks[0].description == "" else 1)

        sections = [section_of(name, cases, repeat, tell) for name, cases in wanted.items()]
    print(save_sections("search", sections, {"repeat": repeat, "quick": settings.quick, "rows": settings.rows or "all"}))
    print("written to bench/results/search.md and search.json")


if __name__ == "__main__":
    main()
