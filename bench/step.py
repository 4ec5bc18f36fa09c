"""Real training steps on gloo ranks of this machine: the plans autopar chose beside the ways people do it by hand.

    python -m bench.step [--rows 'gpt|wide-mlp|vgg13'] [--rounds 7] [--steps 3]

All variants of a model live in the same four processes and take turns, so that what else the machine does falls on all
of them alike; `--rows` chooses models. A step is forward, backward and AdamW on the same global batch. Before it is
timed, every variant trains a few steps whose losses must be those of one process: the losses after updates depend on
every gradient being synchronised.
"""

import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
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
from autopar.verify.count_collectives import count_collectives
from bench.models import WORKLOADS, Workload
from bench.report import Cells, Row, Table, add
from bench.rows import parser, selected

NUM_RANKS = 4
# Losses before the first update and after each of the others. One process and several add up floats in another order,
# and AdamW moves a weight whose gradient is rounding alone by all of the rate: 2.9e-4 was seen (vgg13 under tensor
# parallelism, in float64 1e-7).
CHECKED_STEPS = 4
LOSS_TOLERANCE = 1e-3
LEARNING_RATE = 1e-3

Args = tuple[torch.Tensor, ...]
Step = Callable[[], torch.Tensor]  # one training step; the loss before it, of this rank's part of the batch


@dataclass(frozen=True)
class Variant:
    """A model made ready to be trained. predicted_s: of a step, by autopar's plan; None where nobody predicts it."""

    step: Step
    predicted_s: float | None = None
    mesh: str | None = None


Build = Callable[[Workload, nn.Module, Args], Variant]


def with_autopar(mesh: tuple[int, ...] | int) -> Build:
    """The plan for this mesh, or for so many devices; the whole batch goes in, as in the one-device loop."""

    def build(_: Workload, model: nn.Module, args: Args) -> Variant:
        module = autopar.compile(model, mesh, args=args)
        own = train_step if module.plan.mesh.axis_names[0] != "pp" else staged_step
        return Variant(functools.partial(own, module, args, adamw(module)), module.plan.step_s, str(module.plan.mesh))

    return build


def with_ddp(_: Workload, model: nn.Module, args: Args) -> Variant:
    """Data parallel over all ranks."""
    return _by_hand(DistributedDataParallel(model), part(args, dist.get_rank(), NUM_RANKS))


def with_fsdp(workload: Workload, model: nn.Module, args: Args) -> Variant:
    """FSDP2 over all ranks, block by block."""
    flat = init_device_mesh("cpu", (NUM_RANKS,))
    for fqn in workload.blocks:
        fully_shard(model.get_submodule(fqn), mesh=flat)
    return _by_hand(fully_shard(model, mesh=flat), part(args, dist.get_rank(), NUM_RANKS))


def with_tensor_parallel(workload: Workload, model: nn.Module, args: Args) -> Variant:
    """parallelize_module over all ranks."""
    return _by_hand(
        parallelize_module(model, init_device_mesh("cpu", (NUM_RANKS,)), dict(workload.tensor_parallel())), args
    )


def with_fsdp_and_tensor_parallel(workload: Workload, model: nn.Module, args: Args) -> Variant:
    """parallelize_module on the inner axis, FSDP2 on the outer one."""
    mesh = two_by_two()
    model = parallelize_module(model, mesh["tp"], dict(workload.tensor_parallel()))
    for fqn in workload.blocks:
        fully_shard(model.get_submodule(fqn), mesh=mesh["dp"])
    return _by_hand(fully_shard(model, mesh=mesh["dp"]), part(args, mesh.get_local_rank("dp"), mesh.size(0)))


CHOSEN = "autopar, mesh left open"
DDP = "DistributedDataParallel"
VARIANTS: dict[str, Build] = {
    CHOSEN: with_autopar(NUM_RANKS),
    "autopar, mesh 4": with_autopar((NUM_RANKS,)),
    "autopar, mesh 2x2": with_autopar((2, 2)),
    DDP: with_ddp,
    "FSDP2 fully_shard": with_fsdp,
    "parallelize_module, tp=4": with_tensor_parallel,
    "fully_shard x parallelize_module, 2x2": with_fsdp_and_tensor_parallel,
}


def two_by_two() -> DeviceMesh:
    """All ranks as dp x tp."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def part(args: Args, index: int, size: int) -> Args:
    """The slice of the batch of one of `size` ranks."""
    return tuple(x.chunk(size)[index] for x in args)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every variant."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _by_hand(model: nn.Module, args: Args) -> Variant:
    return Variant(functools.partial(train_step, model, args, adamw(model)))


def train_step(model: nn.Module, args: Args, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Forward, backward, update."""
    optimizer.zero_grad()
    loss = model(*args)
    loss.backward()
    optimizer.step()
    return loss.detach()


