"""Real training steps on gloo ranks of this machine: the plan autopar chose beside the ways people do it by hand.

    python -m bench.step [--models gpt wide-mlp vgg13] [--rounds 7] [--steps 3]

All variants live in the same four processes and take turns, so that what else the machine does falls on all of them alike.
A step is forward, backward and AdamW on the same global batch; every variant's first loss is checked against one process.
"""

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.codegen.count import count_collectives
from bench.models import WORKLOADS, Workload
from bench.report import Row, save

NUM_RANKS = 4
CLUSTER = "cpu"
LOSS_TOLERANCE = 1e-4

Step = Callable[[], torch.Tensor]  # one training step; the loss before it, of this rank's part of the batch
Variant = Callable[[Workload, DeviceMesh, nn.Module, tuple[torch.Tensor, ...]], tuple[nn.Module, tuple[torch.Tensor, ...]]]


def with_autopar(_: Workload, mesh: DeviceMesh, model: nn.Module, args: tuple) -> tuple[nn.Module, tuple]:
    """The plan found for this mesh; the whole batch goes in, as in the one-device loop."""
    return autopar.compile(model, mesh, args=args, cluster=CLUSTER), args


def with_autopar_on_one_axis(_: Workload, mesh: DeviceMesh, model: nn.Module, args: tuple) -> tuple[nn.Module, tuple]:
    """The plan found when all ranks are one mesh axis."""
    flat = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("ranks",))
    return autopar.compile(model, flat, args=args, cluster=CLUSTER), args


def with_ddp(_: Workload, mesh: DeviceMesh, model: nn.Module, args: tuple) -> tuple[nn.Module, tuple]:
    """Data parallel over all ranks."""
    return DistributedDataParallel(model), _part(args, dist.get_rank(), NUM_RANKS)


def with_fsdp(workload: Workload, mesh: DeviceMesh, model: nn.Module, args: tuple) -> tuple[nn.Module, tuple]:
    """FSDP2 over all ranks, block by block."""
    flat = init_device_mesh("cpu", (NUM_RANKS,))
    for fqn in workload.blocks:
        fully_shard(model.get_submodule(fqn), mesh=flat)
    return fully_shard(model, mesh=flat), _part(args, dist.get_rank(), NUM_RANKS)


def with_tensor_parallel(workload: Workload, mesh: DeviceMesh, model: nn.Module, args: tuple) -> tuple[nn.Module, tuple]:
    """parallelize_module over all ranks."""
    return parallelize_module(model, init_device_mesh("cpu", (NUM_RANKS,)), dict(workload.tensor_parallel())), args


def with_fsdp_and_tensor_parallel(workload: Workload, mesh: DeviceMesh, model: nn.Module, args: tuple) -> tuple[nn.Module, tuple]:
    """parallelize_module on the inner axis, FSDP2 on the outer one."""
    model = parallelize_module(model, mesh["tp"], dict(workload.tensor_parallel()))
    for fqn in workload.blocks:
        fully_shard(model.get_submodule(fqn), mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), _part(args, mesh.get_local_rank("dp"), mesh.size(0))


VARIANTS: dict[str, Variant] = {
    "autopar (2x2)": with_autopar,
    "autopar (4)": with_autopar_on_one_axis,
    "DistributedDataParallel": with_ddp,
    "FSDP2 fully_shard": with_fsdp,
    "parallelize_module (tp=4)": with_tensor_parallel,
    "fully_shard x parallelize_module (2x2)": with_fsdp_and_tensor_parallel,
}


def _part(args: tuple[torch.Tensor, ...], index: int, size: int) -> tuple[torch.Tensor, ...]:
    return tuple(x.chunk(size)[index] for x in args)


def train_step(model: nn.Module, args: tuple, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Forward, backward, update."""
    optimizer.zero_grad()
    loss = model(*args)
    loss.backward()
    optimizer.step()
    return loss.detach()


def build_step(name: str, workload: Workload, mesh: DeviceMesh) -> Step:
    """The variant's training step; weights and batch are the same for every variant and rank."""
    torch.manual_seed(0)
    model, args = VARIANTS[name](workload, mesh, workload.build(), workload.inputs())
    return functools.partial(train_step, model, args, torch.optim.AdamW(model.parameters(), lr=1e-3))


def reference_loss(workload: Workload) -> float:
    """Loss of the first step in one process."""
    torch.manual_seed(0)
    with torch.no_grad():
        return float(workload.build()(*workload.inputs()))


def check_loss(name: str, step: Step, expected: float) -> None:
    """The mean over ranks of the first loss is the one-process loss; RuntimeError else."""
    loss = step()
    dist.all_reduce(loss)
    found = float(loss) / NUM_RANKS
    if abs(found - expected) > LOSS_TOLERANCE * abs(expected):
        raise RuntimeError(f"{name}: first loss is {found}, one process has {expected}; the variant does not train the same model")


def measure(model: str, rounds: int, steps: int, advance: Callable[[], None]) -> list[Row]:
    """Times and collectives of every variant on one model; call on all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    workload = WORKLOADS[model]
    expected = reference_loss(workload)
    ready: dict[str, Step] = {}
    issued = {}
    for name in VARIANTS:
        ready[name] = build_step(name, workload, mesh)
        check_loss(name, ready[name], expected)
        with count_collectives(mesh) as issued[name]:
            ready[name]()
        advance()
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, step in ready.items():
            seconds[name].append(_time(step, steps))
            advance()
    return [Row(model, name, tuple(seconds[name]), tuple(issued[name])) for name in VARIANTS]


def _time(step: Step, steps: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def run_rank(rank: int, folder: str, settings: dict[str, Any]) -> None:
    """One rank of the benchmark; rank 0 shows progress and writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=NUM_RANKS)
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), disable=rank != 0) as progress:
        for model in settings["models"]:
            task = progress.add_task(model, total=len(VARIANTS) * (1 + settings["rounds"]))
            rows += measure(model, settings["rounds"], settings["steps"], functools.partial(progress.advance, task))
    if rank == 0:
        print(save("step", rows, settings))
    dist.destroy_process_group()


def main() -> None:
    """Read the settings and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=7, help="rounds (two or more), in each of which every variant has its turn")
    parser.add_argument("--steps", type=int, default=3, help="steps of one turn")
    settings = vars(parser.parse_args()) | {"ranks": NUM_RANKS, "mesh": "dp=2,tp=2", "cluster": CLUSTER, "threads per rank": 1}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, args=(folder, settings), nprocs=NUM_RANKS)
    print(f"written to {Path('bench/results')}/step.md and step.json")


if __name__ == "__main__":
    main()
