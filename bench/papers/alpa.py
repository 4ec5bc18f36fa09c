"""Alpa (OSDI 2022): its GPT weak scaling, 350M on one V100 to 39B on 64, beside what our plans would take by the cost model."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from autopar.costmodel.cluster import load_cluster
from autopar.costmodel.evaluate import Costs, evaluate
from autopar.costmodel.memory import usable_memory_bytes
from autopar.errors import InfeasibleError
from autopar.ir.fold import fold
from autopar.ir.graph import Graph
from autopar.mesh import Devices, Mesh
from autopar.plan.assemble import make_plan
from autopar.plan.hand import HandPlan, format_hand_plan, hand_plan
from autopar.sbp.annotate import annotate
from bench.models import GPT
from bench.papers.compare import traced
from bench.papers.section import Cells, Section, Table

CLUSTER, NODE = "v100-25g", 8
BATCH, SEQUENCE, VOCABULARY = 1024, 1024, 51200
TIME_LIMIT_S = 8.0
MOST_IN_A_NODE, MOST_BEYOND = 4, 1  # sequences a device in a microbatch: beyond a node more were seen not to fit


@dataclass(frozen=True)
class Row:
    """A model on so many V100, and teraflop/s a device as published, recomputation counted as work: Alpa, Megatron-LM, Alpa without "
    "stages."""

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


# Models: benchmark/alpa/suite_manual_gpt.py, gpt_specs. Rates: osdi22_artifact/results_e2e.tsv, lines "gpt" of parax.auto, megatron and
# parax.intra_only. Both in the repository alpa-projects/alpa.
ROWS = (
    Row(1, "350M", 1024, 24, 16, 45.07, 47.53, 46.2003),
    Row(2, "760M", 1536, 24, 16, 57.92, 55.53, 59.5364),
    Row(4, "1.3B", 2048, 24, 32, 58.21, 55.89, 58.3552),
    Row(8, "2.6B", 2560, 32, 32, 61.61, 50.44, 50.8198),
    Row(16, "6.7B", 4096, 32, 32, 60.0, 56.59, 48.423),
    Row(32, "15B", 5120, 48, 40, 59.9, 58.24, 35.074),
    Row(64, "39B", 8192, 48, 64, 57.0, 57.84, 2.1098),
)


