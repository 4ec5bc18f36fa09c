"""`autopar replan`: a saved plan made anew for other devices."""

import argparse
import json
import re

from autopar.answers.replan_text import format_replanned, replanned_json
from autopar.cli.diff_command import read_plan
from autopar.elastic.replan_plan import replan
from autopar.errors import AutoparError
from autopar.planner.status import status


def add_replan(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `autopar replan`."""
    parser.add_argument("plan", metavar="PLAN", help="a plan's file, as autopar explain --save writes it")
    parser.add_argument("--model", required=True, metavar="TARGET", help="the model of the plan, as for explain")
    parser.add_argument(
        "--mesh", required=True, help="the devices that there are now, as for explain; 56 leaves it open"
    )
    parser.add_argument(
        "--lost",
        default="",
        metavar="RANKS",
        help="ranks of the plan that are gone, e.g. 8-15,20; by default those behind the new number of devices",
    )
    parser.add_argument("--cluster", help="a preset's name or a JSON file (default: that of the plan)")
    parser.add_argument(
        "--time-limit", type=float, default=10.0, metavar="S", help="seconds of making each of two plans (default 10)"
    )
    parser.add_argument(
        "--read-rate",
        type=float,
        metavar="GB/S",
        help="of a checkpoint, all devices together: what it takes to read is then part of moving",
    )
    parser.add_argument("--save", metavar="FILE", help="write the plan made anew")
    parser.add_argument("--json", action="store_true", help="the same content as JSON, with each device")
    parser.set_defaults(run=_replan)


def _replan(options: argparse.Namespace) -> int:
    lost = parse_ranks(options.lost)
    with status() as tell:
        tell("trace")
        before = read_plan(options.plan, options.model)
        rate = None if options.read_rate is None else 1e9 * options.read_rate
        place = {"lost": lost, "cluster": options.cluster, "time_limit_s": options.time_limit}
        found = replan(before, options.mesh, **place, read_rate=rate, progress=tell)
    if options.save:
        found.after.plan.save(options.save)
    print(json.dumps(replanned_json(found), indent=1) if options.json else format_replanned(found))
    return 0


def parse_ranks(text: str) -> tuple[int, ...]:
    """The ranks that `text` names; AutoparError if it is not of that form.

    >>> parse_ranks("8-10,20"), parse_ranks("")
    ((8, 9, 10, 20), ())
    """
    ranks: set[int] = set()
    for part in text.split(",") if text else ():
        if not (match := re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)):
            raise AutoparError(f"--lost {text!r}: expected ranks such as 8-15,20, found {part!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise AutoparError(
                f"--lost {text!r}: expected ranks such as 8-15,20, found {part!r}, which ends before it begins"
            )
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))
