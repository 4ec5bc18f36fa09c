"""Two real ranks, each with a core of its own, of which one is slower: shares by `autopar.balance` beside equal ones.

    torchrun --standalone --nproc-per-node 2 bench/slowed.py split|straggler FACTOR

A neighbour takes all but 1 / FACTOR of rank 1's core (`bench.own_core`), so that forward, backward and collectives are
slower alike. The bound is what the speeds of both ranks together allow: each rank trains the plain model alone on the
whole batch, both at the same time. The shares are those at which the balance has arrived; then steps alone, in equal
shares and in these take turns, and ratios are medians over turns. Both ranks have their cores to themselves for the
steps that are measured; how long rank 0, which has no neighbour, waited for its core all the same is a figure, too. The
first rank prints the figures as JSON.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.balance.balance_shares import share_anew
from autopar.sbp.in_flight import timed
from bench.models import GPT
from bench.own_core import PAUSE_S, Neighbour, own_core, waited_for_core_s
from bench.papers.section import table
from bench.report import Row

ROOT = Path(__file__).parents[1]
SEQUENCE, ROWS, SLOW = 64, 128, 1
SETTLING, TURNS, EACH = 44, 8, 2  # steps, turns, steps of each way in a turn
STRAGGLES_AT, STRAGGLER_STEPS = 50, 75
FACTORS, STRAGGLER = (2, 4), 3
MOST_S = 1200.0

SPLIT_COLUMNS = (
    "row",
    "shares",
    "sum of speeds, s",
    "step, s",
    "over the sum of speeds",
    "equal shares, s",
    "equal over the sum of speeds",
    "equal over the slow rank's half",
    "waited for its core, %",
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


class Steps:
    """The training of a model, a step at a time, each on a core of its own."""

    def __init__(self, model: torch.nn.Module, step: Callable[..., torch.Tensor], near: Neighbour | None) -> None:
        self.step_of, self.near = step, near
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def __call__(self, seed: int = 0, num: int = 1) -> tuple[float, float, float]:
        """The loss; seconds of a step, the mean of `num`, and those that it waited for its core."""
        tokens = batch(seed)
        with own_core(), nullcontext() if self.near is None else self.near.on():
            dist.barrier()
            start_s, waited_s = time.perf_counter(), waited_for_core_s()
            for _ in range(num):
                loss = self.step_of(*tokens).detach()
                self.optimizer.step()
                self.optimizer.zero_grad()
            took_s, waited_s = time.perf_counter() - start_s, waited_for_core_s() - waited_s
        timed(time.sleep, PAUSE_S)  # so that others run; to the balance it is as if it waited for other ranks
        return float(loss), took_s / num, waited_s / num


def alone(near: Neighbour | None) -> Steps:
    """The plain model."""
    model = network(torch.float32)

    def step(*tokens: torch.Tensor) -> torch.Tensor:
        (loss := model(*tokens)).backward()
        return loss

    return Steps(model, step, near)


def compiled(dtype: torch.dtype, near: Neighbour | None) -> tuple[Any, Steps]:
    """The model on both ranks, in equal shares."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    example, options = batch(0), {"cluster": "cpu", "shares": (ROWS // 2, ROWS // 2)}
    model = autopar.compile(network(dtype), mesh, args=example, **options)
    return model, Steps(model, model.train_step, near)


def split(near: Neighbour | None) -> dict[str, Any]:
    """(Seconds, those for the core) of each rank and turn: of a step alone, in equal shares, and in the last ones."""
    own, (model, training) = alone(near), compiled(torch.float32, near)
    training()
    balancer = autopar.balance(model)
    for _ in range(SETTLING):
        training()
        balancer.step()
    balancer.close()
    found: dict[str, Any] = {"alone": [], "equal": [], "shared": []}
    ways = {"alone": (own, ()), "equal": (training, (ROWS // 2,) * 2), "shared": (training, balancer.shares)}
    for turn in range(TURNS + 1):
        for way, (steps, sizes) in ways.items():
            if sizes:
                share_anew(model._autopar, 0, sizes)
            took = gathered(steps(num=EACH)[1:])
            found[way] += [took] if turn else []
    return found | {"shares": balancer.shares}


def straggler(near: Neighbour | None) -> dict[str, Any]:
    """Losses of a run in which a rank becomes slow, and of one in which none does."""
    losses, changes, took = [], [], []
    for is_slowed in (False, True):
        model, steps = compiled(torch.float64, None)
        own, balancer = [], autopar.balance(model) if is_slowed else None
        for step in range(STRAGGLER_STEPS):
            steps.near = near if is_slowed and step >= STRAGGLES_AT else None
            own.append(steps(step)[0])
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


def gathered(seconds: Sequence[float]) -> list[list[float]]:
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
    bounds = [1 / sum(1 / took for took, _ in turn) for turn in found["alone"]]
    walls = {way: [max(took for took, _ in turn) for turn in found[way]] for way in ("equal", "shared")}
    halves = [turn[SLOW][0] / 2 for turn in found["alone"]]
    waited = [turn[1 - SLOW][1] / turn[1 - SLOW][0] for way in ("alone", "shared") for turn in found[way]]
    figures = (
        " + ".join(map(str, found["shares"])),
        median(bounds),
        median(walls["shared"]),
        median(step / bound for step, bound in zip(walls["shared"], bounds)),
        median(walls["equal"]),
        median(step / bound for step, bound in zip(walls["equal"], bounds)),
        median(step / half for step, half in zip(walls["equal"], halves)),
        100 * median(waited),
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
    rank = int(os.environ["RANK"])
    core = sorted(os.sched_getaffinity(0))[rank]
    os.sched_setaffinity(0, {core})  # of the threads of collectives, too, which are made later
    dist.init_process_group("gloo")
    near = Neighbour(core, float(factor)) if rank == SLOW else None
    found = {"split": split, "straggler": straggler}[what](near)
    if near is not None:
        near.close()
    if dist.get_rank() == 0:
        print("figures", json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
