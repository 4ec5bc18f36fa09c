"""What a machine with GPUs shows of autopar: `python -m bench.gpu_check [--device cuda|cpu] [--ranks N] [--rows gpt]`.

For each model and mesh, on a process for each GPU (NCCL; gloo on a CPU): whether loss, gradients and parameters after a
step are those of one device, whether the collectives are those of the plan, the peak of memory predicted and measured,
and the time of forward, backward and optimizer beside one device, eager and under torch.compile. The table goes to
`bench/results/gpu_check_DEVICE_xN.md` and is printed; a row that failed says how, and the command ends with 1.
"""

import argparse
import copy
import multiprocessing
import pickle
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar
from autopar.costmodel.activations.count_storages import count_storages
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.peak_memory.predict import rank_peaks
from autopar.verify.count_collectives import count_collectives
from autopar.verify.one_step import difference, planned_collectives, whole
from bench.models import WORKLOADS, Classifier, Workload
from bench.report import Cells, Row, Table, add
from tests.zoo import MLP

TOLERANCES = {"loss": 1e-4, "gradients": 1e-3, "parameters": 1e-3}
PHASES = ("forward", "backward", "optimizer")
LEARNING_RATE = 1e-3
SMALL = Workload(lambda: Classifier(MLP(hidden=64)), lambda: (torch.randn(32, 64), torch.randint(16, (32,))), (), dict)
TEXT = """Plans are those for links that cost nothing, so that small models are split too: times are no measure of what
autopar would choose. Differences are relative to the largest entry, beside one device of the same kind. Collectives:
those that reached the process groups, of those planned. Peaks: predicted with the kernels of the device; measured by
the allocator on a GPU, storage by storage on a CPU. Times in ms, the median of the rounds; "one" is one device with the
whole batch, "ours" a rank under the plan, each eager / under torch.compile ("-": not run)."""
HEADER = ("row", "loss", "gradients", "parameters", "collectives", "peak predicted", "peak measured", *PHASES)


@dataclass(frozen=True)
class Settings:
    """What to run: `rows` are (model, mesh shape, axis names)."""

    device: str
    num_ranks: int
    rounds: int
    compiles: bool
    rows: tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...]


