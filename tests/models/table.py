"""`python -m tests.models.table [NAME ...]`: try each model and write docs/models.md; rows of other models stay."""

import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from autopar.errors import AutoparError
from autopar.plans.plan import Plan
from tests.models.beside_one_device import plan_for, worst_of
from tests.models.names import NAMES
from tests.workers import RankError, Ranks

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models that were tried

Tiny models of transformers, made from their configurations with random weights (`tests/models`), on dp=2, tp=2 under
the plan for which communication costs nothing, so that all is split that can be: loss and every gradient in float64
beside one device. *Right*: equal to 1e-5 (2e-3 for models that have to run in float32). The second number of
*parameters* is how many there are. *Whole*: ops that run alike on all ranks of both axes although they are no views,
with how often; *without a rule* are those that autopar does not know how to split.

Written by `python -m tests.models.table`; {when}.

| model | result | parameters split | ops | whole | without a rule |
|---|---|---|---|---|---|
"""


def row(ranks: Ranks, name: str) -> str:
    """The row of a model."""
    try:
        plan = plan_for(name)
    except AutoparError as error:
        return f"| {name} | refused: {str(error)[:160].replace('|', ' ')} | | | | |"
    try:
        worst = worst_of(ranks, name, plan)
    except RankError as error:
        return f"| {name} | error: {str(error).strip().splitlines()[-1][:160].replace('|', ' ')} | | | | |"
    result = "right" if worst < 1 else f"**other numbers** ({worst:.1e} of what is allowed)"
    layouts = [plan.assignment.layouts[item.value.name] for item in plan.graph.of_kind("parameter")]
    split = sum(any(placement.is_split for placement in layout) for layout in layouts)
    ops = {op.name: op.target for op in plan.graph.ops}
    unknown = ", ".join(sorted({_short(ops[op]) for op in plan.without_rule}))
    return f"| {name} | {result} | {split} / {len(layouts)} | {len(ops)} | {_whole(plan)} | {unknown} |"


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
    rows = {line.split(" | ")[0][2:]: line for line in _lines() if "/" in line.split(" | ")[0]}
    ranks = Ranks(4)
    for name in names or NAMES:
        rows[name] = row(ranks, name)
        print(rows[name], flush=True)
        _write(rows)


def _lines() -> list[str]:
    return [line for line in TABLE.read_text().splitlines() if line.startswith("| ")] if TABLE.exists() else []


def _write(rows: dict[str, str]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    when = f"last row {datetime.now(UTC):%Y-%m-%d}, commit {commit}"
    TABLE.write_text(HEAD.format(when=when) + "\n".join(line for _, line in sorted(rows.items())) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
