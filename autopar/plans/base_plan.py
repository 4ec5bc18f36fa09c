"""`BasePlan`: the common interface of plans with and without stages: text, JSON, and files."""

import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self, cast

from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.plans import serialise
from autopar.plans.serialise import SavedAnyPlan

# What `found_by` says of a plan whose peak memory was not predicted, since planning was interrupted.
UNPREDICTED = "without a predicted peak"


class BasePlan(ABC):
    """The base class of `Plan` and `StagedPlan`; `SAVED`: the type of the part of the plan that its file holds."""

    SAVED: ClassVar[type[SavedAnyPlan]]

    @property
    @abstractmethod
    def step_s(self) -> float:
        """Seconds of a step."""

    @property
    @abstractmethod
    def lower_bound_s(self) -> float:
        """Seconds that no such plan is proven to take less than."""

    @property
    def gap(self) -> float:
        """The distance of the step time to its lower bound as a share of the step; 0 if proven optimal."""
        return (self.step_s - self.lower_bound_s) / self.step_s if self.step_s > 0 else 0.0

    @property
    @abstractmethod
    def memory_bytes(self) -> tuple[int, ...]:
        """The estimate of a device's memory for each rank of the pipeline."""

    @property
    @abstractmethod
    def rank_limits_bytes(self) -> tuple[float, ...]:
        """The memory limit of a device of each rank of the pipeline."""

    @property
    @abstractmethod
    def peak_bytes(self) -> tuple[int, ...]:
        """The predicted peak of a device of each rank of the pipeline; () if nobody asked."""

    @property
    def fullest_bytes(self) -> tuple[float, float]:
        """(memory of a device, its limit) of the rank that fills its limit most: the predicted peak, or without one the
        estimate.
        """
        used = self.peak_bytes or self.memory_bytes
        return max(zip(used, self.rank_limits_bytes), key=lambda rank: (rank[0] / rank[1], rank[0]))

    def explain(self) -> str:
        """The plan as text: every choice with its cost, and the alternatives."""
        from autopar.explain.explain_plan import explain  # the layer above, which reads plans

        return explain(cast(Any, self))

    def _repr_html_(self) -> str:
        """The plan in short, as notebooks show it."""
        from autopar.explain.explain_plan import plan_html  # the layer above, which reads plans

        return plan_html(cast(Any, self))

    def dumps(self) -> str:
        """The plan as JSON text, with the fingerprint of the graph in place of the graph."""
        return serialise.dumps(self.SAVED, self)

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as JSON, whole or not at all."""
        serialise.write(path, self.dumps())

    @classmethod
    def loads(cls, text: str, graph: Graph, mesh: Mesh | Devices, *, is_own: bool = False) -> Self:
        """The plan in `text`, for the same `graph` and a mesh of the same shape as when it was made; else PlanError.

        Nothing in it is trusted: figures that cannot be computed again are shown as the file's claim, unless this run
        wrote the text itself (`is_own`).
        """
        return cls.of_saved(serialise.loads(cls.SAVED, text), graph, mesh, is_own=is_own)

    @classmethod
    def load(cls, path: str | os.PathLike, graph: Graph, mesh: Mesh | Devices) -> Self:
        """`loads` of the file at `path`; PlanError if it cannot be read."""
        return cls.loads(serialise.read(path), graph, mesh)

    @classmethod
    @abstractmethod
    def of_saved(cls, saved: Any, graph: Graph, mesh: Mesh | Devices, *, is_own: bool) -> Self:
        """The plan of a file's content, an instance of `SAVED`, for this graph and mesh; errors as `loads`.

        `is_own`: whether this run wrote it, so that its results are taken over.
        """
