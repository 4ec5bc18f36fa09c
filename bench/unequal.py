"""Plans for groups of devices that differ, by calculation, and two ranks of which one is slowed.

    python -m bench.unequal            # all tables
    python -m bench.unequal measured   # or some of: measured, planned, stages, time, slowed, straggler

The first table is from published seconds a step, without a planner. Of each model the seconds of a step at one batch on
each kind of device were measured by others. What is calculated assumes that they grow with the rows, and no
communication: it is what shares alone can give. A device takes its rows in as many microbatches as are accumulated, so
that the whole rows of a step are shared out more finely.

The others are what the planner makes of a cluster of groups at the prices of the presets: shares on 8 + 8 devices
beside equal ones and Whale's rule, with the layouts of the plan; stages on 4 + 4 beside those of equal devices under
the same schedule; and the CPU seconds of planning for 64 + 64 devices beside 128 equal ones. The last two run on two
cores of this machine, each a rank's (`bench.slowed`).
"""

import argparse
import gc
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import process_time
from typing import Any

from autopar.costmodel.cluster.device_groups import cluster_of_rank
from autopar.costmodel.cluster.load_cluster import Cluster, load_cluster
from autopar.errors import AutoparError
from autopar.ir.export.meta_copy import skeleton
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Devices, Mesh
from autopar.models.catalogue import build_model
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.choose import choose_plan
from autopar.planner.choose_devices import choose_devices
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan, plan_of
from autopar.plans.staged_plan import StagedPlan
from autopar.shares.device_shares import DeviceSpeed, PlannedShares, best_shares, proportional_shares
from bench.papers.section import table
from bench.report import Row, add
from bench.slowed import FACTORS, SPLIT, STRAGGLERS, split_row, straggler_row

# Rows of a step, and its seconds on a V100 and on a P100.
MEASURED = {
    "ResNet50": (64, 0.2503, 0.4150),
    "ShuffleNetv2": (128, 0.2163, 0.3645),
    "VGG19": (32, 0.2586, 0.3778),
    "BERT": (8, 0.4413, 0.6069),
    "Swin": (32, 0.4132, 0.5935),
}
EACH = 8  # devices of each kind
PEAKS = (15.7, 9.3)  # Tflop/s of float32, NVIDIA's data sheets of V100 SXM2 and P100 PCIe
ACCUMULATED = (1, 2, 4, 8)
COLUMNS = (
    "row",
    "rows of a V100",
    "rows of a P100",
    "equal shares, s",
    "shares, s",
    "over equal shares, times",
    "ideal, times",
    "peak flop/s, times",
)


def row_name(model: str, count: int) -> str:
    """
    >>> row_name("BERT", 4)
    'BERT, 8 rows x 4 accumulated'
    """
    return f"{model}, {MEASURED[model][0]} rows x {count} accumulated"


TABLE = table("8 V100 and 8 P100", COLUMNS, (row_name(model, count) for model in MEASURED for count in ACCUMULATED))


def shared(model: str, count: int) -> tuple[PlannedShares, list[DeviceSpeed]]:
    """The best shares of the whole rows of a step, and the devices."""
    rows, *seconds = MEASURED[model]
    devices = [DeviceSpeed(one / rows) for one in seconds for _ in range(EACH)]
    return best_shares(2 * EACH * rows * count, devices), devices


def measure(model: str, count: int) -> Row:
    """One row: all three ways to share out the same batch."""
    found, devices = shared(model, count)
    equal_s, total = max(device.step_s(MEASURED[model][0] * count) for device in devices), sum(found.sizes)
    by_peak = proportional_shares(total, [peak for peak in PEAKS for _ in range(EACH)])
    by_peak_s = max(device.step_s(size) for device, size in zip(devices, by_peak))
    figures = (
        _span(found.sizes[:EACH]),
        _span(found.sizes[EACH:]),
        equal_s,
        found.step_s,
        equal_s / found.step_s,
        equal_s / found.lower_bound_s,
        equal_s / by_peak_s,
    )
    return dict(zip(COLUMNS, (row_name(model, count), *figures)))


def _span(sizes: tuple[int, ...]) -> str:
    return str(min(sizes)) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"


ON_GROUPS = "8 v100 + 8 p100"
PLANNED = {"resnet50": 512, "bert-large": 128, "vgg13": 512, "t5-large": 32}  # batches that fit without microbatches
PLANNED_COLUMNS = (
    "row",
    "rows of a V100",
    "rows of a P100",
    "step, s",
    "over equal shares, times",
    "over peak flop/s (Whale), times",
    "no plan in these shares below, s",
    "sum of speeds, s",
    "the V100 alone, s",
)
PLANNED_TABLE = table(f"Planned shares: {ON_GROUPS}", PLANNED_COLUMNS, (f"{k}, batch {v}" for k, v in PLANNED.items()))
IN_STAGES = {"bert-large": 256, "t5-large": 64}
FOUR_AND_FOUR = "4 v100 + 4 p100"
STAGES_COLUMNS = (
    "row",
    "schedule",
    "ops on V100 and P100",
    "step, s",
    "equal cut, s",
    "over the equal cut, times",
    "sum of speeds, s",
)
STAGES_TABLE = table(f"Stages: {FOUR_AND_FOUR}", STAGES_COLUMNS, (f"{k}, batch {v}" for k, v in IN_STAGES.items()))
TIMED = {"resnet50": 4096, "bert-large": 512, "t5-large": 256}
TIME_COLUMNS = (
    "row",
    "128 v100, CPU s",
    "64 v100 + 64 p100, CPU s",
    "ratio",
    "step of 128 v100, s",
    "step of groups, s",
)
TIMED_MESHES: Mapping[str, Mesh | Devices] = {"": Devices(128), ", one axis": Mesh((128,), ("dp",))}
TIME_TABLE = table(
    "Planning time: 64 + 64 devices",
    TIME_COLUMNS,
    (f"{model}, batch {batch}{where}" for where in TIMED_MESHES for model, batch in TIMED.items()),
)
LONG_S = 600.0  # of wall: no search ends by its time


