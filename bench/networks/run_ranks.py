"""One rank of `bench.networks`: steps under many plans of a model, priced and timed.

    torchrun ... -m bench.networks.run_ranks NETWORK CALIBRATION FOLDER MODEL ...

The first rank writes FOLDER/MODEL.json, a row for each plan.
"""

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.costmodel.cluster.load_cluster import Cluster, load_cluster
from autopar.costmodel.pricing.encode_decode import with_parameter_buckets
from autopar.costmodel.pricing.priced_buckets import priced_buckets
from autopar.costmodel.training import WHOLE_BATCH
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Mesh, as_mesh
from autopar.planner.handwritten.hand_plan import hand_plans
from autopar.plans.plan import Plan, plan_of
from autopar.sbp.candidates import annotate
from bench.each_network import equal_hosts
from bench.models import NETWORK_WORKLOADS, Workload
from bench.report import Row
from bench.step import adamw, train_step

PRESET = "cpu"
MESHES = ((4,), (2, 2))
FOUND = "found"
ROUNDS, MOST_STEPS, WARM_STEPS = 7, 3, 2
TURN_S = 1.0  # of one plan in a round, if its steps are that short


@dataclass(frozen=True)
class Timed:
    """A plan, the same priced for the preset, and the step that runs it."""

    plan: Plan
    preset_s: float
    step: Callable[[], torch.Tensor]


def plans_of(graph: Graph, mesh: Mesh, cluster: Cluster) -> dict[str, Plan]:
    """The hand plans of a mesh by name, with their parameters in buckets."""
    folded = fold(graph)
    by_hand = hand_plans(graph, folded, annotate(graph, mesh, folded), mesh)
    places = priced_buckets(graph, folded, mesh, cluster, WHOLE_BATCH, cluster.memory_bytes)
    return {
        name: plan_of(graph, with_parameter_buckets(assignment, graph, places, mesh, cluster), mesh, cluster)
        for name, assignment in by_hand.items()
    }


def rows_of(name: str, network: str, cluster: Cluster, preset: Cluster) -> list[Row]:
    """The rows of a model; call on all ranks."""
    workload = NETWORK_WORKLOADS[name]
    graph = trace(skeleton(workload.build()), workload.inputs(), {})
    ready: dict[str, Timed] = {}
    for shape in MESHES:
        mesh = as_mesh(shape)
        plans = plans_of(graph, mesh, cluster)
        plans[FOUND] = autopar.plan(workload.build(), shape, cluster=cluster, args=workload.inputs())
        for title, plan in plans.items():
            preset_s = plan_of(graph, plan.assignment, mesh, preset).step_s
            ready[f"{title} on {mesh}"] = Timed(plan, preset_s, step_of(workload, plan))
    seconds: dict[str, list[float]] = {title: [] for title in ready}
    num_steps = steps_of_turn([timed.step for timed in ready.values()])
    for _ in range(ROUNDS):
        for title, timed in ready.items():
            seconds[title].append(timed_s(timed.step, num_steps))
    return [
        {
            "row": f"{network}, {name}, {title}",
            "network": network,
            "model": name,
            "plan": title,
            "predicted_s": timed.plan.step_s,
            "preset_s": timed.preset_s,
            "measured_s": median(seconds[title]),
            "seconds": seconds[title],
        }
        for title, timed in ready.items()
    ]


def step_of(workload: Workload, plan: Plan) -> Callable[[], torch.Tensor]:
    """A training step with AdamW under `plan`, warmed up."""
    torch.manual_seed(0)
    model: nn.Module = workload.build()
    args = workload.inputs()
    module = autopar.compile(model, plan.mesh.shape, args=args, plan=plan)
    step = functools.partial(train_step, module, args, adamw(module))
    for _ in range(WARM_STEPS):
        step()
    return step


def timed_s(step: Callable[[], torch.Tensor], num_steps: int) -> float:
    """Seconds of a step, the mean of some, until the last rank has made it."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / num_steps


def steps_of_turn(steps: Sequence[Callable[[], torch.Tensor]]) -> int:
    """How many steps are timed at once, the same on all ranks: as few as take about `TURN_S`, `MOST_STEPS` at most."""
    found = torch.tensor([median(timed_s(step, 1) for step in steps)])
    dist.broadcast(found, 0)
    return max(1, min(MOST_STEPS, math.ceil(TURN_S / found.item())))


def main() -> None:
    network, calibration, folder, *models = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster, preset = equal_hosts(calibration), load_cluster(PRESET)
    for name in models:
        rows = rows_of(name, network, cluster, preset)
        if dist.get_rank() == 0:
            path = Path(folder) / f"{name}.json"
            path.with_suffix(".part").write_text(json.dumps({"points": rows}))
            os.replace(path.with_suffix(".part"), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
