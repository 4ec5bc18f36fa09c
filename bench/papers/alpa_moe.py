"""Alpa (OSDI 2022): how its mixtures of experts scale from 380M on one V100 to 70B on 64, beside our plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.plans.plan import Plan
from autopar.plans.staged_plan import StagedPlan
from bench.papers import alpa
from bench.papers.compare import traced
from bench.papers.gshard import MixtureLM
from bench.papers.section import Paper, table
from bench.report import Row

BATCH, SEQUENCE, VOCABULARY, HEADS, GROUP = 1024, 1024, 32000, 16, 2048
# Between Alpa's own fewest and most, but for one device, where it has 512.
NUM_MICROBATCHES = (16, 64, 256)


@dataclass(frozen=True)
class Mixture:
    """A model on so many V100, and teraflop/s a device as published, recomputation counted as work: of Alpa, of
    DeepSpeed (None: it ran out of memory) and of Alpa without stages.
    """

    num_devices: int
    name: str
    hidden: int
    layers: int
    num_experts: int
    alpa: float
    deepspeed: float | None
    without_stages: float

    def flops(self, *, recomputed: bool) -> float:
        """Of a batch, forward and backward, as Alpa counts them: benchmark/alpa/util.py, compute_moe_tflops."""
        tokens, passes, square = BATCH * SEQUENCE, 4 if recomputed else 3, self.hidden**2
        attention = 8 * square + 4 * SEQUENCE * self.hidden
        experts = 64 * square + 2 * self.hidden * self.num_experts + 4 * GROUP + 8 * self.hidden * GROUP
        blocks = passes * tokens * self.layers / 2 * (2 * attention + 32 * square + experts)
        return blocks + 6 * tokens * self.hidden * VOCABULARY

    def step_s(self, teraflops: float) -> float:
        """Seconds a batch took at a published rate."""
        return self.flops(recomputed=True) / (teraflops * 1e12 * self.num_devices)

    def rate(self, step_s: float) -> float:
        """Flop/s a device, each product counted once."""
        return self.flops(recomputed=False) / (step_s * self.num_devices)


# Models: benchmark/alpa/suite_manual_moe.py, moe_specs, and alpa/model/moe.py. Rates: osdi22_artifact/results_e2e.tsv,
# lines "moe" of parax.auto, deepspeed and parax.intra_only. All in the repository alpa-projects/alpa.
MIXTURES = (
    Mixture(1, "380M", 768, 8, 8, 45.4621, 34.24, 45.4621),
    Mixture(2, "690M", 768, 8, 16, 43.03, 33.11, 42.1687),
    Mixture(4, "1.3B", 768, 16, 16, 39.92, 34.67, 41.1305),
    Mixture(8, "2.4B", 1024, 16, 16, 45.76, 40.01, 46.7228),
    Mixture(16, "10B", 1536, 16, 32, 45.36, 12.91, 22.9137),
    Mixture(32, "27B", 2048, 16, 48, 38.84, 3.82, 1.5047),
    Mixture(64, "70B", 2048, 32, 64, 36.55, None, 0.2151),
)


def model_of(size: Mixture) -> MixtureLM:
    """The model in float16, on meta; its loss is in float32, and its head is its embedding."""
    sizes = {"sequence": SEQUENCE, "vocabulary": VOCABULARY, "group": GROUP}
    with torch.device("meta"):
        return MixtureLM(size.hidden, size.layers, HEADS, size.num_experts, **sizes).to(torch.float16)


def graph_of(size: Mixture) -> Graph:
    """The model for a whole batch."""
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device="meta")
    return traced(model_of(size), ids, torch.zeros_like(ids))


@cache
def planned(size: Mixture) -> Plan | StagedPlan:
    """The plan of a whole batch of the model; InfeasibleError if none fits."""
    return alpa.fastest_plan(graph_of(size), size.num_devices, NUM_MICROBATCHES)


def row_name(size: Mixture) -> str:
    """Of its row."""
    return f"Alpa, MoE {size.name} on {size.num_devices}"


def measure(size: Mixture, smallest: Mixture) -> Mapping[str, Sequence[Row]]:
    """One size; what a device does in a second, ours and published, as a part of what it does of the smallest, on one
    device.
    """
    name = row_name(size)
    try:
        plan, alone_s = planned(size), planned(smallest).step_s
    except InfeasibleError as error:
        return {SCALING: [{"row": name, "error": str(error)}]}
    scaled = [
        None if own is None or one is None else size.rate(size.step_s(own)) / smallest.rate(smallest.step_s(one))
        for own, one in ((getattr(size, of), getattr(smallest, of)) for of in ("alpa", "deepspeed", "without_stages"))
    ]
    values = (
        size.name,
        size.num_devices,
        *scaled,
        size.rate(plan.step_s) / smallest.rate(alone_s),
        size.step_s(size.alpa),
        plan.step_s,
        experts_of(plan),
    )
    return {SCALING: [{"row": name} | dict(zip(COLUMNS, values))], PLANS: [{"row": name} | alpa.described(plan)]}


def experts_of(plan: Plan | StagedPlan) -> str:
    """The layout in which experts are stored, and with which they are multiplied, by axes of the plan's mesh."""
    stage = plan.stages[0] if isinstance(plan, StagedPlan) else plan
    op = next(op for op in stage.graph.ops if any(x.name.endswith("feed_forward_up") for x in op.inputs))
    at = next(place for place, x in enumerate(op.inputs) if x.name.endswith("feed_forward_up"))
    stored = stage.assignment.layouts[op.inputs[at].name]
    used = stage.assignment.strategies[op.name].input_layout(at)
    axes = stage.mesh.axis_names
    told = [
        ""
        if not any(place.kind == "S" for place in layout)
        else ",".join(f"{axis}:{place}" for axis, place in zip(axes, layout) if place.kind == "S")
        for layout in (stored, used)
    ]
    return " stored, ".join(each or "whole" for each in told) + " in products"