def staged_step(model: nn.Module, args: Args, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The same of a plan in stages."""
    optimizer.zero_grad()
    loss = model.train_step(*args)
    optimizer.step()
    return loss.detach()


def built(name: str, workload: Workload) -> Variant:
    """The variant; weights and batch are the same for every variant and rank."""
    torch.manual_seed(0)
    return VARIANTS[name](workload, workload.build(), workload.inputs())


def one_process_losses(workload: Workload) -> list[float]:
    """Losses of the first steps of one process."""
    torch.manual_seed(0)
    model, args = workload.build(), workload.inputs()
    optimizer = adamw(model)
    return [float(train_step(model, args, optimizer)) for _ in range(CHECKED_STEPS)]


def losses_of(step: Step) -> list[float]:
    """The next losses of a variant, each the mean over ranks; call on all ranks."""
    losses = torch.stack([step().reshape(()) for _ in range(CHECKED_STEPS)])
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def check_losses(name: str, found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative distance between a variant's losses and those of one process; RuntimeError if they are not
    the same.
    """
    distance = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    if not distance <= LOSS_TOLERANCE:
        raise RuntimeError(
            f"{name}: the losses of its first {len(found)} steps are {found}, one process has {list(expected)}: they"
            f" differ by {distance:.1e} of them, expected at most {LOSS_TOLERANCE:.0e}; the variant does not train the"
            " same model"
        )
    return distance


def measure(model: str, rounds: int, steps: int, advance: Callable[[], None]) -> list[Row]:
    """Times and collectives of every variant on one model; call on all ranks."""
    workload = WORKLOADS[model]
    expected, mesh = one_process_losses(workload), two_by_two()
    ready: dict[str, Variant] = {}
    rows: dict[str, Row] = {}
    for name in VARIANTS:
        ready[name] = built(name, workload)
        distance = check_losses(f"{model}, {name}", losses_of(ready[name].step), expected)
        with count_collectives(mesh) as issued:
            ready[name].step()
        rows[name] = {
            "row": row_name(model, name),
            "model": model,
            "variant": name,
            "predicted_s": ready[name].predicted_s,
            "mesh": ready[name].mesh,
            "loss_distance": distance,
            "collectives": [asdict(one) for one in issued],
            "seconds": [],
        }
        advance()
    for _ in range(rounds):
        for name, variant in ready.items():
            rows[name]["seconds"].append(_time(variant.step, steps))
            advance()
    for row in rows.values():
        row["median_s"] = median(row["seconds"])
    return list(rows.values())


def _time(step: Step, steps: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def row_name(model: str, variant: str) -> str:
    """
    >>> row_name("gpt", DDP)
    'gpt, DistributedDataParallel'
    """
    return f"{model}, {variant}"


def cells(row: Row) -> list[Cells]:
    """The line of one variant; the spread is the range of the middle half of the rounds."""
    low, _, high = quantiles(row["seconds"], n=4, method="inclusive")
    predicted = "-" if row["predicted_s"] is None else f"{1e3 * row['predicted_s']:.1f}"
    num_bytes = sum(collective["num_bytes"] for collective in row["collectives"])
    times = f"{1e3 * row['median_s']:.1f}", f"{1e3 * low:.1f} to {1e3 * high:.1f}", predicted
    return [
        (
            row["model"],
            row["variant"],
            *times,
            str(len(row["collectives"])),
            f"{num_bytes / 1e6:.2f}",
            f"{row['loss_distance']:.0e}",
        )
    ]


def regret(rows: Sequence[Row]) -> tuple[Row, Row, float]:
    """Of the rows of one model: the plan autopar chose, the fastest as measured, and how many times as long the first
    takes.
    """
    chosen = next(row for row in rows if row["variant"] == CHOSEN)
    best = min(rows, key=lambda row: row["median_s"])
    return chosen, best, chosen["median_s"] / best["median_s"]


TABLE = Table(
    "Training steps",
    f"Forward, backward and AdamW on {NUM_RANKS} gloo processes of one machine; every variant has its turn in every"
    " round. Predicted: by the cost model with the calibration of this machine, of the plans that autopar made. Left"
    " open: autopar chose the mesh too. Losses: the largest relative distance of the losses of the first"
    f" {CHECKED_STEPS} steps, updates included, from those of one process.",
    (
        "model",
        "variant",
        "step, ms (median)",
        "middle half",
        "predicted, ms",
        "collectives",
        "MB in their buffers",
        "losses",
    ),
    tuple(row_name(model, variant) for model in WORKLOADS for variant in VARIANTS),
    cells,
)
TABLES = (TABLE,)


def run_rank(rank: int, folder: str, models: Sequence[str], rounds: int, steps: int) -> None:
    """One rank of the benchmark; rank 0 shows progress and writes the results, model by model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=NUM_RANKS)
    settings: dict[str, Any] = {"rounds": rounds, "steps a round": steps, "threads a rank": 1}
    with Progress(console=Console(stderr=True), disable=rank != 0) as progress:
        for model in models:
            task = progress.add_task(model, total=len(VARIANTS) * (1 + rounds))
            rows = measure(model, rounds, steps, functools.partial(progress.advance, task))
            if rank == 0:
                add("step", TABLES, {TABLE.title: rows}, settings)
                print("\n".join("  ".join(line) for row in rows for line in cells(row)), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Read the settings and start the ranks."""
    options = parser(__doc__)
    options.add_argument(
        "--rounds", type=int, default=7, help="rounds (two or more), in each of which every variant has its turn"
    )
    options.add_argument("--steps", type=int, default=3, help="steps of one turn")
    settings = options.parse_args()
    asked = set(selected(TABLES, settings, "step")[TABLE.title])
    models = [model for model in WORKLOADS if asked & {row_name(model, variant) for variant in VARIANTS}]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, args=(folder, models, settings.rounds, settings.steps), nprocs=NUM_RANKS)
    print("written to bench/results/step.md and step.json")


if __name__ == "__main__":
    main()
