"""`autopar sweep`: the best plan of a model for each of several numbers of devices, clusters and batches."""

import argparse
import gc
import math
import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import forkserver

from autopar.answers.scaling import ScalingPoint, batch_of, format_points, point_of, points_csv, points_json
from autopar.cli.interrupt import until_interrupt
from autopar.cli.pictures import can_draw, draw_scaling
from autopar.cli.step_options import add_training, training_of
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.costmodel.training import PARAM_DTYPES
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.mesh import Devices
from autopar.models.target import NO_SIZES, graph_of, load_target
from autopar.page.page_data import sweep_page
from autopar.page.plan_view import PlanView, plan_view
from autopar.page.write_page import can_write, write_page
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.choose_devices import choose_devices
from autopar.planner.request import PlanRequest
from autopar.planner.status import status
from autopar.plans.serialise import write


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `autopar sweep`."""
    parser.add_argument("target", metavar="TARGET", help="a built-in model or path.py:function, as for explain")
    parser.add_argument("--devices", required=True, type=_numbers, metavar="N,...", help="e.g. 8,16,64,1024")
    parser.add_argument(
        "--cluster", required=True, metavar="NAME,...", help="presets, JSON files or groups, as for explain"
    )
    batches = parser.add_mutually_exclusive_group()
    batches.add_argument(
        "--batch",
        type=_numbers,
        default=(0,),
        metavar="B,...",
        help="global batches, the same for all numbers of devices (strong scaling; default: that of the target)",
    )
    batches.add_argument(
        "--batch-per-device", type=_numbers, metavar="B,...", help="batches a device (weak scaling), e.g. 1,2"
    )
    parser.add_argument("--price", type=float, default=math.nan, metavar="P", help="of a device for an hour")
    add_training(parser)
    parser.add_argument(
        "--time-limit", type=float, default=30.0, metavar="S", help="seconds of planning for each point (default 30)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--csv", metavar="FILE", help="write the points as CSV too, which autopar schedule reads")
    parser.add_argument("--html", metavar="FILE", help="write a page of the points and their plans, for a browser")
    parser.add_argument("--picture", metavar="FILE", help="draw speed and MFU over devices (needs matplotlib)")
    parser.set_defaults(run=_sweep)


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected positive whole numbers such as 8,16,64, found {text!r}")
    return tuple(dict.fromkeys(map(int, parts)))


@dataclass(frozen=True, slots=True)
class PointTask:
    """A point to be planned, in any process. `batch`: 0 for that of the target."""

    target: str
    cluster: str
    devices: int
    batch: int
    request: PlanRequest
    price_per_hour: float
    has_view: bool = False

    def plan(self) -> "Planned":
        """The point, one with an error where there is no plan, and a page's view of its plan if asked for."""
        graph = _graph(self.target, self.batch, self.request.training.param_dtype)
        cluster = load_cluster(self.cluster)
        try:
            plan = choose_devices(graph, Devices(self.devices), cluster, self.request, predict=rank_peaks)
        except AutoparError as error:
            samples, tokens = batch_of(graph)
            return ScalingPoint(self.target, cluster.name, self.devices, samples, tokens, error=str(error)), None
        point = point_of(self.target, plan, self.price_per_hour)
        name = f"{point.devices} devices of {point.cluster}, batch {point.batch}"
        return point, plan_view(name, plan) if self.has_view else None


Planned = tuple[ScalingPoint, PlanView | None]


Traced = tuple[str, int, str]  # target, batch, name of the dtype of computation
_TRACED: dict[Traced, Graph] = {}  # in a worker: what its parent has traced


@lru_cache(maxsize=2)
def _graph(target: str, batch: int, param_dtype: str) -> Graph:
    if (target, batch, param_dtype) in _TRACED:
        return _TRACED[target, batch, param_dtype]
    example = load_target(target, sizes={"batch": batch} if batch else NO_SIZES)
    return graph_of(example, PARAM_DTYPES.get(param_dtype))


def _sweep(options: argparse.Namespace) -> int:
    if not (math.isnan(options.price) or 0 <= options.price < math.inf):
        raise AutoparError(f"--price {options.price}: expected a price of 0 or more for an hour of a device")
    if options.picture:
        can_draw("sweep")
    if options.html:
        can_write(options.html, "--html")
    tasks = tuple(_tasks(options))
    workers = _num_workers(tasks)
    with status() as tell:
        tell(f"trace {options.target}")
        if workers > 1:  # imports torch while this process traces
            multiprocessing.set_forkserver_preload([__name__])
            forkserver.ensure_running()
        first = (options.target, tasks[0].batch, options.param_dtype)
        traced = {first: _graph(*first)}  # an error of the target is told before all else
        planned, ended = until_interrupt(_planned(tasks, traced, workers, tell), f"of {len(tasks)} points were planned")
    points = tuple(point for point, _ in planned)
    if options.html:
        write_page(options.html, sweep_page(f"{options.target} over devices", planned))
    if options.csv:
        write(options.csv, points_csv(points))
    if options.picture:
        draw_scaling(points, options.picture)
    print(points_json(points) if options.json else format_points(points))
    return ended or (0 if any(not point.error for point in points) else 2)


def _tasks(options: argparse.Namespace) -> Iterator[PointTask]:
    request = PlanRequest(training=training_of(options), time_limit_s=options.time_limit)
    for cluster in options.cluster.split(","):
        load_cluster(cluster)
        for devices in options.devices:
            each = options.batch_per_device
            for batch in [size * devices for size in each] if each else options.batch:
                yield PointTask(
                    options.target, cluster, devices, batch, request, options.price, has_view=bool(options.html)
                )


def _num_workers(tasks: Sequence[PointTask]) -> int:
    cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0))
    return min(len(tasks), cores or 1)


def _planned(
    tasks: Sequence[PointTask], traced: Mapping[Traced, Graph], workers: int, tell: Callable[[str], None]
) -> Iterator[Planned]:
    """The points, in order; several at a time where there are several cores."""
    if workers == 1:
        for number, task in enumerate(tasks):
            tell(f"point {number + 1} of {len(tasks)}: {task.devices} devices of {task.cluster}")
            yield task.plan()
        return
    others = {*multiprocessing.active_children()}  # the caller's own
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("forkserver"), _begin, (pickle.dumps(traced),))
    try:
        for number, point in enumerate(pool.map(PointTask.plan, tasks)):
            tell(f"{number + 1} of {len(tasks)} points")
            yield point
    except BaseException:
        for worker in {*multiprocessing.active_children()} - others:  # after Ctrl-C each is in the middle of a point
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)  # waits for its thread, which at exit would find its pipe closed


def _begin(traced: bytes) -> None:
    """Begin a worker, with the graphs that its parent has traced, pickled."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it as well as its parent, which ends it
    with warnings.catch_warnings():  # torch warns when it reads the structure of arguments that it has written
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec")
        _TRACED.update(pickle.loads(traced))
    gc.freeze()  # modules and the graph stay
