"""The console script `autopar`."""

import sys
from collections.abc import Sequence

from autopar.cli.workers import begin_workers


def main(argv: Sequence[str] | None = None) -> int:
    """`commands.main`; the workers of a sweep begin to import torch before this process does."""
    given = sys.argv[1:] if argv is None else argv
    if [*given[:1]] == ["sweep"]:
        begin_workers()
    from autopar.cli import commands

    return commands.main(argv)
