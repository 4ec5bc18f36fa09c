"""`PlanRequest`: the planning options of a call or command, from the public API to the search."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.memory import rank_limits, usable_memory_bytes
from autopar.costmodel.training import INFERENCE, PARAM_DTYPES, REDUCE_DTYPES, WHOLE_BATCH, Training
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.mesh import SHARING, Devices, Mesh
from autopar.sbp.assignment import NO_CHOICES, Assignment
from autopar.sbp.placement import Layout
from autopar.sbp.proof.unknown_ops import UnknownOps, check_unknown_ops
from autopar.schedule.orders import NAMES as SCHEDULES

AnyMesh = TypeVar("AnyMesh", bound=Mesh | Devices)


@dataclass(frozen=True)
class PlanRequest:
    """The planning options of a user; for a stage of a pipeline also those that the pipeline fixes.

    `pins`: FQN -> layout, for all copies of its layer. `stored`: FQN -> layout, for this parameter alone.
    `excluded`: op -> texts of strategies, or input value -> texts of layouts, that it must not have.
    `memory_limit_bytes`: of a device; None: that of the cluster's devices. `memory_share`: the share of it that a plan
    may use by its estimate. `time_limit_s`: of all planning.
    `any_order`: whether the groups of devices of a cluster may lie along the ranks in another order than they do.
    `shares`: the rows of the batch of each rank of the axis of that name, or "" for the first that can have them; () if
    all get as many. `num_microbatches`, `schedule`: None: those of the fastest plan that fits. `trains`: whether
    `train_step` runs the plan; otherwise, and in inference (`training`), it has one stage and one microbatch.
    `unknown_ops`: whether ops without a rule are run on samples. `outputs`: output of the graph -> layout; all others
    lie as is fastest.

    Of a stage: `crossing`: boundary tensor -> layout; `given`: choices that its plan has whatever the search chooses.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    excluded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    memory_limit_bytes: float | None = None
    memory_share: float = 1.0
    training: Training = WHOLE_BATCH
    time_limit_s: float = 30.0
    any_order: bool = False
    shares: tuple[tuple[str, tuple[int, ...]], ...] = ()
    num_microbatches: int | None = None
    schedule: str | None = None
    trains: bool = True
    unknown_ops: UnknownOps = "discover"
    outputs: Mapping[str, Layout] = field(default_factory=dict)
    crossing: Mapping[str, Layout] = field(default_factory=dict)
    given: Assignment = NO_CHOICES

    def __post_init__(self) -> None:
        if self.trains and not self.training.trains:
            object.__setattr__(self, "trains", False)
        if not self.training.trains and not self.is_open:
            raise AutoparError(
                f"num_microbatches={self.num_microbatches}, schedule={self.schedule}: inference (trains=False) runs a"
                " call as a whole, for nothing is kept from one part of the batch to the next; leave them out"
            )

    @property
    def is_open(self) -> bool:
        """Whether the search chooses microbatches and stages."""
        return self.num_microbatches is None and self.schedule is None

    def in_shares(self, mesh: AnyMesh) -> AnyMesh:
        """`mesh` with the shares asked for; AutoparError if it has no axis for them, or they are not rows of as many
        microbatches as are asked for.
        """
        if not self.shares:
            return mesh
        ((name, rows),) = self.shares
        if isinstance(mesh, Devices):
            raise AutoparError(
                f"shares= are of a mesh with given axes, found mesh {mesh}: name the axes, e.g. 'dp={len(rows)}'"
            )
        if any(size % (self.num_microbatches or 1) for size in rows):
            raise AutoparError(
                f"shares={rows} cannot be cut in {self.num_microbatches} equal microbatches: each rank's rows are cut"
                f" in as many; give multiples of {self.num_microbatches}, or a num_microbatches= that divides"
                f" {math.gcd(*rows)}"
            )
        names = [name] if name else [one for one in mesh.axis_names if one not in SHARING] or [mesh.axis_names[0]]
        axis = next((i for i, one in enumerate(mesh.axis_names) if one in names and mesh.shape[i] == len(rows)), None)
        if axis is None:
            raise AutoparError(
                f"shares= has the rows of {len(rows)} ranks, mesh {mesh} has no axis {name or 'of the batch'} with as"
                " many; give a number for each rank of the axis that the batch is split on"
            )
        return replace(mesh, shares=((axis, rows),))

    def trained(self, trains: bool) -> "PlanRequest":
        """The request, of inference unless it `trains`; AutoparError if inference is asked for sums of gradients."""
        if trains:
            return self
        if self.training.reduce_dtype and not self.training.param_dtype:
            raise AutoparError(
                f"reduce_dtype=torch.{self.training.reduce_dtype}: inference (trains=False) has no gradients; leave it"
                " out"
            )
        return replace(self, training=replace(INFERENCE, param_dtype=self.training.param_dtype))

    @property
    def limit_bytes(self) -> float:
        """`memory_limit_bytes`, of a request that was made `on` a cluster."""
        assert self.memory_limit_bytes is not None, "a request is made on a cluster before planning"
        return self.memory_limit_bytes

    def rank_limits(self, cluster: Cluster, num_ranks: int) -> tuple[float, ...]:
        """The bytes that a plan may use by its estimate of a device of each rank of the pipeline, of a request that was
        made `on` the cluster.
        """
        return tuple(self.memory_share * limit for limit in rank_limits(self.limit_bytes, cluster, num_ranks))

    def on(self, cluster: Cluster) -> "PlanRequest":
        """The request with the memory limit of the cluster's devices if it has none; on a cluster of groups with the
        most that a device of any may use, for each keeps to its own limit besides.
        """
        if cluster.groups is not None and cluster.groups.seen < 0:
            asked = math.inf if self.memory_limit_bytes is None else self.memory_limit_bytes
            most = max(usable_memory_bytes(one) for _, one in cluster.groups.members)
            return replace(self, memory_limit_bytes=min(asked, most))
        limit = usable_memory_bytes(cluster) if self.memory_limit_bytes is None else self.memory_limit_bytes
        return replace(self, memory_limit_bytes=limit)

    def on_least(self, cluster: Cluster) -> "PlanRequest":
        """The request with a memory limit that all devices of a cluster of groups have; else as `on`."""
        if cluster.groups is None:
            return self.on(cluster)
        asked = math.inf if self.memory_limit_bytes is None else self.memory_limit_bytes
        usable = (usable_memory_bytes(one) for _, one in cluster.groups.members)
        return replace(self, memory_limit_bytes=min(asked, *usable))


