"""Train a small GPT on English text, on four processes under the plan autopar chose, and on one process beside it.

    python examples/train_gpt.py [--steps 50] [--mesh dp=2,tp=2] [--cluster cpu]

Prints the plan, both loss curves and what each collective moved. Exit status 1 if the curves differ by more than 1e-3
anywhere, or if a collective moved other bytes than planned.
"""

import argparse
import json
import pydoc_data.topics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from gpt import BATCH, SEQUENCE, build
from rich.console import Console
from rich.progress import Progress, TextColumn
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar
from autopar.mesh import parse_mesh
from autopar.sbp.redistribute import Collective
from autopar.verify.count_collectives import count_collectives

TOLERANCE = 1e-3
LEARNING_RATE = 3e-4
CURVE_ROWS, CURVE_WIDTH = 16, 50

Batch = dict[str, Any]


def batches(num: int) -> list[Batch]:
    """Random windows of Python's own documentation, the same at every call."""
    text = "\n".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
    tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    starts = torch.randint(len(tokens) - SEQUENCE, (num, BATCH), generator=torch.Generator().manual_seed(0))
    windows = [torch.stack([tokens[start : start + SEQUENCE] for start in row]) for row in starts.tolist()]
    return [{"input_ids": window, "labels": window, "use_cache": False} for window in windows]


def train(model: nn.Module, data: list[Batch], report: Callable[[float], None]) -> list[float]:
    """An ordinary training loop, the same for both runs; the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        report(losses[-1])
    return losses


def train_with_progress(title: str, model: nn.Module, data: list[Batch], is_shown: bool) -> list[float]:
    """`train` with a progress bar."""
    columns = (TextColumn("loss {task.fields[loss]:.3f}"),)
    with Progress(
        *Progress.get_default_columns(), *columns, console=Console(stderr=True), disable=not is_shown
    ) as progress:
        task = progress.add_task(title, total=len(data), loss=float("nan"))
        return train(model, data, lambda loss: progress.update(task, advance=1, loss=loss))


def count_step(model: nn.Module, mesh: DeviceMesh, batch: Batch) -> list[Collective]:
    """What forward and backward really issue on this rank."""
    with count_collectives(mesh) as issued:
        model(**batch).loss.backward()
    model.zero_grad()
    return issued


def run_rank(rank: int, folder: str, steps: int, mesh_text: str, cluster: str) -> None:
    """One of the processes: plan, count a step, train; rank 0 prints the plan and leaves the results in `folder`."""
    shape = parse_mesh(mesh_text)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=shape.num_devices)
    mesh = init_device_mesh("cpu", shape.shape, mesh_dim_names=shape.axis_names)
    data = batches(steps)
    start = time.perf_counter()
    # only the loss is read: gathering the logits would cost what no plan of a training step has
    model = autopar.compile(build()[0], mesh, args=(), kwargs=data[0], cluster=cluster, outputs="sharded")
    if rank == 0:
        print(model.plan.explain())
        print(f"\ntraced, planned and loaded in {time.perf_counter() - start:.1f} s\n", flush=True)
    issued = count_step(model, mesh, data[0])
    everywhere: list[list[Collective]] = [[] for _ in range(shape.num_devices)]
    dist.all_gather_object(everywhere, issued)
    losses = train_with_progress(f"{shape.num_devices} processes", model, data, rank == 0)
    if rank == 0:
        planned = [item.collective for item in model.plan.costs.collectives]
        table, is_equal = compare_collectives(planned, everywhere, shape.axis_names)
        Path(folder, "results.json").write_text(json.dumps({"losses": losses, "table": table, "is_equal": is_equal}))
    dist.barrier()
    dist.destroy_process_group()


def compare_collectives(
    planned: list[Collective], everywhere: list[list[Collective]], names: tuple[str, ...]
) -> tuple[str, bool]:
    """Planned beside counted, by kind, axis and phase; whether they are equal, one by one and on every rank."""
    rows = []
    for key in sorted({(c.phase, c.axes, c.kind) for c in (*planned, *everywhere[0])}, reverse=True):
        sizes = [[c.num_bytes for c in found if (c.phase, c.axes, c.kind) == key] for found in (planned, everywhere[0])]
        axis = "+".join(names[axis] for axis in key[1]) or "another group"
        rows.append((key[0], axis, key[2], *(text for found in sizes for text in (len(found), f"{sum(found):,}"))))
    header = ("phase", "axis", "collective", "planned", "bytes", "counted", "bytes")
    is_equal = all(Counter(issued) == Counter(planned) for issued in everywhere)
    return (
        tabulate(rows, header, tablefmt="github", disable_numparse=True, colalign=("left",) * 3 + ("right",) * 4),
        is_equal,
    )


def curve_table(sharded: list[float], alone: list[float]) -> str:
    """Both curves, step by step, with a bar for the eye."""
    shown = sorted({round(i * (len(alone) - 1) / max(1, CURVE_ROWS - 1)) for i in range(CURVE_ROWS)})
    bars = ["#" * round(CURVE_WIDTH * sharded[i] / max(sharded)) for i in shown]
    rows = [(i + 1, f"{sharded[i]:.5f}", f"{alone[i]:.5f}", bar) for i, bar in zip(shown, bars)]
    return tabulate(rows, ("step", "sharded", "one process", ""), disable_numparse=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--mesh", default="dp=2,tp=2", help="as many processes are started as it has devices")
    parser.add_argument("--cluster", default="cpu", help="preset or JSON file the plan is made for")
    return parser.parse_args()


def main() -> int:
    """Run both, compare, print; the exit status."""
    given = parse_arguments()
    model, data = build()[0], batches(given.steps)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_ranks = parse_mesh(given.mesh).num_devices
    print(
        f"GPT-2, {num_parameters / 1e6:.1f} million parameters, byte tokens, {BATCH} x {SEQUENCE} a step, {given.steps}"
        " steps of AdamW"
    )
    print(
        f"mesh {given.mesh}: {num_ranks} gloo processes on this machine; plan made for cluster {given.cluster!r}\n",
        flush=True,
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, args=(folder, given.steps, given.mesh, given.cluster), nprocs=num_ranks)
        results = json.loads(Path(folder, "results.json").read_text())
    alone = train_with_progress("1 process", model, data, True)
    worst = max(abs(a - b) / abs(b) for a, b in zip(results["losses"], alone))
    print(f"\n{curve_table(results['losses'], alone)}")
    print(f"\nlargest relative difference of the losses: {worst:.1e} (at most {TOLERANCE:g} is right)")
    print(f"\n{results['table']}")
    print(
        f"\ncollectives of a step, planned and counted on every rank: {'equal' if results['is_equal'] else 'DIFFERENT'}"
    )
    return 0 if worst <= TOLERANCE and results["is_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
