"""`PlanFiles`: a run's plans for each number of ranks, and which of them it goes on with when that has changed."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.answers.replan import Replanned, Weighed
from autopar.answers.step_terms import AnyPlan
from autopar.elastic.checkpoints import complete, newest_rate, step_of


@dataclass(frozen=True)
class PlanFiles:
    """The files in the `folder` of a run of the plans of one model, call and options, which `key` names."""

    folder: Path
    key: str

    def anew(self, num_ranks: int) -> Path:
        """The file of the plan that the search makes for so many ranks."""
        return self.folder / "plans" / f"{num_ranks}-{self.key}.plan.json"

    def kept(self, num_ranks: int, before: str) -> Path:
        """The file of one that keeps the layouts of the plan named `before` (`name_of`)."""
        return self.anew(num_ranks).with_name(f"{num_ranks}-{self.key}-{before}.plan.json")

    def successors(self, num_ranks: int, before: str) -> Path:
        """The file that has both weighed: what moving to the one made anew takes more, and what its steps take less."""
        return self.anew(num_ranks).with_name(f"{num_ranks}-{self.key}-{before}.json")

    def save(self, plan: AnyPlan, path: Path) -> None:
        """Write a plan for a later start."""
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)

    def save_successors(self, found: Replanned, num_ranks: int, before: str) -> None:
        """Write a plan that keeps the layouts, if there is one, and what decides between it and the one made anew.

        All processes start anew, so each reads all that its plan needs from the checkpoint: `found` has that as bytes.
        """
        after, closest, more_bytes = found.after, found.closest, 0
        if closest is not None:
            self.save(closest.plan, self.kept(num_ranks, before))
            more_bytes = after.state.total.read - closest.state.total.read
        _write(self.successors(num_ranks, before), {"gain_s": found.weighed.gain_s, "more_bytes": more_bytes})

    def chosen(self, num_ranks: int) -> Path | None:
        """The plan to go on with on so many ranks, of those that are there; None if none is.

        On as many ranks as before it is the plan of before. On others it is the one made anew, unless moving to it
        takes more than its steps take less until the next change, if both have been weighed. Changes are expected as
        often as there have been: after as many steps as were done between two, on average. Reading a checkpoint is
        expected to be as fast as the newest one was written and read back.
        """
        used, anew = self._used(), self.anew(num_ranks)
        if used is not None and used.num_ranks == num_ranks:
            anew = self.folder / "plans" / used.file
        elif used is not None and (saved := _read(self.successors(num_ranks, used.plan))) and complete(self.folder):
            rate, steps = newest_rate(self.folder), step_of(complete(self.folder)[0])
            weighed = Weighed(saved["gain_s"], saved["more_bytes"] / rate if rate else 0.0)
            if not weighed.is_worth(steps / (used.changes + 1)):
                anew = self.kept(num_ranks, used.plan)
        return anew if anew.exists() else None

    def use(self, num_ranks: int, path: Path) -> str:
        """Note that the run goes on with this plan, on so many ranks; the plan's name."""
        before, name = self._used(), name_of(path)
        changes = 0 if before is None else before.changes + (before.num_ranks != num_ranks)
        _write(self._used_file, asdict(_Used(num_ranks, path.name, name, changes)))
        return name

    @property
    def _used_file(self) -> Path:
        return self.folder / "plans" / f"used-{self.key}.json"

    def _used(self) -> "_Used | None":
        saved = _read(self._used_file)
        return None if saved is None else _Used(**saved)


@dataclass(frozen=True)
class _Used:
    """The plan of the last start, its file and name, and the changes of the number of ranks so far."""

    num_ranks: int
    file: str
    plan: str
    changes: int


def name_of(path: Path) -> str:
    """A name for the content of a plan's file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _write(path: Path, content: dict[str, Any]) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(content))
    os.replace(new, path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
