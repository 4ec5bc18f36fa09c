"""Steps of a GPT by torchrun for `bench.elastic`: with checkpoints written beside them, and by logical ranks.

    torchrun --standalone --nproc-per-node 2 bench/elastic_steps.py saves|logical

Two ways take turns, so that what else the machine does falls on both alike; the first rank prints the seconds of each
turn as JSON, and in the thread that trains those of the processor, and those in which it waited for one.
"""

import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import autopar
import autopar.elastic
from autopar.elastic.checkpoints import path_of
from bench.models import GPT

SEQUENCE, ROWS = 128, 4  # of a rank
TURNS, STEPS = 5, 20
SAVED_TURNS, SAVE_EVERY = 11, 10
Seconds = tuple[float, float, float]  # by the clock; in the thread that trains: of the processor, waiting for one


def network() -> torch.nn.Module:
    """A GPT of 8 M parameters."""
    torch.manual_seed(0)
    return GPT(hidden=320, layers=6, head=64, sequence=SEQUENCE)


def batch(rows: int) -> tuple[torch.Tensor, ...]:
    """Tokens and the next ones."""
    return tuple(torch.randint(256, (rows, SEQUENCE), generator=torch.Generator().manual_seed(1)) for _ in range(2))


def now() -> Seconds:
    """The clocks of the thread that calls this."""
    waited = Path("/proc/thread-self/schedstat").read_text().split()[1]  # ns; docs.kernel.org/scheduler/sched-stats
    return time.perf_counter(), time.thread_time(), 1e-9 * int(waited)


def since(start_s: Seconds, end_s: Seconds) -> Seconds:
    """The seconds from one reading of the clocks to another."""
    wall, cpu, waited = (end - start for start, end in zip(start_s, end_s))
    return wall, cpu, waited


def saves(num_ranks: int) -> dict[str, list[Seconds]]:
    """Seconds of turns of steps, without and with a save within."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
    tokens = batch(ROWS * num_ranks)
    model = autopar.compile(network(), mesh, args=tokens, cluster="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    found: dict[str, list[Seconds]] = {"without": [], "with": []}
    num_late = 0  # saves that are not done when the turn without one begins
    ways = [(way, save_every) for _ in range(SAVED_TURNS + 1) for way, save_every in zip(found, (10**6, SAVE_EVERY))]
    with tempfile.TemporaryDirectory() as name, autopar.elastic.Run(_shared(Path(name)), save_every=SAVE_EVERY) as run:
        start_s = now()
        # a turn has a save in its middle, or none; the last step is not timed: all is saved behind it
        for step in run.steps(SAVE_EVERY * len(ways) + SAVE_EVERY // 2 + 1, model, optimizer):
            turn, place = divmod(step - SAVE_EVERY // 2, SAVE_EVERY)
            if place == 0 and turn > 0:
                found[ways[turn - 1][0]].append(since(start_s, now()))
                saved = path_of(run.folder, step - SAVE_EVERY // 2)
                num_late += ways[turn - 1][0] == "with" and not saved.exists()
            if place == 0 and turn < len(ways):
                run.save_every = ways[turn][1]
                start_s = now()
            model.train_step(*tokens)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
    if dist.get_rank() == 0:
        print("late", num_late, flush=True)
    return {way: seconds[1:] for way, seconds in found.items()}  # the first turns warm up, and lay the files out


def _shared(folder: Path) -> Path:
    """The first rank's folder, on all ranks."""
    named = [str(folder)]
    dist.broadcast_object_list(named, src=0)
    return Path(named[0])


def logical(num_ranks: int) -> dict[str, list[Seconds]]:
    """Seconds of turns of steps, by DistributedDataParallel and by as many logical ranks as there are ranks."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
    original, tokens = network(), batch(ROWS * num_ranks)
    own = tuple(x[ROWS * dist.get_rank() :][:ROWS] for x in tokens)
    replicated = DistributedDataParallel(copy.deepcopy(original))
    compiled = autopar.compile(original, mesh, logical_ranks=num_ranks)
    steps = {
        "without": _stepping(replicated, lambda: replicated(*own).backward()),
        "with": _stepping(compiled, lambda: compiled.train_step(*tokens)),
    }
    found: dict[str, list[Seconds]] = {way: [] for way in steps}
    for number in range(TURNS + 1):
        for way, step in steps.items():
            dist.barrier()
            start_s = now()
            for _ in range(STEPS // 4):
                step()
            dist.barrier()
            if number:
                found[way].append(since(start_s, now()))
    return found


def _stepping(model: torch.nn.Module, backward: Callable[[], object]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds = {"saves": saves, "logical": logical}[sys.argv[1]](dist.get_world_size())
    if dist.get_rank() == 0:
        print("seconds", json.dumps(seconds), flush=True)
    dist.destroy_process_group()