ANYTHING = PlanRequest()
FORWARD_ALONE = PlanRequest(training=INFERENCE)


def request_of(
    pins: Mapping[str, str] | None,
    memory_limit_bytes: float | None,
    time_limit_s: float | None,
    num_microbatches: int | None,
    schedule: str | None,
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
    unknown_ops: UnknownOps = "discover",
    shares: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
) -> PlanRequest:
    """The planning options of `autopar.plan`, where None stands for the default, as a request.

    `dtypes`: `param_dtype` and `reduce_dtype`. AutoparError for one of a wrong type or value, with what was expected.
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
    return PlanRequest(**request, shares=_shares(shares), training=training_in(*dtypes))


def _shares(shares: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if shares is None:
        return ()
    by_axis = dict(shares) if isinstance(shares, Mapping) else {"": shares}
    pairs = tuple((str(name), tuple(rows)) for name, rows in by_axis.items() if isinstance(rows, Sequence))
    if len(by_axis) != 1 or len(pairs) != 1 or any(type(size) is not int for size in pairs[0][1]):
        raise AutoparError(
            f"shares= expects the rows of the batch of each rank of one axis, e.g. (24, 8) or {{'dp': (24, 8)}}, found"
            f" {shares!r}"
        )
    if any(size < 1 for size in pairs[0][1]):
        raise AutoparError(
            f"shares= expects one row of the batch or more for each rank, found {pairs[0][1]}: leave a rank that gets"
            " none out of the mesh"
        )
    return pairs


def check_shares(request: PlanRequest, graph: Graph) -> None:
    """AutoparError unless the shares asked for are as many rows as the batch has."""
    for _, rows in request.shares:
        batch = next((item.value.shape[0] for item in graph.of_kind("argument") if item.value.shape), 0)
        if sum(rows) != batch:
            raise AutoparError(
                f"shares={rows} are {sum(rows)} rows, the batch has {batch}: the shares of the ranks of an axis"
                " together are the batch"
            )


def training_in(param_dtype: Any, reduce_dtype: Any, optimizer: str = WHOLE_BATCH.optimizer) -> Training:
    """A step that computes in the first dtype and sums gradients in the second one, by default in float32 if the first
    is given. AutoparError for one that cannot.
    """
    return Training(
        optimizer,
        param_dtype=_name_of(param_dtype, "param_dtype", PARAM_DTYPES),
        reduce_dtype=_name_of(reduce_dtype, "reduce_dtype", REDUCE_DTYPES) or "float32" * (param_dtype is not None),
    )


def _name_of(dtype: Any, option: str, known: Mapping[str, torch.dtype]) -> str:
    name = "" if dtype is None else next((name for name, one in known.items() if one is dtype), None)
    if name is None:
        raise AutoparError(f"{option}= expects one of {', '.join(f'torch.{x}' for x in known)}, found {dtype!r}")
    return name
