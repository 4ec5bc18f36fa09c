"""`python -m tests.models.table [--libraries] [--resume] [NAME ...]`: try each model and write docs/models.md; rows of
other models stay. `--libraries`: the models of other libraries, to docs/libraries.md. `--resume`: those that have a row
are not tried again.
"""

import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.plans.plan import Plan
from tests.models.beside_one_device import built, plan_for, worst_of
from tests.models.names import NAMES
from tests.models.of_libraries import MODELS
from tests.workers import RankError, Ranks

PLAN_S, RUN_S = 90, 120  # a tiny model that takes longer has a row that says so
DOCS = Path(__file__).parents[2] / "docs"
HEAD = """# Models that were tried

{models} with random weights (`tests/models`), on dp=2, tp=2 under
the plan for which communication costs nothing, so that all is split that can be: loss and every gradient in float64
beside one device. *Right*: equal to 1e-5 (2e-3 for models that have to run in float32). The second number of
*parameters* is how many there are. *Whole*: ops that run alike on all ranks of both axes although they are no views,
with how often; *without a rule* are those that autopar does not know how to split.

Models of `tests/models/{names}.py` without a row have not been tried since the way in which they are made changed.

Written by `python -m tests.models.table{option}`; {when}.

| model | result | parameters split | ops | whole | without a rule |
|---|---|---|---|---|---|
"""


def row(ranks: Ranks, name: str) -> str:
    """The row of a model."""
    try:
        built(name)
    except Exception as error:  # whatever transformers raises: the row is about this table's inputs
        return _failed(name, "not built", f"{type(error).__name__}: {error}")
    try:
        with ended_after(PLAN_S):
            plan = plan_for(name)
    except AutoparError as error:
        return _failed(name, "refused", error)
    except TimeoutError as error:
        return _failed(name, f"not planned within {PLAN_S} s", error)
    except Exception as error:
        traceback.print_exc()
        return _failed(name, "**crash**", f"{type(error).__name__}: {error}")
    try:
        worst = worst_of(ranks, name, plan, RUN_S)
    except RankError as error:
        print(error, file=sys.stderr)
        return _failed(name, "error", str(error).strip().splitlines()[-1])
    result = "right" if worst < 1 else f"**other numbers** ({worst:.1e} of what is allowed)"
    layouts = [plan.assignment.layouts[item.value.name] for item in plan.graph.of_kind("parameter")]
    split = sum(any(placement.is_split for placement in layout) for layout in layouts)
    ops = {op.name: op.target for op in plan.graph.ops}
    unknown = ", ".join(sorted({_short(ops[op]) for op in plan.without_rule}))
    return f"| {name} | {result} | {split} / {len(layouts)} | {len(ops)} | {_whole(plan)} | {unknown} |"


@contextmanager
def ended_after(seconds: int) -> Iterator[None]:
    """TimeoutError, with the line that ran, if what is inside takes longer."""

    def end(_: int, frame: Any) -> None:
        lines = (f"{Path(each.filename).name}:{each.lineno}" for each in traceback.extract_stack(frame)[-4:])
        raise TimeoutError(" < ".join(lines))

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _failed(name: str, how: str, why: object) -> str:
    told = " ".join(str(why).split()).replace("|", " ")
    return f"| {name} | {how}: {told[:160]} | | | | |"


def _whole(plan: Plan) -> str:
    found: Counter[str] = Counter()
    for op in plan.graph.ops:
        signatures = plan.assignment.strategies[op.name].signatures
        placements = [p for one in signatures for p in (*one.inputs, *one.outputs)]
        if op.inputs and not any(p.kind in "SPLE" for p in placements):
            found[_short(op.target)] += 1
    quiet = ("reshape", "permute", "expand", "slice", "unsqueeze", "select", "to", "detach")
    return ", ".join(f"{target} {count}" for target, count in sorted(found.items()) if target not in quiet)


def _short(target: str) -> str:
    return target.removeprefix("aten.").split(".")[0]


def main(names: list[str]) -> None:
    options = {name for name in names if name.startswith("--")}
    is_libraries = "--libraries" in options
    table = DOCS / ("libraries.md" if is_libraries else "models.md")
    rows = {line.split(" | ")[0][2:]: line for line in _lines(table)}
    ranks = Ranks(4)
    for name in [name for name in names if name not in options] or (MODELS if is_libraries else NAMES):
        if "--resume" in options and name in rows:
            continue
        rows[name] = row(ranks, name)
        print(rows[name], flush=True)
        table.write_text(_head(is_libraries) + "\n".join(line for _, line in sorted(rows.items())) + "\n")


def results(document: str) -> dict[str, str]:
    """Model -> what the table of this name in docs says of it."""
    cells = (line.split(" | ") for line in _lines(DOCS / document))
    return {row[0].removeprefix("| "): row[1] for row in cells}


def _lines(table: Path) -> list[str]:
    """The rows that a table has."""
    lines = table.read_text().splitlines() if table.exists() else []
    return [line for line in lines if line.startswith("| ") and ("/" in line or ":" in line.split(" | ")[0])]


def _head(is_libraries: bool) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    when = f"last row {datetime.now(UTC):%Y-%m-%d}, commit {commit}"
    if is_libraries:
        return HEAD.format(
            models="Small models straight from other libraries", option=" --libraries", names="of_libraries", when=when
        )
    models = "Tiny models of transformers, made from their configurations"
    return HEAD.format(models=models, option="", names="names", when=when)


if __name__ == "__main__":
    main(sys.argv[1:])
