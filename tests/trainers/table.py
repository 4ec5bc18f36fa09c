"""docs/trainers.md, written by running: `python -m tests.trainers.table [CASE...]`; `--render` runs nothing."""

import argparse
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report import where
from tests.trainers import runs
from tests.trainers.case import SETTINGS
from tests.workers import Ranks

DOC = Path(__file__).parents[2] / "docs" / "trainers.md"
TEXT = Path(__file__).with_name("trainers.md.in")
RESULTS = Path(__file__).with_suffix(".json")
RUN = "<!-- run: copied tests/trainers/*cases.py: make test-trainers runs it, in an environment of its own -->"
COMMAND = "python -m tests.trainers.table"
PACKAGES = ("transformers", "accelerate", "peft", "lightning", "trl", "torchtitan")

Results = Mapping[str, Mapping[str, Any]]  # case -> {"measured": ..., "outcomes": {setting: what came of it}}


def document(results: Results, recipes: Mapping[str, str], titles: Mapping[str, str]) -> str:
    """The text with the recipes and the table in it."""
    text = TEXT.read_text()
    for name, lines in recipes.items():
        text = text.replace(f"<!-- recipe {name} -->", f"{RUN}\n```python\n{lines}```")
    head = f"| trainer | {' | '.join(SETTINGS)} |\n|---|{'---|' * len(SETTINGS)}\n"
    rows = [
        f"| {titles[name]} | {' | '.join(_cell(results[name]['outcomes'].get(key, '-')) for key in SETTINGS)} |\n"
        for name in recipes
        if name in results
    ]
    by_run: dict[str, list[str]] = {}
    for name in recipes:
        if name in results:
            run = "; ".join(f"{key} {value}" for key, value in results[name]["measured"].items())
            by_run.setdefault(run, []).append(name)
    measured = [f"{', '.join(found)}: {run}.\n" for run, found in by_run.items()]
    return text.replace("<!-- table -->\n", head + "".join(rows) + "\n" + "\n".join(measured))


def _cell(outcome: str) -> str:
    return outcome.replace("|", "\\|").replace("<", "&lt;")


def _measured() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return dict(where()) | {"versions": ", ".join(f"{name} {version}" for name, version in versions.items())}


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("cases", nargs="*", help="by default all")
    parser.add_argument("--render", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    ranks = Ranks(4)
    for name in () if chosen.render else chosen.cases or runs.names():
        outcomes = {setting: runs.outcome(ranks, name, setting) for setting in runs.settings_of(name)}
        results[name] = {"measured": _measured(), "outcomes": outcomes}
        print(name, outcomes, flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    ranks.stop()
    found = runs.names()
    titles = {name: (runs.case(name).__doc__ or "").splitlines()[0] for name in found}
    DOC.write_text(document(results, {name: runs.recipe(name) for name in found}, titles))


if __name__ == "__main__":
    main()
