"""`replan`: a plan made anew for other devices, beside the one that keeps its layouts, and what moves."""

import math
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from autopar.answers.replan import Closest, Planner, Replanned, closest_plan, replanned, request_like
from autopar.answers.step_terms import AnyPlan
from autopar.costmodel.cluster.load_cluster import Cluster, load_cluster
from autopar.errors import AutoparError
from autopar.mesh import Devices, Mesh, as_mesh
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.budget import Progress
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest

BEGUN = b"begun"


def replan(
    plan: AnyPlan,
    mesh: Any,
    *,
    lost: Collection[int] = (),
    cluster: Cluster | str | None = None,
    time_limit_s: float = 30.0,
    read_rate: float | None = None,
    progress: Progress | None = None,
    closest_to: Callable[[], Closest | None] = lambda: None,
) -> Replanned:
    """A plan made anew for another `mesh` beside `plan`, and the state that moves to it.

    `mesh`: as in `autopar.plan`; a number of devices leaves its axes to the search. `lost`: ranks that are gone; the
    others take the first ranks of the new mesh, in their order. `cluster`: by default that of the plan, as are memory
    limit and optimizer. `time_limit_s`: of each of two plans. `read_rate`: bytes of a checkpoint that all devices
    together read in a second, without which reading counts for nothing. In the result, `after` is the plan made anew,
    `closest` the one that keeps the stored layouts, each with its `state`: bytes that each device needs, holds already,
    gets from other devices, or from a checkpoint since nobody holds them, and the seconds of the messages.

    `closest_to`: asked, once `after` is made, for `closest` from elsewhere; where it gives None that is made then.

    InfeasibleError, with the fewest devices found to hold the model, if `mesh` does not; MeshError for more devices
    than the cluster has; AutoparError for a rank in `lost` that there is not.
    """
    if read_rate is not None and not 0 < read_rate < math.inf:
        raise AutoparError(f"read_rate= expects bytes a second, a positive number, found {read_rate!r}")
    request = replace(request_like(plan), time_limit_s=time_limit_s)
    planner = _planner(plan, cluster, progress)
    return replanned(plan, as_mesh(mesh), planner, request, lost, read_rate, closest_to)


def closest(plan: AnyPlan, mesh: Any, cluster: Cluster | str | None, time_limit_s: float) -> Closest:
    """(the plan for `mesh` that keeps the stored layouts of `plan`; why there is none)."""
    request = replace(request_like(plan), time_limit_s=time_limit_s)
    return closest_plan(plan, as_mesh(mesh), _planner(plan, cluster, None), request)


def _planner(plan: AnyPlan, cluster: Cluster | str | None, progress: Progress | None) -> Planner:
    there = plan.cluster if cluster is None else load_cluster(cluster) if isinstance(cluster, str) else cluster

    def planner(asked: Mesh | Devices, request: PlanRequest) -> AnyPlan:
        if progress is not None:
            progress(f"plan for {asked}")
        return choose_plan(plan.graph, asked, there, request, progress=progress, predict=rank_peaks)

    return planner


@contextmanager
def quiet_pickles() -> Iterator[None]:
    """A context without torch's warnings when it reads the structure of arguments that it has written itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec")
        yield


def _answer() -> None:
    """Read arguments of `closest`, pickled by the process that started this one, and give it `BEGUN` and the result."""
    with quiet_pickles():
        task = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(BEGUN)
    sys.stdout.buffer.flush()
    sys.stdout.buffer.write(pickle.dumps(closest(*task)))


if __name__ == "__main__":
    _answer()
