"""What plans with and without stages do alike: they explain themselves, and are written to files and read from them."""

import os
from abc import ABC, abstractmethod
from typing import ClassVar, Self

from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.plans import serialise
from autopar.plans.serialise import Saved


class BasePlan(ABC):
    """Base of `Plan` and `StagedPlan`. SAVED: the part of the plan that its file holds."""

    SAVED: ClassVar[type[Saved]]
    step_s: float
    lower_bound_s: float

    @property
    def gap(self) -> float:
        """Relative distance of the step time to its lower bound, 0 when proven optimal."""
        return (self.step_s - self.lower_bound_s) / self.step_s if self.step_s > 0 else 0.0

    def explain(self) -> str:
        """The plan for people: every choice, what it costs, and what else there is."""
        from autopar.explain.explain_plan import explain  # the layer above, which reads plans

        return explain(self)

    def dumps(self) -> str:
        """JSON text; the graph is not in it, only its fingerprint."""
        return serialise.dumps(self.SAVED, self)

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as JSON, whole or not at all."""
        serialise.write(path, self.dumps())

    @classmethod
    def loads(cls, text: str, graph: Graph, mesh: Mesh | Devices, *, is_own: bool = False) -> Self:
        """The plan that `text` holds, for the model it was made for, on a mesh of the same shape; else PlanError.

        Nothing in it is trusted: what cannot be computed again is shown as the file's claim, unless this run wrote the
        text itself (`is_own`).
        """
        return cls.of_saved(serialise.loads(cls.SAVED, text), graph, mesh, is_own=is_own)

    @classmethod
    def load(cls, path: str | os.PathLike, graph: Graph, mesh: Mesh | Devices) -> Self:
        """`loads` of the file at `path`; PlanError if it cannot be read."""
        return cls.loads(serialise.read(path), graph, mesh)

    @classmethod
    @abstractmethod
    def of_saved(cls, saved: Saved, graph: Graph, mesh: Mesh | Devices, *, is_own: bool) -> Self:
        """`loads` of what was read already."""
