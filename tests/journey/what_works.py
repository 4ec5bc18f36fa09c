"""The table of all cases, docs/what_works.md, and the run it is made of, what_works.json.

python -m tests.journey.what_works             # runs every case in every setting, and writes both: half an hour
python -m tests.journey.what_works loop state  # these themes, the others stay as they were measured
python -m tests.journey.what_works --render    # writes the document of the results there are
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report import where
from tests.journey.case import DDP, FORWARD, FSDP2, PEERS, PP, THEMES, Case, cases_of, module_of
from tests.journey.runs import Outcome, difference, outcomes_of, truth
from tests.workers import Ranks

DOC = Path(__file__).parents[2] / "docs" / "what_works.md"
RESULTS = Path(__file__).with_suffix(".json")
COMMAND = "python -m tests.journey.what_works"
SAME, OTHER, AS_THERE = "same numbers", "**other numbers**", "the error of one device"
MOST_CHARACTERS = {DDP: 90, FSDP2: 90}  # of an error's words; of autopar's refusals more, as they have the remedy
HEAD = f"""# What works with autopar

What people do with a model, case by case: each is a function in `tests/journey`, run on one device and on four ranks.
*Same numbers*: loss, gradients and parameters are those of one device. *Refused*: an error made to be read, before the
first wrong number. In bold is what differs without an error.

- **autopar**: in three settings: data parallel with parameters in parts (dp); data and tensor parallel by a plan made
  by hand (dp x tp); a search for which communication costs nothing, so that all is split (free links).
- **with stages**: two stages of a pipeline and two microbatches, through `train_step`; a dash where the case calls
  `model(...)` itself.
- **DDP**, **FSDP2**: the same function, each rank with its part of the batch; a dash where they have nothing like it.
  Batch statistics are those of a rank's part there, so that other numbers may be what one wants.

