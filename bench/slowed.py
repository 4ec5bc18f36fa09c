"""Two real ranks, each with a core of its own, of which one is slower: shares by `autopar.balance` beside equal ones.

    torchrun --standalone --nproc-per-node 2 bench/slowed.py split|straggler FACTOR

Rank 1 computes as if its core were FACTOR times slower: where its backward ends, it computes on for FACTOR - 1 times
the CPU seconds that its forward and backward took, so that neighbours on its core slow both alike. The bound is what
the speeds of both ranks together allow: each rank trains the plain model alone on the whole batch, both at the same
time, and rank 1 takes FACTOR times as long as it did. The shares are those at which the balance has arrived; then steps
alone, in equal shares and in these take turns, so that what else the machine does falls on all alike, and ratios are
medians over turns. CPU seconds are those of the thread that computes. The first rank prints the figures as JSON.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.balance.balance_shares import share_anew
from bench.models import GPT
from bench.papers.section import table
from bench.report import Row

ROOT = Path(__file__).parents[1]
SEQUENCE, ROWS, SLOW = 64, 64, 1
SETTLING, TURNS, EACH = 14, 8, 2  # steps, turns, steps of each way in a turn
STRAGGLES_AT, STRAGGLER_STEPS = 50, 75
FACTORS, STRAGGLER = (2, 4), 3
MOST_S = 1200.0

SPLIT_COLUMNS = (
    "row",
    "shares",
    "sum of speeds, s",
    "step, s",
    "over the sum of speeds",
    "slowest rank's CPU over it",
    "equal shares, s",
    "equal over the sum of speeds",
    "equal over the slow rank's half",
)
SPLIT = table(
    "Real ranks, one slowed: seconds of a step",
    SPLIT_COLUMNS,
    (f"one of 2 ranks {factor} times slower" for factor in FACTORS),
)
STRAGGLER_COLUMNS = (
    "row",
    "new shares after, steps",
    "shares",
    "change took, CPU s",
    "losses differ at most, relative",
)
STRAGGLERS = table(
    "A rank that becomes slow",
    STRAGGLER_COLUMNS,
    (f"one of 2 ranks {STRAGGLER} times slower from step {STRAGGLES_AT} on",),
)


def network(dtype: torch.dtype) -> torch.nn.Module:
    """A GPT of 0.8 M parameters: its gradients are soon summed."""
    torch.manual_seed(0)
    return GPT(hidden=128, layers=4, head=32, sequence=SEQUENCE).to(dtype)


def batch(seed: int) -> tuple[torch.Tensor, ...]:
    """Tokens and the next ones."""
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(256, (ROWS, SEQUENCE), generator=made) for _ in range(2))


class Slowed:
    """The training of a model that is `factor` times slower on this rank than its core."""

    def __init__(self, model: torch.nn.Module, step: Callable[..., torch.Tensor]) -> None:
        self.step_of, self.factor, self._began_s = step, 1.0, 0.0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        next(model.parameters()).register_hook(self._compute_on)  # whose gradient is the last one

    def _compute_on(self, gradient: torch.Tensor) -> None:
        until_s = time.thread_time() + (self.factor - 1) * (time.thread_time() - self._began_s)
        while time.thread_time() < until_s:
            pass

    def step(self, seed: int = 0) -> tuple[torch.Tensor, float, float]:
        """The loss, and the wall and CPU seconds."""
        tokens, start_s = batch(seed), time.perf_counter()
        self._began_s = time.thread_time()
        loss = self.step_of(*tokens).detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, time.perf_counter() - start_s, time.thread_time() - self._began_s


def alone() -> Slowed:
    """The plain model."""
    model = network(torch.float32)

    def step(*tokens: torch.Tensor) -> torch.Tensor:
        (loss := model(*tokens)).backward()
        return loss

    return Slowed(model, step)


def compiled(dtype: torch.dtype) -> tuple[Any, Slowed]:
    """The model on both ranks, in equal shares."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    example, options = batch(0), {"cluster": "cpu", "shares": (ROWS // 2, ROWS // 2)}
    model = autopar.compile(network(dtype), mesh, args=example, **options)
    return model, Slowed(model, model.train_step)


