"""AutoDDL (arXiv:2301.06813): VGG13 and a transformer against data parallelism and tuned Megatron; bytes by layer beside the bound."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.costmodel.cluster import Cluster, load_cluster
from autopar.costmodel.hardware import LinkLevel
from autopar.costmodel.presets import NETWORK_LATENCY_S
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.plan.plan import Plan
from autopar.vision import Classifier, vgg13
from bench.models import GPT
from bench.papers.compare import compare, traced
from bench.papers.grid import bytes_by_layer, grid_of, linear_ops, shape_of, shown
from bench.papers.section import Cells, Section, Table

Tell = Callable[[str], None]

HIDDEN, LAYERS, SEQUENCE, VOCABULARY, HEAD = 1024, 24, 512, 30522, 64
TIME_LIMIT_S = 8.0


@dataclass(frozen=True)
class Machine:
    """`published`: by how much AutoDDL's step was shorter there, at most."""

    name: str
    cluster: Cluster
    per_device: tuple[int, ...]
    num_devices: tuple[int, ...]
    published: float


def flat(preset: str, bytes_per_s: float) -> Cluster:
    """The preset's devices, each with a link of its own of that rate."""
    cluster, level = load_cluster(preset), LinkLevel(0, NETWORK_LATENCY_S, bytes_per_s)
    return replace(cluster, name=f"{cluster.name}, {bytes_per_s / 1e9:g} GB/s", levels=(level,))


def machines(vgg: bool, is_small: bool) -> list[Machine]:
    """One GPU a node, several GPUs a node; each as a flat network at the rate reached and as the preset describes it."""
    single, several = (17.7, 71.5) if vgg else (31.1, 10.0)
    counts = (4,) if is_small else (8, 16, 32, 64) if vgg else (8, 64)
    large, small = ((32,), (8,)) if vgg else ((1, 4), (1, 4))
    found = [
        Machine("one P100 a node, 10 GB/s reached", flat("p100", 10e9), large, counts, single),
        Machine("one P100 a node, preset p100", load_cluster("p100"), large, counts, single),
        Machine("V100, 5 GB/s each", flat("v100", 5e9), small, counts, several),
        Machine("8 V100 a node, preset v100-100g", load_cluster("v100-100g"), small, counts, several),
    ]
    return found[:1] if is_small else found


def vgg_graph(batch: int) -> Graph:
    """VGG13 for 1000 classes with its loss, float32."""
    with torch.device("meta"):
        return traced(Classifier(vgg13()), torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long))


def transformer_graph(batch: int, layers: int = LAYERS) -> Graph:
    """A decoder-only transformer with its loss, float32."""
    with torch.device("meta"):
        ids = torch.zeros(batch, SEQUENCE, dtype=torch.long)
        model = GPT(hidden=HIDDEN, layers=layers, head=HEAD, sequence=SEQUENCE, vocabulary=VOCABULARY + 6)  # the next multiple of 64
        return traced(model, ids, torch.zeros_like(ids))


def autoddl(tell: Tell, *, is_small: bool = False) -> Section:
    """The whole comparison; `is_small`: a few devices and layers, for a test."""
    tables, plans = [], []
    models = (("VGG13", lambda batch: vgg_graph(batch)), ("transformer", lambda batch: transformer_graph(batch, 2 if is_small else LAYERS)))
    for name, build in models:
        rows = []
        found = machines(name == "VGG13", is_small)
        for machine in found:
            for per_device in machine.per_device:
                for count in machine.num_devices:
                    tell(f"{name}, {machine.name}, {count} devices, {per_device} each")
                    row, plan = _compared(machine, count, per_device, build(per_device * count))
                    rows.append(row)
                    if plan is not None and count == machine.num_devices[-1] and machine is found[0]:
                        plans.append((name, per_device, plan))
        tables.append(Table(f"{name}: time of a step", tuple(rows)))
    layers = [Table(f"{name}, {size} a device: bytes a device sends, by layer", tuple(layer_rows(plan))) for name, size, plan in plans]
    return Section("AutoDDL", PAPER, SETTINGS, (*tables, *layers), NOT_FOUND, NOTES)