Written by `{COMMAND}`; `tests/journey/test_what_works.py` fails where a case is missing or
expects something else than was measured.
"""

Results = Mapping[str, Mapping[str, Any]]  # theme -> {"measured": ..., "cases": {name: {setting: what came of it}}}


def what_works(results: Results) -> str:
    """The document."""
    parts = [HEAD, _totals(results)]
    for theme in (theme for theme in THEMES if theme in results):
        title = (module_of(theme).__doc__ or "").splitlines()[0].rstrip(".")
        parts.append(
            f"\n## {title}\n\n| what people do | autopar | with stages | DDP | FSDP2 |\n|---|---|---|---|---|\n"
        )
        measured = results[theme]["cases"]
        parts += [_row(found, measured.get(name, {})) for name, found in cases_of(theme).items()]
        parts.append(f"\n{_provenance(results[theme]['measured'])}\n")
    return "".join(parts)


def _totals(results: Results) -> str:
    """How many cases came to what, a line each."""
    columns = {"autopar": FORWARD, "with stages": (PP,), DDP: (DDP,), FSDP2: (FSDP2,)}
    rows = [row for theme in results.values() for row in theme["cases"].values()]
    lines = [
        "\n| | same numbers | refused, or one device's error | other errors | other numbers |\n|---|---|---|---|---|\n"
    ]
    for column, settings in columns.items():
        worst = [max(_rank(row[key]) for key in settings if key in row) for row in rows if set(settings) & row.keys()]
        lines.append(f"| {column} | " + " | ".join(str(worst.count(rank)) for rank in range(4)) + " |\n")
    return "".join(lines)


def _rank(outcome: str) -> int:
    """0: same numbers, 1: refused, 2: another error, 3: other numbers."""
    if outcome == OTHER:
        return 3
    return 0 if outcome == SAME else 1 if outcome.startswith(("refused", AS_THERE)) else 2


def _provenance(measured: Mapping[str, str]) -> str:
    return "; ".join(f"{key} {value}" for key, value in measured.items())


def _row(found: Case, measured: Mapping[str, str]) -> str:
    by_setting = {setting: measured[setting] for setting in FORWARD if setting in measured}
    cells = [found.title, _together(by_setting), *(measured.get(key, "-") for key in (PP, *PEERS))]
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |\n"


def _together(by_setting: Mapping[str, str]) -> str:
    """What came of the settings without stages: said once where it is the same in all."""
    said: dict[str, list[str]] = {}
    for setting, outcome in by_setting.items():
        said.setdefault(outcome, []).append(setting)
    if len(said) < 2:
        return next(iter(said), "-")
    return "; ".join(f"{', '.join(settings)}: {outcome}" for outcome, settings in said.items())


def _escaped(cell: str) -> str:
    """Without what Markdown would read as a cell's end, a tag or a link."""
    return cell.replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(").replace("][", "]\\[")


def measured(ranks: Ranks, theme: str) -> dict[str, dict[str, str]]:
    """What comes of each case of the theme in each of its settings, and under DDP and FSDP2."""
    found = cases_of(theme)
    results: dict[str, dict[str, str]] = {name: {} for name in found}
    settings = [*dict.fromkeys(setting for case in found.values() for setting in case.on), *PEERS]
    for setting in settings:
        names = tuple(name for name, case in found.items() if setting in case.on or (case.peers and setting in PEERS))
        for name, outcomes in _outcomes(ranks, theme, names, setting).items():
            results[name][setting] = summary(outcomes, theme, name, MOST_CHARACTERS.get(setting, 300))
        print(f"{theme}, {setting}: {len(names)} cases", file=sys.stderr, flush=True)
    return results


def _outcomes(ranks: Ranks, theme: str, names: tuple[str, ...], setting: str) -> dict[str, list[Outcome]]:
    """What each rank saw of the cases. Under DDP and FSDP2 they have processes without autopar's handlers of DTensors,
    and new ones after an error: where some ranks alone fail, the next case would meet the collectives of the others.
    """
    if setting not in PEERS:
        return outcomes_of(ranks, theme, names, setting)
    ranks.stop()
    found: dict[str, list[Outcome]] = {}
    for name in names:
        found |= outcomes_of(ranks, theme, (name,), setting)
        if any(outcome.error for outcome in found[name]):
            ranks.stop()
    return found


def summary(outcomes: list[Outcome], theme: str, name: str, most: int) -> str:
    """What came of a case on all ranks, in the words of the table."""
    try:
        expected, raised = truth(theme, name), ""
    except Exception as error:
        expected, raised = {}, f"{type(error).__name__}: {error}"
    failed = [outcome for outcome in outcomes if outcome.error]
    if not failed:
        return OTHER if raised or difference(outcomes, expected, cases_of(theme)[name].tolerance) else SAME
    if all(outcome.error == raised for outcome in outcomes):
        return f"{AS_THERE}: {_shown(raised, most)}"
    first = next((outcome for outcome in failed if outcome.is_refusal), failed[0])
    kind = "refused" if first.is_refusal and len(failed) == len(outcomes) else "error"
    return f"{kind}: {_shown(first.error, most)}"


def _shown(text: str, most: int) -> str:
    """An error's words for a cell of the table, without what differs from run to run."""
    text = re.sub(r"0x[0-9a-f]+", "0x...", " ".join(text.split()))
    text = re.sub(r"(/[\w.-]+)+/", "", text)
    return text if len(text) <= most else f"{text[:most].rsplit(' ', 1)[0]} ..."


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("themes", nargs="*", choices=[*THEMES, []], help="by default all")
    parser.add_argument("--render", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    ranks = Ranks(4)
    for theme in () if chosen.render else chosen.themes or THEMES:
        run = where() | {"command": f"`{COMMAND} {theme}`"}
        results[theme] = {"measured": run, "cases": measured(ranks, theme)}
        RESULTS.write_text(json.dumps({key: results[key] for key in THEMES if key in results}, indent=1) + "\n")
    ranks.stop()
    DOC.write_text(what_works(results))


if __name__ == "__main__":
    main()
