"""Pipeline steps on real processes beside what is predicted of them.

    python -m bench.pipeline [--rows computes] [--rounds 8]

First the simulation, which is given the time that each stage and each send was measured to take: what is tested is the
order and the waiting. Stages are of two kinds: some compute (matrix products on a core of this machine, no more of them
at once than it has cores), others sleep for a given time, so that pipelines longer than the machine has cores can be
looked at. Then a whole step of a model, of which nothing was measured before: the cost model alone predicts it, with
the preset cpu.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.mesh import PIPELINE
from autopar.runtime.pipeline.lanes import make_lanes
from autopar.runtime.pipeline.run_schedule import StageRunner, measured_timeline
from autopar.runtime.pipeline.torch_stage import LocalStage, Wire, Work
from autopar.schedule.orders import Schedule
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.timeline import Timeline
from bench.models import WORKLOADS
from bench.report import Cells, Row, Table, add
from bench.rows import parser, selected

ROWS, WIDTH = 256, 512  # of what crosses a cut: half a megabyte
Milliseconds = tuple[float, float, float]  # forward, backward for the inputs, backward for the weights


@dataclass(frozen=True)
class Case:
    """`stages`: for each stage its time, or its number of layers if it computes."""

    kind: str
    schedule: Schedule
    stages: tuple[Milliseconds | int, ...]

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{self.kind}, {self.schedule.name}"


NUM_MICROBATCHES, CLUSTER = 4, "cpu"
# Steps that compute are disturbed by all that the machine does besides: more of them are run.
MORE_ROUNDS = 10

EVEN = (20.0, 20.0, 20.0)
UNEVEN = ((20.0, 20.0, 20.0), (35.0, 30.0, 30.0), (10.0, 15.0, 10.0), (25.0, 20.0, 30.0))
CASES = (
    Case("even", Schedule("gpipe", 4, 4, 8), (EVEN,) * 4),
    Case("even", Schedule("1f1b", 4, 4, 8), (EVEN,) * 4),
    Case("uneven", Schedule("1f1b", 4, 4, 8), UNEVEN),
    Case("uneven", Schedule("zero-bubble", 4, 4, 8), UNEVEN),
    Case("uneven", Schedule("interleaved", 8, 4, 8), (*UNEVEN, *UNEVEN)),
    Case("computes", Schedule("1f1b", 2, 2, 8), (6, 4)),
    Case("computes", Schedule("interleaved", 4, 2, 8), (3, 3, 2, 2)),
    Case("computes", Schedule("zero-bubble", 2, 2, 8), (6, 4)),
)

NUM_RANKS = max(case.schedule.num_ranks for case in CASES)


class Takes(torch.autograd.Function):
    """The identity, whose backward takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, milliseconds: float) -> torch.Tensor:
        ctx.milliseconds = milliseconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.milliseconds / 1e3)
        return gradient, None