def meshes(num_ranks: int) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """The meshes that are tried on so many devices."""
    flat = [((num_ranks,), ("dp",))]
    if num_ranks == 1:
        return flat
    flat.append(((num_ranks,), ("tp",)))
    return [*flat, ((num_ranks // 2, 2), ("dp", "tp"))] if num_ranks > 2 and num_ranks % 2 == 0 else flat


def workload(name: str) -> Workload:
    """The model called `name`; "small" is for tests."""
    return SMALL if name == "small" else WORKLOADS[name]


def row_name(model: str, shape: Iterable[int], axes: Iterable[str]) -> str:
    """Such as "gpt dp=4,tp=2"."""
    return f"{model} {','.join(f'{axis}={size}' for axis, size in zip(axes, shape))}"


def measure(settings: Settings) -> list[Row]:
    """The rows, measured on `num_ranks` processes."""
    with tempfile.TemporaryDirectory(prefix="autopar-gpu-check-") as folder:
        multiprocessing.set_forkserver_preload(["autopar.api", "bench.models"])
        mp.start_processes(run_rank, (settings, folder), nprocs=settings.num_ranks, start_method="forkserver")
        return pickle.loads((Path(folder) / "rows").read_bytes())


def run_rank(rank: int, settings: Settings, folder: str) -> None:
    """The rows on one rank; the first writes them into `folder`."""
    is_gpu = settings.device == "cuda"
    if is_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    options: dict[str, Any] = {"device_id": torch.device("cuda", rank)} if is_gpu else {}
    init_method = f"file://{folder}/world"
    backend = "nccl" if is_gpu else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=settings.num_ranks, **options)
    found = [_row(settings, *row) for row in settings.rows]
    if rank == 0:
        (Path(folder) / "rows").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _row(settings: Settings, name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Row:
    row = {"row": row_name(name, shape, axes)}
    mesh = init_device_mesh(settings.device, shape, mesh_dim_names=axes)
    try:
        return row | checked(settings, workload(name), mesh)
    except Exception as error:  # the other rows go on where this one fails on all ranks
        return row | {"error": f"{type(error).__name__}: {error}"}


def checked(settings: Settings, work: Workload, mesh: DeviceMesh) -> Row:
    """One row, on this rank; every rank of `mesh` calls this."""
    torch.manual_seed(0)
    device = torch.device(settings.device)
    alone, args = work.build().to(device), tuple(x.to(device) for x in work.inputs())
    model = copy.deepcopy(alone)
    cluster = replace(load_cluster("free-links"), device_type=settings.device)
    model = autopar.compile(model, mesh, args=args, cluster=cluster)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=LEARNING_RATE, eps=1e-4) for each in (alone, model)]
    truth = _step(alone, optimizers[0], args)
    with count_collectives(mesh) as issued:
        loss, gradients = _forward_and_backward(model, args)
    found = _finish(model, optimizers[1], loss, gradients)
    planned, _ = planned_collectives(model.plan)
    differences = {what: difference(found[what], truth[what])[0] for what in TOLERANCES}
    is_close = all(differences[what] <= TOLERANCES[what] for what in TOLERANCES)
    counted = {"issued": len(issued), "planned": len(planned), "as_planned": Counter(issued) == Counter(planned)}
    peaks = {
        "predicted_bytes": rank_peaks(model.plan)[0],
        "measured_bytes": peak_bytes(partial(model, *args), model, optimizers[1], args),
    }
    times = {"one": _times(alone, optimizers[0], args, settings), "ours": _times(model, optimizers[1], args, settings)}
    return {"differences": differences, "is_close": is_close, **counted, **peaks, "times": times}


Named = dict[str, torch.Tensor]


def _forward_and_backward(model: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, Named]:
    loss = model(*args)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _finish(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor, gradients: Named) -> dict[str, Any]:
    found = {"loss": {"loss": whole(loss)}, "gradients": {name: whole(x).clone() for name, x in gradients.items()}}
    optimizer.step()
    optimizer.zero_grad()
    return found | {"parameters": {name: whole(x).detach().clone() for name, x in model.named_parameters()}}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, args: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    return _finish(model, optimizer, *_forward_and_backward(model, args))


def peak_bytes(
    forward: Callable[[], torch.Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    args: Iterable[torch.Tensor],
) -> int:
    """Bytes that a step has allocated at most, of what belongs to this model: its state, `args`, and what is made."""

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    own = [*model.parameters(), *model.buffers()]
    own += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    held = [x.to_local() if hasattr(x, "to_local") else x for x in (*own, *args)]
    if own[0].device.type != "cuda":
        with count_storages([x.detach() for x in held]) as storages:
            step()
        return storages.peak_bytes
    others = torch.cuda.memory_allocated() - sum({x.data_ptr(): x.nbytes for x in held}.values())
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - others


def _times(
    model: nn.Module, optimizer: torch.optim.Optimizer, args: tuple[torch.Tensor, ...], settings: Settings
) -> dict[str, dict[str, float]]:
    """Seconds of each phase, eager and under torch.compile."""
    calls: dict[str, Callable[..., torch.Tensor]] = {"eager": model}
    if settings.compiles:
        calls["compiled"] = torch.compile(model)
    return {
        how: phases_s(partial(call, *args), optimizer, settings.device, settings.rounds) for how, call in calls.items()
    }


def phases_s(
    forward: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, device: str, rounds: int
) -> dict[str, float]:
    """Seconds of each of `PHASES` of a step, the medians of `rounds`; `forward` returns the loss."""
    found: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for number in range(rounds + 2):
        clock = [_now_s(device)]
        loss = forward()
        clock.append(_now_s(device))
        loss.backward()
        clock.append(_now_s(device))
        optimizer.step()
        optimizer.zero_grad()
        clock.append(_now_s(device))
        for phase, start, end in zip(PHASES, clock, clock[1:]):
            found[phase] += [end - start] if number >= 2 else []  # the first two warm up
    return {phase: median(times) for phase, times in found.items()}


def _now_s(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def cells(row: Row) -> Iterable[Cells]:
    """The line of a row."""
    gaps = [f"{row['differences'][what]:.1e}" for what in TOLERANCES]
    counted = f"{row['issued']} of {row['planned']}" + ("" if row["as_planned"] else ", NOT as planned")
    peaks = [f"{row[key] / 2**20:.4g} MiB" for key in ("predicted_bytes", "measured_bytes")]
    yield (
        row["row"] + ("" if row["is_close"] else ", NOT equal"),
        *gaps,
        counted,
        *peaks,
        *(_time_cell(row["times"], phase) for phase in PHASES),
    )


def _time_cell(times: dict[str, dict[str, dict[str, float]]], phase: str) -> str:
    said = {}
    for who, how in times.items():
        said[who] = " / ".join(
            f"{how[kind][phase] * 1e3:.3g}" if kind in how else "-" for kind in ("eager", "compiled")
        )
    return f"one {said['one']}; ours {said['ours']}"


def device_name(device: str) -> str:
    """Of the first device, as its driver calls it."""
    return torch.cuda.get_device_name(0) if device == "cuda" else "CPU"


def is_right(row: Row) -> bool:
    """Whether its numbers are one device's and its collectives the plan's."""
    return "error" not in row and row["is_close"] and row["as_planned"]


def main(arguments: list[str] | None = None) -> int:
    """Measure, write and print; 1 if a row is wrong."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu")
    made.add_argument("--ranks", type=int, default=torch.cuda.device_count() if has_gpu else 2)
    made.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name matches")
    made.add_argument("--models", default=",".join(WORKLOADS), help="of gpt, wide-mlp, vgg13 and small")
    made.add_argument("--rounds", type=int, default=10)
    made.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    given = made.parse_args(arguments)
    if given.device == "cuda" and not has_gpu:
        raise SystemExit("no GPU is at hand: torch.cuda.is_available() is False; --device cpu runs the same check")
    rows = tuple((model, *mesh) for model in given.models.split(",") for mesh in meshes(given.ranks))
    rows = tuple(row for row in rows if re.search(given.rows, row_name(*row)))
    if not rows:
        raise SystemExit(f"--rows {given.rows!r} matches no row")
    settings = Settings(given.device, given.ranks, given.rounds, not given.no_compile, rows)
    found = measure(settings)
    name = device_name(given.device)
    title = f"{given.ranks} x {name}"
    everything = tuple(row_name(model, *mesh) for model in (*WORKLOADS, "small") for mesh in meshes(given.ranks))
    table = Table(title, TEXT, HEADER, everything, cells)
    slug = re.sub(r"\W+", "_", name.lower())
    add(f"gpu_check_{slug}_x{given.ranks}", [table], {title: found}, {"device": name, "rounds": given.rounds})
    for row in found:
        for line in [(row["row"], row["error"])] if "error" in row else cells(row):
            print(" | ".join(line))
    return 0 if all(map(is_right, found)) else 1


if __name__ == "__main__":
    sys.exit(main())
