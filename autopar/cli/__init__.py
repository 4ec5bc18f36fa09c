"""The console script `autopar`."""

from autopar.cli.main import main

__all__ = ["main"]