def build(stage: Milliseconds | int, index: int, num_stages: int) -> Work:
    """What the stage computes; the last one's loss is a mean."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stage if isinstance(stage, int) else 0))
    weight = nn.Parameter(torch.zeros(()))

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x).relu()
        if isinstance(stage, int):
            return x
        time.sleep(stage[0] / 1e3)
        return Takes.apply(x, stage[1]) + Takes.apply(weight, stage[2])

    def body(microbatch: int, received: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = run(received[0] if index else torch.full((ROWS, WIDTH), float(microbatch)))
        return (x.mean(),) if index == num_stages - 1 else (x,)

    return Work(body, [*layers.parameters()] if isinstance(stage, int) else [weight])


def run_case(case: Case, rounds: int) -> tuple[list[Timeline], float]:
    """The timed steps, and the seconds that half a megabyte takes to the next rank; on every rank, call on all."""
    schedule = case.schedule
    group = dist.new_group(list(range(schedule.num_ranks)))
    rank = dist.get_rank()
    found, send_s = [], 0.0
    if rank < schedule.num_ranks:
        wire, loss = Wire((ROWS, WIDTH), torch.float32, True), Wire((), torch.float32, True)
        last = schedule.num_stages - 1
        stages = [
            LocalStage(i, (wire,) if i else (), (loss,) if i == last else (wire,)) for i in schedule.stages_of(rank)
        ]
        works = {stage.index: build(case.stages[stage.index], stage.index, schedule.num_stages) for stage in stages}
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(PIPELINE,))
        runner = StageRunner(schedule, stages, make_lanes(mesh, schedule), torch.device("cpu"))
        runner.step(works)
        num_rounds = rounds * (MORE_ROUNDS if isinstance(case.stages[0], int) else 1)
        found = [measured_timeline(runner.step(works, is_timed=True), group) for _ in range(num_rounds)]
        send_s = _send_s(group)
    dist.barrier()
    return found, send_s


def _send_s(group: dist.ProcessGroup, repeat: int = 20) -> float:
    """Median seconds from rank 0 of the group to rank 1; half a round trip."""
    x, seconds = torch.zeros(ROWS, WIDTH), []
    for _ in range(repeat * (dist.get_rank(group) < 2)):
        start = time.perf_counter()
        for sender in (0, 1):
            if dist.get_rank(group) == sender:
                dist.send(x, group_dst=1 - sender, group=group)
            else:
                dist.recv(x, group_src=sender, group=group)
        seconds.append((time.perf_counter() - start) / 2)
    box = torch.tensor(median(seconds) if seconds else 0.0)
    dist.broadcast(box, group_src=0, group=group)
    return float(box)


def stage_times(timeline: Timeline, num_stages: int, send_s: float) -> list[StageTimes]:
    """The mean times that each stage took over its microbatches."""
    spent = defaultdict(list)
    for row in timeline.rows:
        for action, start_s, end_s in row:
            spent[action.stage, action.kind].append(end_s - start_s)
    mean = {key: sum(found) / len(found) for key, found in spent.items()}
    of = [[mean.get((stage, kind), 0.0) for kind in "FBIW"] for stage in range(num_stages)]
    return [StageTimes(forward, whole + part, weight, send_s, send_s) for forward, whole, part, weight in of]


def row_of(case: Case, timelines: Sequence[Timeline], send_s: float) -> Row:
    """The fastest step of those measured, to which what else the machine does has added least, beside the simulated
    one.
    """
    fastest = min(timelines, key=lambda timeline: timeline.step_s)
    predicted = simulate(case.schedule, stage_times(fastest, case.schedule.num_stages, send_s))
    return {
        "row": case.name,
        "stages": case.kind,
        "schedule": str(case.schedule),
        "measured_s": fastest.step_s,
        "simulated_s": predicted.step_s,
        "ratio": predicted.step_s / fastest.step_s,
        "measured_bubble": fastest.bubble,
        "simulated_bubble": predicted.bubble,
    }


def run_model(name: str, rounds: int) -> Row | None:
    """Steps of a model in two stages on two ranks, beside the step that its plan predicts; on every rank, None on those
    without a stage.
    """
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("pp",))
    row = None
    if dist.get_rank() < 2:
        torch.manual_seed(0)
        workload = WORKLOADS[name]
        args = workload.inputs()
        options = {"num_microbatches": NUM_MICROBATCHES, "schedule": "1f1b", "cluster": CLUSTER}
        model = autopar.compile(workload.build(), mesh, args=args, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        seconds = [_step_s(model, args, optimizer, mesh.get_group()) for _ in range(2 + rounds * MORE_ROUNDS)][1:]
        plan = model.plan
        row = {
            "row": model_row(name),
            "model": name,
            "schedule": str(plan.schedule),
            "measured_s": min(seconds),
            "median_s": median(seconds),
            "predicted_s": plan.step_s,
            "ratio": plan.step_s / min(seconds),
        }
    dist.barrier()
    return row


def _step_s(
    model: nn.Module, args: tuple[torch.Tensor, ...], optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> float:
    """Seconds of forward, backward and update, until the last rank is done."""
    dist.barrier(group=group)
    start = time.perf_counter()
    optimizer.zero_grad()
    model.train_step(*args)
    optimizer.step()
    dist.barrier(group=group)
    return time.perf_counter() - start


def model_row(name: str) -> str:
    """
    >>> model_row("gpt")
    'gpt, pp=2'
    """
    return f"{name}, pp=2"


def cells(row: Row) -> list[Cells]:
    """A line a case."""
    times = f"{1e3 * row['measured_s']:.0f}", f"{1e3 * row['simulated_s']:.0f}"
    return [
        (
            row["stages"],
            row["schedule"],
            *times,
            *(f"{row[key]:.3f}" for key in ("ratio", "measured_bubble", "simulated_bubble")),
        )
    ]


def model_cells(row: Row) -> list[Cells]:
    """A line a model."""
    times = (f"{1e3 * row[key]:.1f}" for key in ("measured_s", "median_s", "predicted_s"))
    return [(row["model"], row["schedule"], *times, f"{row['ratio']:.2f}")]


MODELS = ("gpt",)
SIMULATED = Table(
    "Schedules, given the times of their stages",
    "The fastest step of those measured, and the simulation, which is given the mean time that each stage took in that"
    ' step and the time of a send, measured apart. Stages called "even" and "uneven" sleep for a given time; those that'
    " compute do so on a core each.",
    (
        "stages",
        "schedule",
        "measured, ms",
        "simulated, ms",
        "simulated / measured",
        "measured bubble",
        "simulated bubble",
    ),
    tuple(case.name for case in CASES),
    cells,
)
PREDICTED = Table(
    "A step of a model, by the cost model alone",
    f"A model of `bench.step` in two stages on two processes, {NUM_MICROBATCHES} microbatches, with AdamW: the fastest"
    f" and the median of the steps measured, and what its plan predicts with the preset {CLUSTER}, which was not fitted"
    " to this machine.",
    ("model", "schedule", "measured, ms", "median, ms", "predicted, ms", "predicted / measured"),
    tuple(map(model_row, MODELS)),
    model_cells,
)
TABLES = (SIMULATED, PREDICTED)


def run_rank(rank: int, folder: str, names: Sequence[str], rounds: int) -> None:
    """One rank of the benchmark; rank 0 writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=NUM_RANKS)
    simulated = [(case, *run_case(case, rounds)) for case in CASES if case.name in names]
    predicted = [run_model(name, rounds) for name in MODELS if model_row(name) in names]
    if rank == 0:
        found = {
            SIMULATED.title: [row_of(*one) for one in simulated],
            PREDICTED.title: [row for row in predicted if row],
        }
        add("pipeline", TABLES, found, {"rounds": rounds, "threads a rank": 1})
    dist.destroy_process_group()


def main() -> None:
    """Read the settings and start the ranks."""
    options = parser(__doc__)
    options.add_argument(
        "--rounds", type=int, default=8, help="timed steps of each case; ten times as many of those that compute"
    )
    settings = options.parse_args()
    names = [name for rows in selected(TABLES, settings, "pipeline").values() for name in rows]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, args=(folder, names, settings.rounds), nprocs=NUM_RANKS)
    print("written to bench/results/pipeline.md and pipeline.json")


if __name__ == "__main__":
    main()