def gpt_graph(row: Row, batch: int) -> Graph:
    """The model with its loss in float16, no dropout, head and embedding apart."""
    with torch.device("meta"):
        model = GPT(row.hidden, row.layers, row.hidden // row.heads, SEQUENCE, VOCABULARY).to(torch.float16)
        ids = torch.zeros(batch, SEQUENCE, dtype=torch.long)
        return traced(model, ids, torch.zeros_like(ids))


@dataclass(frozen=True)
class Candidate:
    """A plan of one microbatch of `size` sequences; `gap`: its distance to the bound, None of a hand plan. `batch_s`: see `batch_s`."""

    by: str
    mesh: Mesh
    size: int
    costs: Costs
    gap: float | None
    batch_s: float


def alpa(tell: Callable[[str], None], *, is_small: bool = False) -> Section:
    """The whole comparison; `is_small`: two layers of two rows, for a test."""
    times, plans = [], []
    for row in (replace(row, layers=2) for row in ROWS[1:3]) if is_small else ROWS:
        found = [*_searched(row, tell), *_by_hand(row, tell)]
        best = min(found, key=lambda candidate: candidate.batch_s, default=None)
        times.append(_time_row(row, best))
        if best is not None:
            plans.append(_plan_row(row, best))
    timed = Table("time of a batch, and work a second without recomputation", tuple(times))
    return Section("Alpa", PAPER, SETTINGS, (timed, Table("our plans, a microbatch", tuple(plans))), NOT_FOUND, NOTES)


def _searched(row: Row, tell: Callable[[str], None]) -> Iterator[Candidate]:
    """Of the two largest microbatches, in powers of two, that have a plan within the memory; none above the most sequences a device."""
    size, num_found = row.num_devices * (MOST_IN_A_NODE if row.num_devices <= NODE else MOST_BEYOND), 0
    while size >= 1 and num_found < 2:
        tell(f"GPT {row.name} on {row.num_devices}, microbatches of {size}")
        with suppress(InfeasibleError):
            plan = make_plan(gpt_graph(row, size), Devices(row.num_devices), load_cluster(CLUSTER), time_limit_s=TIME_LIMIT_S)
            num_found += 1
            yield Candidate("search", plan.mesh, size, plan.costs, plan.gap, batch_s(plan.graph, plan.costs, BATCH // size))
        size //= 2


def _by_hand(row: Row, tell: Callable[[str], None]) -> Iterator[Candidate]:
    """Of several nodes, Megatron's plans with a node as one tensor-parallel group that fit: the search knows of one microbatch only, in
    which whole parameters, reduced once a batch, have no advantage over parameters in parts, gathered in every microbatch."""
    num_nodes, cluster = row.num_devices // NODE, load_cluster(CLUSTER)
    if num_nodes < 2:
        return
    mesh = Mesh((num_nodes, NODE), ("dp", "tp"))
    for size in (num_nodes * 2**power for power in range(3)):
        tell(f"GPT {row.name} on {row.num_devices}, by hand, microbatches of {size}")
        graph = gpt_graph(row, size)
        folded = fold(graph)
        for is_sequence_parallel in (False, True):
            plan = HandPlan((1,), is_sequence_parallel)
            assignment = hand_plan(plan, graph, folded, annotate(graph, mesh, folded), mesh)
            costs = evaluate(graph, assignment, mesh, cluster)
            if costs.total_memory_bytes <= usable_memory_bytes(cluster):
                yield Candidate(format_hand_plan(plan, mesh), mesh, size, costs, None, batch_s(graph, costs, BATCH // size))


def batch_s(graph: Graph, costs: Costs, num_microbatches: int) -> float:
    """Seconds of a batch that sums gradients over microbatches: those of whole parameters are reduced once, all else is repeated."""
    parameters = {item.value.name for item in graph.of_kind("parameter")}
    once = sum(
        planned.time_s
        for planned in costs.collectives
        if planned.where in parameters and planned.collective.phase == "backward" and planned.collective.kind == "all_reduce"
    )
    repeated = costs.step_s - costs.optimizer_s - once
    return num_microbatches * repeated + once + costs.optimizer_s


def _time_row(row: Row, best: Candidate | None) -> Cells:
    work = row.flops(recomputed=False) / 1e15
    published = [row.step_s(rate) for rate in (row.alpa, row.megatron, row.without_stages)]
    return {
        "GPT": row.name,
        "V100": row.num_devices,
        "Alpa as published, PFLOP/s": row.alpa * row.num_devices / 1e3,
        "Alpa, s": published[0],
        "Megatron-LM, s": published[1],
        "Alpa without stages, s": published[2],
        "ours, s": best.batch_s if best else "does not fit",
        "Alpa, PFLOP/s": work / published[0],
        "Alpa without stages, PFLOP/s": work / published[2],
        "ours, PFLOP/s": work / best.batch_s if best else "does not fit",
    }


def _plan_row(row: Row, best: Candidate) -> Cells:
    costs = best.costs
    memory = {kind: num_bytes / 2**30 for kind, num_bytes in costs.memory_bytes.items()}
    compute_s = costs.compute_forward_s + costs.compute_backward_s
    return {
        "GPT": row.name,
        "V100": row.num_devices,
        "found by": best.by,
        "mesh": str(best.mesh),
        "sequences a microbatch": best.size,
        "microbatches": BATCH // best.size,
        "GiB a device": costs.total_memory_bytes / 2**30,
        "of it parameters, gradients, optimizer": memory["parameters"] + memory["gradients"] + memory["optimizer"],
        "of it activations": memory["activations"],
        "communication, % of the batch's time": 100 * (1 - (BATCH // best.size * compute_s + costs.optimizer_s) / best.batch_s),
        "distance of a microbatch to our bound, %": 100 * best.gap if best.gap is not None else "",
    }


PAPER = 'Zheng et al., OSDI 2022, "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", arXiv:2201.12023'
SETTINGS = {
    "models": f"GPT of the table, sequence {SEQUENCE}, vocabulary {VOCABULARY}, {BATCH} sequences a batch, float16, AdamW with "
    "float32 moments, "
    "no dropout, embedding and head apart",
    "cluster": f"preset {CLUSTER}: nodes of 8 V100 16 GB on NVLink (p3.16xlarge), 25 Gbit/s a node; products at 0.55 and links at 0.6 "
    "of the datasheet",
    "ours": "no pipeline stages and no recomputation: the plan found with the mesh left open for each of the two largest "
    "microbatches that fit nine tenths of a device (from 4 sequences a device in a node, 1 beyond, downwards), or where that is faster "
    "and fits, Megatron's with a node as one tensor-parallel group; gradients are summed over the microbatches",
    "search": f"{TIME_LIMIT_S:g} s a microbatch size; the plan is searched for one microbatch with its reduction, so that it takes "
    "parameters in parts, gathered in every microbatch, for no dearer than whole ones, reduced once a batch",
    "time": "compute, communication and update one after the other",
    "Alpa": "with pipeline stages and recomputation, measured; without stages: its intra-operator pass alone; Megatron-LM: its best grid",
    "PFLOP/s": "the first column counts recomputed products, as the paper does; the last three count each product once",
}
NOT_FOUND = ("a table of figure 7's numbers in the paper's text: the published rates are those of its artifact's result file",)
NOTES = (
    "on one node the comparison is of like with like but for recomputation, which costs Alpa a third more products and lets it hold "
    "larger microbatches",
    "over several nodes the rows without stages, theirs and ours, pay for moving parameters or activations over 25 Gbit/s in every "
    "microbatch; pipeline stages, not built here yet, avoid that: this is where Alpa and Megatron-LM are ahead",
    "Alpa also holds a float32 copy of the parameters (4 bytes each), which is not in our memory",
    "attention is counted as fused (its scores are not kept), as PyTorch runs it",
)