def _compared(machine: Machine, count: int, per_device: int, graph: Graph) -> tuple[Cells, Plan | None]:
    asked: dict[str, Any] = {"machine": machine.name, "devices": count, "batch a device": per_device}
    try:
        found = compare(graph, count, machine.cluster, time_limit_s=TIME_LIMIT_S)
    except InfeasibleError:
        return asked | dict.fromkeys(COLUMNS, "no plan fits"), None
    plan, step_s = found.plan, found.plan.costs.step_s
    ddp_s, megatron_s = found.ddp.costs.step_s, found.megatron.costs.step_s
    values = (
        1e3 * ddp_s,
        f"{1e3 * megatron_s:.4g} ({found.megatron.name.removeprefix('megatron:')})",
        1e3 * step_s,
        str(plan.mesh),
        100 * (1 - step_s / ddp_s),
        100 * (1 - step_s / min(ddp_s, megatron_s)),
        100 * (1 - step_s / found.expert.costs.step_s),
        100 * plan.gap,
        machine.published,
    )
    return asked | dict(zip(COLUMNS, values)), plan


def layer_rows(plan: Plan) -> list[Cells]:
    """One row a class of linear layers, and one for all else."""
    sent, count = bytes_by_layer(plan), Counter()
    for op in linear_ops(plan.graph):
        count[plan.folded.representative[op.name]] += 1
    rows, num_devices = [], plan.mesh.num_devices
    for op in linear_ops(plan.graph):
        if op.name not in count:
            continue
        ours = sum(sent.get(name, 0.0) for name, first in plan.folded.representative.items() if first == op.name) / count[op.name]
        shape, strategy = shape_of(op), plan.assignment.strategies[op.name]
        grid, best, order = grid_of(op, strategy, plan.mesh), shape.best_grid(num_devices), shape.order_bytes(num_devices)
        least = shape.moved_bytes(best)
        rows.append(
            {
                "layer": op.module, "times": count[op.name], "m, k, n": f"{shape.m}, {shape.k}, {shape.n}",
                "our grid": shown(grid), "our MB": ours / 1e6, "formula for our grid, MB": shape.moved_bytes(grid) / 1e6,
                "data parallel, MB": shape.moved_bytes((num_devices, 1, 1)) / 1e6, "best grid": shown(best), "its MB": least / 1e6,
                "(mnk/p)^(2/3), MB": order / 1e6, "ours / that": ours / order, "best grid / that": least / order,
            }
        )  # fmt: skip
    rest = dict.fromkeys(rows[0], "") | {"layer": "all other", "times": 1, "our MB": sent.get("", 0.0) / 1e6}
    return [*rows, rest]


COLUMNS = (
    "DP, ms", "tuned Megatron, ms", "ours, ms", "our mesh", "less than DP, %", "less than the better of both, %",
    "less than the best by hand with ZeRO, %", "distance to our bound, %", "published, at most %",
)  # fmt: skip
PAPER = 'Chen et al., 2023, "AutoDDL: Automatic Distributed Deep Learning with Near-Optimal Bandwidth Cost", arXiv:2301.06813'
SETTINGS = {
    "VGG13": "224 x 224 images, 1000 classes, float32, AdamW",
    "transformer": f"decoder-only, {LAYERS} layers, hidden {HIDDEN}, heads of {HEAD}, sequence {SEQUENCE}, vocabulary {VOCABULARY + 6}, "
    "float32, AdamW, no dropout",
    "devices": "presets p100 and v100 (products at 0.55 of the datasheet's rate), 14 us a step of a ring; links as in the rows",
    "ours": f"the plan found with the mesh left open, in {TIME_LIMIT_S:g} s of search, within nine tenths of a device's memory",
    "DP": "the hand plan ddp over all devices at once",
    "tuned Megatron": "data parallel outside, tensor parallel inside: the fastest of all degrees from 2 up, with and without sequence "
    "parallelism",
    "time": "compute, communication and update one after the other: nothing overlaps, in any of the columns",
    "bytes": "2 (q - 1) / q of the buffer in an all-reduce over q devices, half that in the others",
}
NOT_FOUND = (
    "how many devices and which batch belong to the published maxima, and the sizes of the paper's transformer: only the abstract was "
    "at hand",
    "the rates its two machines reach: 10 and 5 GB/s a device are a first calculation's guess, beside what the presets say",
)
NOTES = (
    "published figures are maxima of measured steps; the rows show what this cost model says at each size, none is fitted to them",
    "tuned Megatron has sequence parallelism here (arXiv:2205.05198), which is most of what the search gains on a transformer over DP; the "
    "published 31.1 % must come of sizes or a Megatron that were not at hand",
    "a real run hides part of the gradient reduction behind backward, so that measured gains over DP are smaller than these where "
    "links are slow",
    "the bound's constant is not known: of a balanced grid the formula's three terms alone are 6 times (mnk/p)^(2/3), less the parts "
    "that stay",
    "ours may send less than the best grid's formula: what is left split needs no second half of its all-reduce, and readers share a "
    "conversion",
)
