"""Training that goes on when ranks come and go: `with autopar.elastic.Run(folder) as run:`."""

from autopar.elastic.elastic_run import Run

__all__ = ["Run"]
