"""One rank of `bench.cluster`: steps of autopar and of each library on a model, in turn.

    torchrun ... -m bench.cluster.run_ranks NETWORK CALIBRATION FOLDER MODEL ...

The first rank writes FOLDER/MODEL.json: seconds of each round by variant.
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.costmodel.cluster.load_cluster import Cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.mesh import as_mesh
from bench.cluster.libraries import BOTH, DDP, FSDP, NO_RESHARD, TP, Build, data_parallel, libraries, variants_of
from bench.each_network import equal_hosts
from bench.models import CLUSTER_WORKLOADS, Workload
from bench.networks.run_ranks import WARM_STEPS, plans_of, steps_of_turn, timed_s
from bench.step import Args, Step, adamw, check_losses, losses_of, one_process_losses, staged_step, train_step

OWN = "autopar"
ROUNDS = 7
FLOOR = "floor of DDP"
# Library -> the mesh and the hand plan with its layout.
SAME = {
    DDP: ((4,), "ddp"),
    FSDP: ((4,), "zero3"),
    NO_RESHARD: ((4,), "zero2"),
    TP: ((4,), "megatron:dp=1,tp=4"),
    BOTH: ((2, 2), "megatron:dp=2,tp=2,zero3"),
}
# torchtitan splits the sequence beside tensor parallelism.
_SAME_AS_TITAN = SAME | {TP: ((4,), "megatron:dp=1,tp=4,sp"), BOTH: ((2, 2), "megatron:dp=2,tp=2,sp,zero3")}


def floor(model: nn.Module, args: Args) -> Step:
    """A step of data parallelism's compute and of its collectives at once, none of which waits for the other."""
    compute = data_parallel(model, args)
    gradients = torch.zeros(sum(x.numel() for x in model.parameters()))

    def step() -> torch.Tensor:
        work = dist.all_reduce(gradients, async_op=True)
        loss = compute()
        work.wait()
        return loss

    return step


def own(workload: Workload, cluster: Cluster) -> dict[str, Build]:
    """Variant -> its step, of autopar: with the mesh left open, and in each library's layout."""

    def compiled(model: nn.Module, args: Args, *, mesh: tuple[int, ...] | int, **options: object) -> Step:
        module = autopar.compile(model, mesh, args=args, **options)
        step = staged_step if module.plan.mesh.axis_names[0] == "pp" else train_step
        return functools.partial(step, module, args, adamw(module))

    found = {OWN: functools.partial(compiled, mesh=4, cluster=cluster)}
    graph, by_hand = trace(skeleton(workload.build()), workload.inputs(), {}), libraries(workload)
    for shape in ((4,), (2, 2)):
        plans = plans_of(graph, as_mesh(shape), cluster)
        for library, (mesh, name) in (_SAME_AS_TITAN if workload.shard else SAME).items():
            if mesh == shape and name in plans and variants_of(library, by_hand):
                found[f"{OWN} as {library}"] = functools.partial(compiled, mesh=mesh, plan=plans[name])
    return found


def seconds_of(name: str, cluster: Cluster) -> dict[str, list[float]]:
    """Variant -> seconds of a step in each round; call on all ranks."""
    workload, steps = CLUSTER_WORKLOADS[name], dict[str, Step]()
    expected = one_process_losses(workload)
    for title, build in (own(workload, cluster) | libraries(workload)).items():
        torch.manual_seed(0)
        model = workload.build()
        steps[title] = build(model, workload.inputs())
        check_losses(title, losses_of(steps[title]), expected)
    steps[FLOOR] = floor(workload.build(), workload.inputs())
    for _ in range(WARM_STEPS):
        steps[FLOOR]()
    seconds: dict[str, list[float]] = {title: [] for title in steps}
    num_steps = steps_of_turn(list(steps.values()))
    for _ in range(ROUNDS):
        for title, step in steps.items():
            seconds[title].append(timed_s(step, num_steps))
    return seconds


def main() -> None:
    _, calibration, folder, *models = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = equal_hosts(calibration)
    for name in models:
        seconds = seconds_of(name, cluster)
        if dist.get_rank() == 0:
            path = Path(folder) / f"{name}.json"
            path.with_suffix(".part").write_text(json.dumps({"seconds": seconds, "overlap": cluster.overlap}))
            os.replace(path.with_suffix(".part"), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
