"""`replan`: a plan made anew for other devices, beside the one that keeps its layouts, and what moves."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from autopar.answers.replan import Replanned, replanned, request_like
from autopar.answers.step_terms import AnyPlan
from autopar.costmodel.cluster.load_cluster import Cluster, load_cluster
from autopar.errors import AutoparError
from autopar.mesh import Devices, Mesh, as_mesh
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.budget import Progress
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest


def replan(
    plan: AnyPlan,
    mesh: Any,
    *,
    lost: Collection[int] = (),
    cluster: Cluster | str | None = None,
    time_limit_s: float = 30.0,
    read_rate: float | None = None,
    progress: Progress | None = None,
) -> Replanned:
    """A plan made anew for another `mesh` beside `plan`, and the state that moves to it.

    `mesh`: as in `autopar.plan`; a number of devices leaves its axes to the search. `lost`: ranks that are gone; the
    others take the first ranks of the new mesh, in their order. `cluster`: by default that of the plan, as are memory
    limit and optimizer. `time_limit_s`: of each of two plans. `read_rate`: bytes of a checkpoint that all devices
    together read in a second, without which reading counts for nothing. In the result, `after` is the plan made anew,
    `closest` the one that keeps the stored layouts, each with its `state`: bytes that each device needs, holds already,
    gets from other devices, or from a checkpoint since nobody holds them, and the seconds of the messages.

    InfeasibleError, with the fewest devices found to hold the model, if `mesh` does not; MeshError for more devices
    than the cluster has; AutoparError for a rank in `lost` that there is not.
    """
    if read_rate is not None and not 0 < read_rate < math.inf:
        raise AutoparError(f"read_rate= expects bytes a second, a positive number, found {read_rate!r}")
    there = plan.cluster if cluster is None else load_cluster(cluster) if isinstance(cluster, str) else cluster

    def planner(asked: Mesh | Devices, request: PlanRequest) -> AnyPlan:
        if progress is not None:
            progress(f"plan for {asked}")
        return choose_plan(plan.graph, asked, there, request, progress=progress, predict=rank_peaks)

    request = replace(request_like(plan), time_limit_s=time_limit_s)
    return replanned(plan, as_mesh(mesh), planner, request, lost, read_rate)