def graph_of(model: str, batch: int) -> Graph:
    example = build_model(model, batch=batch)
    return trace(skeleton(example.model), example.args, dict(example.kwargs))


def planned(model: str, batch: int) -> Row:
    """Shares on all devices; `the V100 alone` is the best plan of these, whatever it is, or None if nothing fits."""
    graph, cluster, asked = graph_of(model, batch), load_cluster(ON_GROUPS), PlanRequest(time_limit_s=LONG_S)
    plan = choose_plan(graph, Mesh((16,), ("dp",)), cluster, asked, predict=rank_peaks)
    rows = next(tuple(sizes) for _, sizes in plan.mesh.shares)
    in_shares = plan.found_by.rpartition("in less than ")[2]
    try:
        alone = choose_plan(graph, Devices(8), load_cluster("v100"), asked, predict=rank_peaks).step_s
    except AutoparError:
        alone = None
    figures = (
        _span(rows[:8]),
        _span(rows[8:]),
        plan.step_s,
        plan.hand["this plan in equal shares"].step_s / plan.step_s,
        plan.hand["this plan in shares by peak flop/s (Whale)"].step_s / plan.step_s,
        in_shares,
        plan.lower_bound_s,
        alone,
    )
    return dict(zip(PLANNED_COLUMNS, (f"{model}, batch {batch}", *figures)))


def in_stages(model: str, batch: int) -> Row:
    """Stages cut by the speed of each group, and as they are planned under the same schedule if all were V100."""
    graph, cluster, mesh = graph_of(model, batch), load_cluster(FOUR_AND_FOUR), Mesh((2, 4), ("pp", "dp"))
    plan = choose_plan(graph, mesh, cluster, PlanRequest(time_limit_s=LONG_S), predict=rank_peaks)
    assert isinstance(plan, StagedPlan), "a mesh with stages"
    schedule = plan.schedule
    asked = PlanRequest(num_microbatches=schedule.num_microbatches, schedule=schedule.name)
    equal = on_groups(choose_plan(graph, mesh, load_cluster("v100"), replace(asked, time_limit_s=LONG_S)), cluster)
    ops = [sum(len(plan.stages[stage].graph.ops) for stage in schedule.stages_of(rank)) for rank in range(2)]
    figures = (str(schedule), f"{ops[0]} and {ops[1]}", plan.step_s, equal.step_s, equal.step_s / plan.step_s)
    return dict(zip(STAGES_COLUMNS, (f"{model}, batch {batch}", *figures, plan.lower_bound_s)))


def on_groups(plan: Plan | StagedPlan, cluster: Cluster) -> StagedPlan:
    """A plan in stages of equal devices with the prices of a cluster of groups."""
    assert isinstance(plan, StagedPlan), "a mesh with stages"
    stages = []
    for number, own in enumerate(plan.stages):
        there = cluster_of_rank(cluster, plan.schedule.rank_of(number), plan.schedule.num_ranks)
        stages.append(plan_of(own.graph, own.assignment, own.mesh, there, training=own.training))
    return replace(plan, cluster=cluster, stages=tuple(stages))


def timed(model: str, batch: int, where: str) -> Row:
    """CPU seconds of planning, tracing left out, on an open mesh of 128 devices or on one axis; each on a graph of its
    own, after a plan of half the batch, so that what torch loads at its first use counts for neither.
    """
    seconds, steps = [], []
    mesh = TIMED_MESHES[where]
    choose_devices(graph_of(model, batch // 2), TIMED_MESHES[", one axis"], load_cluster("v100"), predict=rank_peaks)
    for cluster in ("v100", "64 v100 + 64 p100"):
        graph = graph_of(model, batch)
        gc.collect()  # of rows before
        start = process_time()
        asked = PlanRequest(time_limit_s=LONG_S)
        steps.append(choose_devices(graph, mesh, load_cluster(cluster), asked, predict=rank_peaks).step_s)
        seconds.append(process_time() - start)
    return dict(zip(TIME_COLUMNS, (f"{model}, batch {batch}{where}", *seconds, seconds[1] / seconds[0], *steps)))


PARTS: Mapping[str, tuple[Any, Callable[[], list[Row]]]] = {
    "measured": (TABLE, lambda: [measure(model, count) for model in MEASURED for count in ACCUMULATED]),
    "planned": (PLANNED_TABLE, lambda: [planned(*case) for case in PLANNED.items()]),
    "stages": (STAGES_TABLE, lambda: [in_stages(*case) for case in IN_STAGES.items()]),
    "time": (TIME_TABLE, lambda: [timed(*case, where) for where in TIMED_MESHES for case in TIMED.items()]),
    "slowed": (SPLIT, lambda: [split_row(factor) for factor in FACTORS]),
    "straggler": (STRAGGLERS, lambda: [straggler_row()]),
}


def main() -> None:
    """Calculate the rows of the tables that are named, or all, and write the results."""
    warnings.simplefilter("ignore")
    tables = [part for part, _ in PARTS.values()]
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    asked = options.parse_args().parts or [*PARTS]
    if unknown := set(asked) - set(PARTS):
        options.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for name in asked:
        one, rows = PARTS[name]
        add("unequal", tables, {one.title: rows()}, {})


if __name__ == "__main__":
    main()
