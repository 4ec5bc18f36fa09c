"""One rank of `bench.cluster`: steps of autopar and of each library on a model, in turn.

    torchrun ... -m bench.cluster.run_ranks NETWORK CALIBRATION FOLDER MODEL ...

The first rank writes FOLDER/MODEL.json: seconds of each round by variant.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.costmodel.cluster.load_cluster import Cluster, load_cluster
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.trace import trace
from autopar.mesh import as_mesh
from bench.models import NETWORK_WORKLOADS, Workload
from bench.networks.run_ranks import WARM_STEPS, plans_of, steps_of_turn, timed_s
from bench.step import (
    Args,
    Step,
    Variant,
    adamw,
    check_losses,
    losses_of,
    one_process_losses,
    part,
    train_step,
    with_fsdp_and_tensor_parallel,
    with_tensor_parallel,
)

OWN = "autopar"
ROUNDS = 7
BUCKETS_MB = (1, 5, 25, 100)
DDP, FSDP, NO_RESHARD, TP, BOTH = "DDP", "FSDP2", "FSDP2, gathered once", "TP", "FSDP2 x TP"
FLOOR = "floor of DDP"
# Library -> the mesh and the hand plan with its layout.
SAME = {
    DDP: ((4,), "ddp"),
    FSDP: ((4,), "zero3"),
    NO_RESHARD: ((4,), "zero2"),
    TP: ((4,), "megatron:dp=1,tp=4"),
    BOTH: ((2, 2), "megatron:dp=2,tp=2,zero3"),
}


def libraries(workload: Workload) -> dict[str, Callable[[nn.Module, Args], Step]]:
    """Variant -> its step, of the libraries as their users write them."""

    def ddp(model: nn.Module, args: Args, *, bucket_mb: int) -> Step:
        return _step(DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True), args)

    def fsdp(model: nn.Module, args: Args, *, reshards: bool) -> Step:
        mesh = init_device_mesh("cpu", (4,))
        for fqn in workload.blocks:
            fully_shard(model.get_submodule(fqn), mesh=mesh, reshard_after_forward=reshards)
        return _step(fully_shard(model, mesh=mesh, reshard_after_forward=reshards), args)

    def of(build: Callable[[Workload, nn.Module, Args], Variant]) -> Callable[[nn.Module, Args], Step]:
        return lambda model, args: build(workload, model, args).step

    found = {f"{DDP}, {size} MB": functools.partial(ddp, bucket_mb=size) for size in BUCKETS_MB}
    found |= {FSDP: functools.partial(fsdp, reshards=True), NO_RESHARD: functools.partial(fsdp, reshards=False)}
    if workload.tensor_parallel():
        found |= {TP: of(with_tensor_parallel), BOTH: of(with_fsdp_and_tensor_parallel)}
    return found


def floor(model: nn.Module, args: Args) -> Step:
    """A step of data parallelism's compute and of its collectives at once, none of which waits for the other."""
    compute = _step(model, args)
    gradients = torch.zeros(sum(x.numel() for x in model.parameters()))

    def step() -> torch.Tensor:
        work = dist.all_reduce(gradients, async_op=True)
        loss = compute()
        work.wait()
        return loss

    return step


def variants_of(library: str, names: Iterable[str]) -> list[str]:
    """Of the names of variants those of a library; those of DDP differ by the size of buckets.

    >>> variants_of("FSDP2", ["autopar as FSDP2", "FSDP2", "FSDP2, gathered once"])
    ['FSDP2']
    """
    return [name for name in names if name == library or (library == DDP and name.startswith(f"{DDP}, "))]


def _step(model: nn.Module, args: Args) -> Step:
    return functools.partial(train_step, model, part(args, dist.get_rank(), 4), adamw(model))


def own(workload: Workload, cluster: Cluster) -> dict[str, Callable[[nn.Module, Args], Step]]:
    """Variant -> its step, of autopar: with the mesh left open, and in each library's layout."""

    def compiled(model: nn.Module, args: Args, *, mesh: tuple[int, ...] | int, **options: object) -> Step:
        module = autopar.compile(model, mesh, args=args, **options)
        return functools.partial(train_step, module, args, adamw(module))

    found = {OWN: functools.partial(compiled, mesh=4, cluster=cluster, num_microbatches=1)}
    graph, by_hand = trace(skeleton(workload.build()), workload.inputs(), {}), libraries(workload)
    for shape in ((4,), (2, 2)):
        plans = plans_of(graph, as_mesh(shape), cluster)
        for library, (mesh, name) in SAME.items():
            if mesh == shape and name in plans and variants_of(library, by_hand):
                found[f"{OWN} as {library}"] = functools.partial(compiled, mesh=mesh, plan=plans[name])
    return found


def seconds_of(name: str, cluster: Cluster) -> dict[str, list[float]]:
    """Variant -> seconds of a step in each round; call on all ranks."""
    workload, steps = NETWORK_WORKLOADS[name], dict[str, Step]()
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
    cluster = load_cluster(calibration)
    for name in models:
        seconds = seconds_of(name, cluster)
        if dist.get_rank() == 0:
            path = Path(folder) / f"{name}.json"
            path.with_suffix(".part").write_text(json.dumps({"seconds": seconds, "overlap": cluster.overlap}))
            os.replace(path.with_suffix(".part"), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
