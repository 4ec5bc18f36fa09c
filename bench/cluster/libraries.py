"""Steps of a model under the libraries that split it by hand, as their users write them, on four ranks."""

import functools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, build_stage, pipeline
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from bench.models import Workload, cross_entropy
from bench.step import Args, Step, Variant, adamw, part, train_step, with_fsdp_and_tensor_parallel, with_tensor_parallel

BUCKETS_MB = (1, 5, 25, 100)
STAGES_AND_MICROBATCHES = ((4, 8), (2, 4))
DDP, FSDP, NO_RESHARD, HSDP = "DDP", "FSDP2", "FSDP2, gathered once", "HSDP"
TP, BOTH, STAGES = "TP", "FSDP2 x TP", "pipelining"
Build = Callable[[nn.Module, Args], Step]
LIBRARIES = (DDP, FSDP, NO_RESHARD, HSDP, TP, BOTH, STAGES)


def variants_of(library: str, names: Iterable[str]) -> list[str]:
    """Of the names of variants those of a library; those of DDP differ by the size of buckets, those of pipelining by
    the numbers of stages and microbatches.

    >>> variants_of("FSDP2", ["autopar as FSDP2", "FSDP2", "FSDP2, gathered once"])
    ['FSDP2']
    """
    has_sizes = library in (DDP, STAGES)
    return [name for name in names if name == library or (has_sizes and name.startswith(f"{library}, "))]


def libraries(workload: Workload) -> dict[str, Build]:
    """Variant -> its step, of the libraries as their users write them."""

    def ddp(model: nn.Module, args: Args, *, bucket_mb: int) -> Step:
        return data_parallel(
            DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True), args
        )

    found = {f"{DDP}, {size} MB": functools.partial(ddp, bucket_mb=size) for size in BUCKETS_MB}
    found |= _of_titan(workload.shard) if workload.shard else _of_torch(workload)
    if workload.cuts:
        for sizes in STAGES_AND_MICROBATCHES:
            name = f"{STAGES}, {sizes[0]} stages, {sizes[1]} microbatches"
            found[name] = functools.partial(_in_stages, workload, num_stages=sizes[0], num_microbatches=sizes[1])
    return found


def _of_torch(workload: Workload) -> dict[str, Build]:
    def fsdp(model: nn.Module, args: Args, *, shape: tuple[int, ...] = (4,), reshards: bool = True) -> Step:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for fqn in workload.blocks:
            fully_shard(model.get_submodule(fqn), mesh=mesh, reshard_after_forward=reshards)
        return data_parallel(fully_shard(model, mesh=mesh, reshard_after_forward=reshards), args)

    def of(build: Callable[[Workload, nn.Module, Args], Variant]) -> Build:
        return lambda model, args: build(workload, model, args).step

    found = {FSDP: fsdp, NO_RESHARD: functools.partial(fsdp, reshards=False)}
    found[HSDP] = functools.partial(fsdp, shape=(2, 2))
    if workload.tensor_parallel():
        found |= {TP: of(with_tensor_parallel), BOTH: of(with_fsdp_and_tensor_parallel)}
    return found


def _of_titan(shard: Callable[..., nn.Module]) -> dict[str, Build]:
    def sharded(model: nn.Module, args: Args, *, tp: int = 1, **degrees: object) -> Step:
        model = shard(model, tp=tp, **degrees)
        step = functools.partial(train_step, model, part(args, dist.get_rank() // tp, 4 // tp), adamw(model))
        return loss_parallel()(step) if tp > 1 else step

    degrees = {
        FSDP: {"shards": 4},
        NO_RESHARD: {"shards": 4, "reshards": "never"},
        HSDP: {"replicas": 2, "shards": 2},
        TP: {"tp": 4},
        BOTH: {"shards": 2, "tp": 2},
    }
    return {name: functools.partial(sharded, **given) for name, given in degrees.items()}


class _Scores(nn.Module):
    """A model without its loss: `pipeline` gives the last stage no labels, which its schedules give their loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.scores(x)


def _in_stages(workload: Workload, model: nn.Module, args: Args, *, num_stages: int, num_microbatches: int) -> Step:
    """1F1B as torch.distributed.pipelining cuts the model, with FSDP2 of a stage that has several ranks."""
    mesh = init_device_mesh("cpu", (num_stages, 4 // num_stages), mesh_dim_names=("pp", "dp"))
    x, labels = part(args, mesh.get_local_rank("dp"), mesh.size(1))
    cuts = {f"model.{fqn}": SplitPoint.BEGINNING for fqn in workload.cuts[4 // num_stages - 1 :: 4 // num_stages]}
    pipe, number = pipeline(_Scores(model), (x.chunk(num_microbatches)[0],), split_spec=cuts), mesh.get_local_rank("pp")
    module: nn.Module = pipe.get_stage_module(number)
    if mesh.size(1) > 1:
        module = fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    stage = build_stage(module, number, pipe.info(), torch.device("cpu"), mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=cross_entropy)
    optimizer, given = adamw(module), (x,) if stage.is_first else ()
    target = labels if stage.is_last else None

    def step() -> torch.Tensor:
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*given, target=target, losses=losses)
        optimizer.step()
        # the ranks of the last stage have the loss, and the mean over ranks is what is looked at
        return num_stages * torch.stack(losses).detach().mean() if losses else torch.zeros(())

    return step


def data_parallel(model: nn.Module, args: Args) -> Step:
    """A step on this rank's rows."""
    return functools.partial(train_step, model, part(args, dist.get_rank(), 4), adamw(model))
