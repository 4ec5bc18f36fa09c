"""`PlanRequest`: the planning options of a call or command, from the public API to the search."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.training import REDUCE_DTYPES, WHOLE_BATCH, Training
from autopar.errors import AutoparError
from autopar.sbp.assignment import NO_CHOICES, Assignment
from autopar.sbp.placement import Layout
from autopar.sbp.proof.unknown_ops import UnknownOps, check_unknown_ops
from autopar.schedule.orders import NAMES as SCHEDULES


@dataclass(frozen=True)
class PlanRequest:
    """The planning options of a user; for a stage of a pipeline also those that the pipeline fixes.

    `pins`: FQN -> layout, for all copies of its layer. `stored`: FQN -> layout, for this parameter alone.
    `excluded`: op -> texts of strategies, or input value -> texts of layouts, that it must not have.
    `memory_limit_bytes`: of a device; None: that of the cluster's devices. `time_limit_s`: of all planning.
    `num_microbatches`, `schedule`: None: those of the fastest plan that fits. `trains`: whether `train_step` runs the
    plan; otherwise it has one stage and one microbatch. `unknown_ops`: whether ops without a rule are run on samples.
    `outputs`: output of the graph -> layout; all others lie as is
    fastest.

    Of a stage: `crossing`: boundary tensor -> layout; `given`: choices that its plan has whatever the search chooses.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    excluded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    memory_limit_bytes: float | None = None
    training: Training = WHOLE_BATCH
    time_limit_s: float = 30.0
    num_microbatches: int | None = None
    schedule: str | None = None
    trains: bool = True
    unknown_ops: UnknownOps = "discover"
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


def request_of(
    pins: Mapping[str, str] | None,
    memory_limit_bytes: float | None,
    time_limit_s: float | None,
    num_microbatches: int | None,
    schedule: str | None,
    reduce_dtype: torch.dtype | None = None,
    unknown_ops: UnknownOps = "discover",
) -> PlanRequest:
    """The planning options of `autopar.plan`, where None stands for the default, as a request.

    AutoparError for one of a wrong type or value, with what was expected.
    """
    check_unknown_ops(unknown_ops)
    request: dict[str, Any] = {"unknown_ops": unknown_ops}
    if pins:
        if not isinstance(pins, Mapping) or not all(isinstance(x, str) for pair in pins.items() for x in pair):
            raise AutoparError(
                f"pins= expects a mapping of names to layouts, e.g. {{'lm_head.weight': 'S(0)B'}}, found {pins!r}"
            )
        request["pins"] = dict(pins)
    if memory_limit_bytes is not None:
        if not isinstance(memory_limit_bytes, int | float) or not memory_limit_bytes > 0:
            raise AutoparError(
                f"memory_limit_bytes= expects a positive number of bytes per device, found {memory_limit_bytes!r}"
            )
        request["memory_limit_bytes"] = float(memory_limit_bytes)
    if time_limit_s is not None:
        if not isinstance(time_limit_s, int | float) or not time_limit_s >= 0:
            raise AutoparError(f"time_limit_s= expects a number of seconds, found {time_limit_s!r}")
        request["time_limit_s"] = float(time_limit_s)
    if num_microbatches is not None:
        if not isinstance(num_microbatches, int) or num_microbatches < 1:
            raise AutoparError(f"num_microbatches= expects a positive number, found {num_microbatches!r}")
        request["num_microbatches"] = num_microbatches
    if schedule is not None:
        if schedule not in SCHEDULES:
            raise AutoparError(f"schedule= expects one of {', '.join(SCHEDULES)}, found {schedule!r}")
        request["schedule"] = schedule
    return PlanRequest(**request, training=_summing_in(reduce_dtype))


def _summing_in(dtype: torch.dtype | None) -> Training:
    name = "" if dtype is None else next((name for name, known in REDUCE_DTYPES.items() if known is dtype), None)
    if name is None:
        expected = ", ".join(f"torch.{known}" for known in REDUCE_DTYPES)
        raise AutoparError(f"reduce_dtype= expects one of {expected}, found {dtype!r}")
    return replace(WHOLE_BATCH, reduce_dtype=name)