def split(factor: float) -> dict[str, Any]:
    """Seconds of each turn, (wall, CPU) of each rank: of a step alone, in equal shares, and in those that follow."""
    own, (model, training) = alone(), compiled(torch.float32)
    slower = factor if dist.get_rank() == SLOW else 1.0
    training.step()
    training.factor = slower
    balancer = autopar.balance(model)
    for _ in range(SETTLING):
        training.step()
        balancer.step()
    balancer.close()
    found: dict[str, Any] = {"alone": [], "equal": [], "shared": []}
    ways = {"alone": (own, ()), "equal": (training, (ROWS // 2,) * 2), "shared": (training, balancer.shares)}
    for turn in range(TURNS + 1):
        for way, (one, sizes) in ways.items():
            if sizes:
                share_anew(model._autopar, 0, sizes)
            dist.barrier()
            steps = [one.step()[1:] for _ in range(EACH)]
            times = slower if way == "alone" else 1.0
            found[way] += [gathered([times * sum(each) / EACH for each in zip(*steps)])] if turn else []
    return found | {"shares": balancer.shares}


def straggler(factor: float) -> dict[str, Any]:
    """Losses of a run in which a rank becomes slow, and of one in which none does."""
    losses, changes, took = [], [], []
    for slower in (1.0, factor):
        model, training = compiled(torch.float64)
        own, balancer = [], autopar.balance(model) if slower > 1 else None
        for step in range(STRAGGLER_STEPS):
            if step == STRAGGLES_AT and dist.get_rank() == SLOW:
                training.factor = slower
            own.append(float(training.step(step)[0]))
            if balancer is not None:
                start_s, known = time.thread_time(), len(balancer.changes)
                balancer.step()  # which waits for the slow rank, too
                took += [time.thread_time() - start_s] if len(balancer.changes) > known else []
        losses.append(own)
        changes = balancer.changes if balancer is not None else []
    after = next((change for change in changes if change[0] > STRAGGLES_AT), None)
    return {
        "after": None if after is None else after[0] - STRAGGLES_AT,
        "shares": changes[-1][1] if changes else None,
        "before": [change for change in changes if change[0] <= STRAGGLES_AT],
        "took": max(took, default=None),
        "differ": max(abs(a - b) / abs(a) for a, b in zip(*losses)),
    }


def gathered(seconds: list[float]) -> list[list[float]]:
    """Those of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, seconds)
    return found


def measured(what: str, factor: int) -> dict[str, Any]:
    """The figures of a run on both ranks."""
    command = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(Path(__file__)),
    )
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    asked: dict[str, Any] = {"env": own, "capture_output": True, "text": True, "timeout": MOST_S, "check": False}
    done = subprocess.run([*command, what, str(factor)], **asked)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("figures "))[8:])


def split_row(factor: int) -> Row:
    """One row of `SPLIT`."""
    found = measured("split", factor)
    bounds = [[1 / sum(1 / rank[clock] for rank in turn) for clock in (0, 1)] for turn in found["alone"]]
    walls = {way: [max(rank[0] for rank in turn) for turn in found[way]] for way in ("equal", "shared")}
    halves = [turn[SLOW][0] / 2 for turn in found["alone"]]
    figures = (
        " + ".join(map(str, found["shares"])),
        median(wall for wall, _ in bounds),
        median(walls["shared"]),
        median(step / wall for step, (wall, _) in zip(walls["shared"], bounds)),
        median(max(rank[1] for rank in turn) / cpu for turn, (_, cpu) in zip(found["shared"], bounds)),
        median(walls["equal"]),
        median(step / wall for step, (wall, _) in zip(walls["equal"], bounds)),
        median(step / half for step, half in zip(walls["equal"], halves)),
    )
    return dict(zip(SPLIT_COLUMNS, (f"one of 2 ranks {factor} times slower", *figures)))


def straggler_row() -> Row:
    """The row of `STRAGGLERS`."""
    found = measured("straggler", STRAGGLER)
    shares = " + ".join(map(str, found["shares"] or ()))
    return dict(zip(STRAGGLER_COLUMNS, (STRAGGLERS.rows[0], found["after"], shares, found["took"], found["differ"])))


def main() -> None:
    """On each rank."""
    what, factor = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank()]})
    found = {"split": split, "straggler": straggler}[what](float(factor))
    if dist.get_rank() == 0:
        print("figures", json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