SCALING, PLANS = "Alpa: scaling of experts", "Alpa: our plans of experts"
COLUMNS = (
    "MoE",
    "V100",
    "Alpa, of its one-GPU rate",
    "DeepSpeed, of its one-GPU rate",
    "Alpa without stages, of its one-GPU rate",
    "ours, of its one-GPU rate",
    "Alpa, measured, s",
    "ours, predicted, s",
    "weights of experts",
)
SETTINGS = {
    "models": (
        f"mixtures of experts of the table, sequence {SEQUENCE}, vocabulary {VOCABULARY}, {BATCH} sequences a batch, in"
        " every other layer experts of fixed capacity, two for a token, in groups of 2048 tokens; float16 with the loss"
        " in float32, AdamW with float32 moments, no dropout"
    ),
    "cluster": alpa.SETTINGS["cluster"],
    "ours": (
        "the plan of the whole batch as autopar.plan finds it with the mesh left open, the faster of those with"
        f" {', '.join(map(str, NUM_MICROBATCHES))} microbatches, each searched for {alpa.TIME_LIMIT_S:g} s; by"
        " the cost model"
    ),
    "of its one-GPU rate": alpa.SETTINGS["of its one-GPU rate"].replace("350M", "380M"),
    "weights of experts": "S(0): by experts, S(2) and S(1): within them, by their inner dim",
}
NOT_KNOWN = alpa.NOT_KNOWN
NOTES = (
    "larger models have larger products; the cost model gives all products the same rate",
    "attention is counted as fused (its scores are not kept), as PyTorch runs it",
)
_CASES = {row_name(size): partial(measure, size, MIXTURES[0]) for size in MIXTURES}
ALPA_MOE = Paper(
    "Alpa, experts",
    alpa.ALPA.source,
    SETTINGS,
    NOT_KNOWN,
    NOTES,
    (table(SCALING, COLUMNS, _CASES), table(PLANS, alpa.PLAN_COLUMNS, _CASES)),
    _CASES,
)
