"""A training step of the generated module at world size 1 beside the original's, in CPU time of the calling thread.

    python -m bench.overhead [--rows 'toy|inductor'] [--resume] [--rounds 21]

A step is forward, backward and AdamW on the same batch; both models take turns, and the ratio is the median over the
rounds, so that what else the machine does falls on both alike.
"""

import copy
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from bench.models import GPT
from bench.report import Cells, Row, Table, add
from bench.rows import parser, selected

ROUNDS = 21
_WARM_UP = 4
_LEAST_S = 0.02  # of the steps of a turn
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """A GPT, its batch, and the ratio that it is to stay below."""

    hidden: int
    layers: int
    sequence: int
    batch: int
    target: float


SIZES = {"gpt of 3 M parameters": Size(256, 4, 128, 4, 1.03), "toy of hidden 64": Size(64, 2, 32, 4, 1.5)}
WAYS = ("eager", "inductor")


def steps_of(size: Size, way: str) -> tuple[Step, Step]:
    """A step of the original, and one of the generated module, in a world of one rank."""
    torch.manual_seed(0)
    original = GPT(hidden=size.hidden, layers=size.layers, head=size.hidden // 4, sequence=size.sequence)
    batch = tuple(torch.randint(256, (size.batch, size.sequence)) for _ in range(2))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    generated = autopar.compile(copy.deepcopy(original), mesh, args=batch, cluster="free-links")

    def step_of(model: nn.Module) -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        called = torch.compile(model) if way == "inductor" else model

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = called(*batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return step_of(original), step_of(generated)


def measure(name: str, rounds: int) -> Row:
    """The times of both and their ratio, once their losses were seen to be the same."""
    size, way = name.rsplit(", ", 1)
    steps = steps_of(SIZES[size], way)
    for _ in range(_WARM_UP):
        torch.testing.assert_close(*(step() for step in steps), rtol=1e-4, atol=1e-5)
    count = max(1, round(_LEAST_S / _seconds(steps[0], 1)))
    times = [[_seconds(step, count) for step in steps] for _ in range(rounds)]
    ratios = [generated / original for original, generated in times]
    low, _, high = quantiles(ratios, n=4)
    original_s, generated_s = (median(column) for column in zip(*times))
    return {
        "row": name,
        "original_s": original_s,
        "generated_s": generated_s,
        "ratio": median(ratios),
        "quartiles": [low, high],
        "target": SIZES[size].target,
    }


def _seconds(step: Step, count: int) -> float:
    before = time.thread_time()
    for _ in range(count):
        step()
    return (time.thread_time() - before) / count


def _cells(row: Row) -> Iterable[Cells]:
    low, high = row["quartiles"]
    times = (f"{1e3 * row[key]:.3g}" for key in ("original_s", "generated_s"))
    yield row["row"], *times, f"{row['ratio']:.3f} ({low:.3f} to {high:.3f})", f"{row['target']:g}"


TABLE = Table(
    "overhead",
    "CPU time of a step of the generated module on one rank over that of the original: forward, backward and AdamW in"
    " one thread. The ratio is the median, with quartiles, of turns of both.",
    ("model", "original, ms", "generated, ms", "ratio", "target"),
    tuple(f"{size}, {way}" for size in SIZES for way in WAYS),
    _cells,
)


def main(arguments: list[str] | None = None) -> None:
    """Measure and save."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=ROUNDS)
    settings = made.parse_args(arguments)
    wanted = selected([TABLE], settings, "overhead")[TABLE.title]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=0, world_size=1)
        found = [measure(name, settings.rounds) for name in wanted]
        dist.destroy_process_group()
    add("overhead", [TABLE], {TABLE.title: found}, {"rounds": settings.rounds})


if __name__ == "__main__":
    main()
