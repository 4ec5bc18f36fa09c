"""`autopar fit`: the smallest changes that would each make a plan fit."""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from autopar.answers.smallest_change import SmallestChange, by_bisection, by_trial, format_changes
from autopar.answers.step_terms import AnyPlan
from autopar.cli.interrupt import giving_up, until_interrupt
from autopar.costmodel.cluster.load_cluster import Cluster
from autopar.costmodel.memory import usable_memory_bytes
from autopar.costmodel.training import OPTIMIZER_STATES, Training
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.models.target import graph_of, load_target, sizes_of
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from autopar.planner.status import status
from autopar.units import format_bytes, format_seconds

Tell = Callable[[str], None]
# The furthest that a quantity is changed: times as much memory, times as many devices.
_MOST_MEMORY, _MOST_DEVICES = 2**10, 2**6
# A smaller size is a multiple of as many times the devices, so that axes and microbatches divide it, if it was before.
_SHARES = 4


@dataclass(frozen=True)
class FitTask:
    """A model that is to be trained somewhere, with what can be changed: its sizes and dtype, mesh and request."""

    target: str
    mesh: Mesh | Devices
    cluster: Cluster
    request: PlanRequest
    sizes: tuple[tuple[str, int], ...] = ()
    dtype: torch.dtype | None = None

    @property
    def graph(self) -> Graph:
        """The traced model."""
        return _graph(self.target, self.sizes, self.dtype, self.request.training.compute_dtype)

    def plan(self, **changes: Any) -> AnyPlan:
        """The plan with other fields; InfeasibleError if none fits."""
        task = replace(self, **changes)
        return choose_plan(task.graph, task.mesh, task.cluster, task.request, predict=rank_peaks)


def smallest_changes(task: FitTask, tell: Tell) -> Iterator[SmallestChange]:
    """The smallest change of memory, devices, batch, sequence, dtype and optimizer, each alone."""
    limit = task.request.memory_limit_bytes or usable_memory_bytes(task.cluster)

    def with_memory(num_bytes: float) -> AnyPlan:
        return task.plan(request=replace(task.request, memory_limit_bytes=num_bytes))

    tell("would more memory fit?")
    more = [limit * 2**power for power in range(1, _MOST_MEMORY.bit_length())]
    yield by_bisection("memory of a device", with_memory, limit, more, format_bytes)
    tell("would more devices fit?")
    yield by_trial("devices", str(task.mesh), [(str(mesh), lambda m=mesh: task.plan(mesh=m)) for mesh in _larger(task)])
    for name, size in _sizes(task).items():
        tell(f"would a smaller {name} fit?")

        def with_size(value: float, name: str = name) -> AnyPlan:
            return task.plan(sizes=(*((n, s) for n, s in task.sizes if n != name), (name, int(value))))

        smaller = [size >> power for power in range(1, size.bit_length())]
        unit = math.gcd(size, _SHARES * task.mesh.num_devices)
        yield by_bisection(name, with_size, size, smaller, lambda x: f"{x:g}", unit=unit)
    tell("would another dtype fit?")
    yield by_trial("dtype", _dtype(task), [("bfloat16", lambda: task.plan(dtype=torch.bfloat16))])
    tell("would another optimizer fit?")
    yield by_trial("optimizer", task.request.training.optimizer, _optimizers(task))


def _larger(task: FitTask) -> Iterator[Mesh | Devices]:
    """Meshes of more devices: the first axis longer, or more of them, as the cluster has."""
    for factor in (*range(2, 9), *(2**power for power in range(4, _MOST_DEVICES.bit_length()))):
        mesh = task.mesh
        if mesh.num_devices * factor > task.cluster.num_devices:
            return
        if isinstance(mesh, Devices):
            yield replace(mesh, num_devices=mesh.num_devices * factor)
        else:
            yield Mesh((mesh.shape[0] * factor, *mesh.shape[1:]), mesh.axis_names)


def _sizes(task: FitTask) -> dict[str, int]:
    """The sizes of the target that can be changed, as they are."""
    sizes = sizes_of(task.target) | dict(task.sizes)
    return {name: size for name, size in sizes.items() if name in ("batch", "sequence")}


def _dtype(task: FitTask) -> str:
    dtypes = {
        str(item.value.stored_dtype or item.value.dtype).removeprefix("torch.")
        for item in task.graph.of_kind("parameter")
    }
    return " and ".join(sorted(dtypes))


def _optimizers(task: FitTask) -> list[tuple[str, Callable[[], AnyPlan]]]:
    """Optimizers of less state than the request's, that of the most first."""
    training = task.request.training
    sizes = {name: _state_bytes(task, Training(name)) for name in OPTIMIZER_STATES if name != "none"}
    names: dict[float, str] = {}  # one of each size
    for name, size in sizes.items():
        if size < _state_bytes(task, training):
            names.setdefault(size, name)

    def attempt(name: str) -> Callable[[], AnyPlan]:
        return lambda: task.plan(request=replace(task.request, training=replace(training, optimizer=name)))

    return [(f"{names[size]}, {size:g} B an element", attempt(names[size])) for size in sorted(names, reverse=True)]


def _state_bytes(task: FitTask, training: Training) -> float:
    """Bytes of optimizer state for each element of the parameters that are trained, in the mean."""
    trained = [item.value for item in task.graph.of_kind("parameter") if item.value.needs_grad]
    sizes = [math.prod(value.shape) for value in trained]
    num_bytes = sum(size * training.state_bytes(value.stored_itemsize) for size, value in zip(sizes, trained))
    return num_bytes / max(sum(sizes), 1)


@lru_cache(maxsize=4)
def _graph(
    target: str, sizes: tuple[tuple[str, int], ...], dtype: torch.dtype | None, param_dtype: torch.dtype | None
) -> Graph:
    example = load_target(target, dtype, dict(sizes))
    return graph_of(example, param_dtype)


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `autopar fit` beside those of planning."""
    parser.add_argument("--json", action="store_true", help="the same content as JSON")


def fit(task: FitTask, *, as_json: bool) -> int:
    """Print whether a plan fits, and if none does, the smallest changes with which one would."""
    refusal, changes, told, ended = "", tuple[SmallestChange, ...](), "", 0
    with status() as tell, giving_up():
        tell("plan")
        try:
            plan = task.plan()
            peak = max(plan.peak_bytes or plan.memory_bytes)
            told = f"A plan fits: {format_seconds(plan.step_s)} a step, {format_bytes(peak)} on a device."
        except InfeasibleError as error:
            refusal = str(error)
            changes, ended = until_interrupt(smallest_changes(task, tell), "changes were tried")
            told = f"{refusal}\n\nEach of these alone would make a plan fit:\n{format_changes(changes)}"
    content = {"refusal": refusal, "changes": [_plain(each) for each in changes]}
    print(json.dumps(content, indent=1) if as_json else told)
    return ended or (0 if not refusal or any(each.plan is not None for each in changes) else 2)


def _plain(each: SmallestChange) -> dict[str, Any]:
    plan = each.plan
    memory = plan and max(plan.peak_bytes or plan.memory_bytes)
    told = {"what": each.what, "from": each.before, "to": each.after, "refused": each.refused, "reason": each.reason}
    return told | {"step_s": plan and plan.step_s, "memory_bytes": memory}
