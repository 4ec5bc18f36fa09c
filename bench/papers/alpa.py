"""Alpa (OSDI 2022): how its GPT scales from 350M on one V100 to 39B on 64, beside how our plans would by the cost
model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.mesh import Devices
from autopar.peak_memory.predict import rank_peaks
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from bench.models import GPT
from bench.papers.compare import traced
from bench.papers.section import Paper, table
from bench.report import Row

CLUSTER = "v100-25g"
BATCH, SEQUENCE, VOCABULARY = 1024, 1024, 51200
TIME_LIMIT_S = 10.0
# Left open, the number of microbatches is one of six at most, all too small for a batch of so many sequences on few
# devices.
NUM_MICROBATCHES = (64, 256)


@dataclass(frozen=True)
class Size:
    """A model on so many V100, and teraflop/s a device as published, recomputation counted as work: Alpa, Megatron-LM,
    Alpa without stages."""

    num_devices: int
    name: str
    hidden: int
    layers: int
    heads: int
    alpa: float
    megatron: float
    without_stages: float

    def flops(self, *, recomputed: bool) -> float:
        """Of a batch, forward and backward, as Alpa counts them: benchmark/alpa/util.py, compute_gpt_tflops."""
        tokens, passes = BATCH * SEQUENCE, 4 if recomputed else 3
        blocks = 24 * passes * tokens * self.hidden**2 * self.layers * (1 + SEQUENCE / (6 * self.hidden))
        return blocks + 6 * tokens * self.hidden * VOCABULARY

    def step_s(self, teraflops: float) -> float:
        """Seconds a batch took at a published rate."""
        return self.flops(recomputed=True) / (teraflops * 1e12 * self.num_devices)


# Models: benchmark/alpa/suite_manual_gpt.py, gpt_specs. Rates: osdi22_artifact/results_e2e.tsv, lines "gpt" of
# parax.auto, megatron and parax.intra_only. Both in the repository alpa-projects/alpa.
SIZES = (
    Size(1, "350M", 1024, 24, 16, 45.07, 47.53, 46.2003),
    Size(2, "760M", 1536, 24, 16, 57.92, 55.53, 59.5364),
    Size(4, "1.3B", 2048, 24, 32, 58.21, 55.89, 58.3552),
    Size(8, "2.6B", 2560, 32, 32, 61.61, 50.44, 50.8198),
    Size(16, "6.7B", 4096, 32, 32, 60.0, 56.59, 48.423),
    Size(32, "15B", 5120, 48, 40, 59.9, 58.24, 35.074),
    Size(64, "39B", 8192, 48, 64, 57.0, 57.84, 2.1098),
)


def gpt_graph(size: Size, batch: int) -> Graph:
    """The model in float16 with its loss in float32, no dropout, head and embedding apart."""
    with torch.device("meta"):
        model = GPT(size.hidden, size.layers, size.hidden // size.heads, SEQUENCE, VOCABULARY).to(torch.float16)
        ids = torch.zeros(batch, SEQUENCE, dtype=torch.long)
        return traced(model, ids, torch.zeros_like(ids))


@cache
def planned(size: Size) -> Plan | StagedPlan:
    """The plan of a whole batch of the model; InfeasibleError if none fits."""
    return fastest_plan(gpt_graph(size, BATCH), size.num_devices)


def fastest_plan(graph: Graph, num_devices: int, counts: Iterable[int] = NUM_MICROBATCHES) -> Plan | StagedPlan:
    """The fastest plan of a whole batch as `autopar.plan` finds it when asked for each of these `counts` of
    microbatches; InfeasibleError, that of the last, if none fits."""
    found, failure = [], None
    for count in counts:
        request = PlanRequest(num_microbatches=count, time_limit_s=TIME_LIMIT_S)
        try:
            found.append(choose_plan(graph, Devices(num_devices), load_cluster(CLUSTER), request, predict=rank_peaks))
        except InfeasibleError as error:
            failure = error
    if not found:
        assert failure is not None, "some number of microbatches is tried"
        raise failure
    return min(found, key=lambda plan: plan.step_s)


def row_name(size: Size) -> str:
    """Of its row."""
    return f"Alpa, GPT {size.name} on {size.num_devices}"


def rate(size: Size, step_s: float) -> float:
    """Flop/s a device, each product counted once."""
    return size.flops(recomputed=False) / (step_s * size.num_devices)


def measure(size: Size, smallest: Size) -> Mapping[str, Sequence[Row]]:
    """One size; what a device does in a second, ours and published, as a part of what it does of the smallest, on one
    device.
    """
    name = row_name(size)
    try:
        plan, alone_s = planned(size), planned(smallest).step_s
    except InfeasibleError as error:
        return {SCALING: [{"row": name, "error": str(error)}]}
    published = {
        of: tuple(one.step_s(getattr(one, of)) for one in (size, smallest))
        for of in ("alpa", "megatron", "without_stages")
    }
    scaled = {of: rate(size, own_s) / rate(smallest, one_s) for of, (own_s, one_s) in published.items()}
    shown = described(plan)
    values = (
        size.name,
        size.num_devices,
        scaled["alpa"],
        scaled["megatron"],
        scaled["without_stages"],
        rate(size, plan.step_s) / rate(smallest, alone_s),
        published["alpa"][0],
        plan.step_s,
        run_rate(size, plan.step_s, shown[AGAIN] / size.layers) / run_rate(size, published["alpa"][0], 1.0),
    )
    return {SCALING: [{"row": name} | dict(zip(COLUMNS, values))], PLANS: [{"row": name} | shown]}


def run_rate(size: Size, step_s: float, recomputed: float) -> float:
    """Flop/s of all devices, products that are run again counted again; recomputed: the part of the layers of which
    they are.
    """
    once, twice = (size.flops(recomputed=again) for again in (False, True))
    return (once + min(1.0, recomputed) * (twice - once)) / step_s


def described(plan: Plan | StagedPlan) -> dict[str, Any]:
    """The plan in the columns of the second table."""
    stages = plan.stages if isinstance(plan, StagedPlan) else (plan,)
    again = sum(len(stage.assignment.recomputed) for stage in stages)
    on_host = sum(len(stage.assignment.state_on_host) for stage in stages)
    schedule = str(plan.schedule) if isinstance(plan, StagedPlan) else "one stage, one pass"
    peak_gib = max(plan.peak_bytes or rank_peaks(plan)) / 2**30
    values = str(plan.mesh), schedule, again, on_host, peak_gib, plan.memory_limit_bytes / 2**30, 100 * plan.gap
    return dict(zip(PLAN_COLUMNS, values))


SCALING, PLANS = "Alpa: scaling", "Alpa: our plans"
TOO_FAST, AGAIN = "rate of the products that are run, ours / Alpa's", "blocks recomputed"
COLUMNS = (
    "GPT",
    "V100",
    "Alpa, of its one-GPU rate",
    "Megatron-LM, of its one-GPU rate",
    "Alpa without stages, of its one-GPU rate",
    "ours, of its one-GPU rate",
    "Alpa, measured, s",
    "ours, predicted, s",
    TOO_FAST,
)
PLAN_COLUMNS = (
    "mesh",
    "stages, microbatches",
    AGAIN,
    "parameters with state on the host",
    "predicted peak, GiB",
    "limit, GiB",
    "distance to our bound, %",
)
SETTINGS = {
    "models": (
        f"GPT of the table, sequence {SEQUENCE}, vocabulary {VOCABULARY}, {BATCH} sequences a batch, float16 with "
        "the loss in float32, AdamW with float32 moments, no dropout, embedding and head apart"
    ),
    "cluster": (
        f"preset {CLUSTER}: nodes of 8 V100 16 GB on NVLink (p3.16xlarge), 25 Gbit/s a node; products at 0.55 and links"
        " at 0.6 of the datasheet"
    ),
    "ours": (
        "the plan of the whole batch as autopar.plan finds it with the mesh left open, stages, microbatches and"
        " recomputed blocks included, its peak within nine tenths of a device; the faster of those with"
        f" {' and '.join(map(str, NUM_MICROBATCHES))} microbatches, each searched for {TIME_LIMIT_S:g} s; predicted by"
        " the cost model"
    ),
    "of its one-GPU rate": (
        "work a device does in a second, each product counted once, over the same of the 350M model on one device: "
        "scaling is set against scaling, since the seconds of one column are measured and of the other predicted"
    ),
    "Alpa": (
        "with stages and recomputation, measured; without stages: its intra-operator pass alone; Megatron-LM: its best"
        " grid"
    ),
}
NOT_KNOWN = (
    "a table of figure 7's numbers in the paper's text: the published rates are those of its artifact's result file",
)
NOTES = (
    (
        "the last column of the first row says by how much the cost model is too fast on one GPU already, products that"
        " are recomputed counted on both sides; the rows behind it add to that what scaling adds"
    ),
    (
        "larger models have larger products; whether that is why Alpa's and Megatron-LM's columns rise above 1 was not"
        " looked into: the cost model gives all products the same rate"
    ),
    "Alpa also holds a float32 copy of the parameters (4 bytes each), which is not in our memory",
    "attention is counted as fused (its scores are not kept), as PyTorch runs it",
)
_CASES = {row_name(size): partial(measure, size, SIZES[0]) for size in SIZES}
ALPA = Paper(
    "Alpa",
    'Zheng et al., OSDI 2022, "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning",'
    " arXiv:2201.12023",
    SETTINGS,
    NOT_KNOWN,
    NOTES,
    (table(SCALING, COLUMNS, _CASES), table(PLANS, PLAN_COLUMNS, _CASES)),
    _CASES,
)
