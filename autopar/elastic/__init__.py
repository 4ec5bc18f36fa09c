"""Training that goes on when ranks come and go: `with autopar.elastic.Run(folder) as run:`."""

from autopar.elastic.elastic_run import Run
from autopar.elastic.replan_plan import replan

__all__ = ["Run", "replan"]
