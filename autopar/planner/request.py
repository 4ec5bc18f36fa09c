"""`PlanRequest`: the planning options of a call or command, from the public API to the search."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.training import WHOLE_BATCH, Training
from autopar.sbp.assignment import NO_CHOICES, Assignment
from autopar.sbp.placement import Layout


@dataclass(frozen=True)
class PlanRequest:
    """The planning options of a user; for a stage of a pipeline also those that the pipeline fixes.

    `pins`: FQN -> layout, for all copies of its layer. `stored`: FQN -> layout, for this parameter alone.
    `memory_limit_bytes`: of a device; None: that of the cluster's devices. `time_limit_s`: of all planning.
    `num_microbatches`, `schedule`: None: those of the fastest plan that fits. `trains`: whether `train_step` runs the
    plan; otherwise it has one stage and one microbatch. `outputs`: output of the graph -> layout; all others lie as is
    fastest.

    Of a stage: `crossing`: boundary tensor -> layout; `given`: choices that its plan has whatever the search chooses.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    memory_limit_bytes: float | None = None
    training: Training = WHOLE_BATCH
    time_limit_s: float = 30.0
    num_microbatches: int | None = None
    schedule: str | None = None
    trains: bool = True
    outputs: Mapping[str, Layout] = field(default_factory=dict)
    crossing: Mapping[str, Layout] = field(default_factory=dict)
    given: Assignment = NO_CHOICES

    @property
    def is_open(self) -> bool:
        """Whether the search chooses microbatches and stages."""
        return self.num_microbatches is None and self.schedule is None

    @property
    def limit_bytes(self) -> float:
        """`memory_limit_bytes`, of a request that was made `on` a cluster."""
        assert self.memory_limit_bytes is not None, "a request is made on a cluster before planning"
        return self.memory_limit_bytes

    def on(self, cluster: Cluster) -> "PlanRequest":
        """The request with the memory limit of the cluster's devices if it has none."""
        limit = usable_memory_bytes(cluster) if self.memory_limit_bytes is None else self.memory_limit_bytes
        return replace(self, memory_limit_bytes=limit)


ANYTHING = PlanRequest()
