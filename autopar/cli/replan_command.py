"""`autopar replan`: a saved plan made anew for other devices."""

import argparse
import json
import os
import pickle
import re
import select
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from autopar.answers.replan import Closest
from autopar.answers.replan_text import format_replanned, replanned_json
from autopar.cli.diff_command import read_plan
from autopar.elastic.replan_plan import BEGUN, quiet_pickles, replan
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
    with status() as tell, ClosestBeside() as beside:
        tell("trace")
        before = read_plan(options.plan, options.model)
        beside.begin(before, options.mesh, options.cluster, options.time_limit)
        rate = None if options.read_rate is None else 1e9 * options.read_rate
        place = {"lost": lost, "cluster": options.cluster, "time_limit_s": options.time_limit}
        found = replan(before, options.mesh, **place, read_rate=rate, progress=tell, closest_to=beside.answer)
    if options.save:
        found.after.plan.save(options.save)
    print(json.dumps(replanned_json(found), indent=1) if options.json else format_replanned(found))
    return 0


class ClosestBeside:
    """A context: a process that makes the plan that keeps the layouts while this one makes the other.

    It imports what it needs while this one reads the plan. Without a second core there is none.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> Self:
        if (os.cpu_count() or 1) > 1:
            root = str(Path(__file__).parents[2])
            paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            command = [sys.executable, "-m", "autopar.elastic.replan_plan"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, **pipes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def begin(self, *task: Any) -> None:
        """Have it call `closest(*task)` as soon as it can."""
        if self.process is not None:
            threading.Thread(target=_send, args=(self.process.stdin, pickle.dumps(task)), daemon=True).start()

    def answer(self) -> Closest | None:
        """The result; None if the process has not begun by now, or has failed."""
        if self.process is None or self.process.stdout is None:
            return None
        stdout = self.process.stdout
        if not select.select([stdout], [], [], 0)[0] or stdout.read(len(BEGUN)) != BEGUN:
            return None
        with suppress(EOFError), quiet_pickles():
            return pickle.load(stdout)
        return None


def _send(pipe: IO[bytes], content: bytes) -> None:
    with suppress(BrokenPipeError), pipe:
        pipe.write(content)


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
