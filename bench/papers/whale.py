"""Whale (USENIX ATC 2022): ResNet50 with 100,000 classes, where splitting the classifier beats data parallelism; here it must be found."""

from collections.abc import Callable
from typing import Any

import torch

from autopar.costmodel.cluster import load_cluster
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph, Op
from autopar.plan.plan import Plan
from autopar.sbp.placement import format_layout
from autopar.vision import Classifier, resnet50
from bench.papers.compare import compare, traced
from bench.papers.section import Cells, Section, Table

CLUSTER = "v100-50g"
CLASSES = 100_000
PER_DEVICE = (16, 32, 64, 128)
PUBLISHED = {8: 1.13, 16: 1.66, 32: 2.43}  # hybrid over data parallel, by number of V100
TIME_LIMIT_S = 8.0


def resnet_graph(batch: int, num_classes: int) -> Graph:
    """ResNet50 with its loss, float32."""
    with torch.device("meta"):
        return traced(Classifier(resnet50(num_classes)), torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long))


def whale(tell: Callable[[str], None], *, is_small: bool = False) -> Section:
    """The whole comparison; `is_small`: few classes and one size, for a test."""
    rows, layouts = [], []
    for count in (8,) if is_small else PUBLISHED:
        for per_device in PER_DEVICE[1:2] if is_small else PER_DEVICE:
            tell(f"ResNet50, {count} devices, {per_device} each")
            graph = resnet_graph(per_device * count, 1000 if is_small else CLASSES)
            row: dict[str, Any] = {"V100": count, "batch a device": per_device}
            try:
                found = compare(graph, count, load_cluster(CLUSTER), time_limit_s=TIME_LIMIT_S)
            except InfeasibleError:
                rows.append(row | dict.fromkeys(COLUMNS, "no plan fits"))
                continue
            plan, ddp_s = found.plan, found.ddp.costs.step_s
            step_s = plan.costs.step_s
            values = 1e3 * ddp_s, 1e3 * step_s, str(plan.mesh), ddp_s / step_s, PUBLISHED[count], hybrid_of(plan)
            rows.append(row | dict(zip(COLUMNS, values)))
            if per_device == PER_DEVICE[1]:
                layouts += classifier_rows(plan)
    tables = (
        Table("hybrid over data parallel", tuple(rows)),
        Table(f"the classifier in the plans found, {PER_DEVICE[1]} a device", tuple(layouts)),
    )
    return Section("Whale", PAPER, SETTINGS, tables, NOT_FOUND, NOTES)


def hybrid_of(plan: Plan) -> str:
    """How far what Whale's authors wrote by hand was found: the batch split in front, the classifier's weight split."""
    signatures = {op.name: plan.assignment.strategies[op.name].signatures for op in plan.graph.ops}
    by_channel = sum(any(x.inputs[1].is_split for x in signatures[op.name]) for op in _ops(plan.graph, "conv2d"))
    if not any(x.inputs[1].is_split for op in _ops(plan.graph, "linear") for x in signatures[op.name]):
        return "no"
    return f"yes; {by_channel} convolutions by channel too" if by_channel else "yes"


def classifier_rows(plan: Plan) -> list[Cells]:
    """Layouts of what the classifier and the loss read and make, and of the weight as it is stored."""
    (classifier,), (loss,) = _ops(plan.graph, "linear"), _ops(plan.graph, "cross_entropy_loss")
    weight, head = classifier.inputs[1], plan.assignment.strategies[classifier.name]
    after = plan.assignment.strategies[loss.name]
    row = {
        "V100": plan.mesh.num_devices,
        "mesh": str(plan.mesh),
        "features in": format_layout(head.input_layout(0)),
        "weight [classes, features] stored": format_layout(plan.assignment.layouts[weight.name]),
        "weight as used": format_layout(head.input_layout(1)),
        "logits out": format_layout(head.output_layout(0)),
        "logits in the loss": format_layout(after.input_layout(0)),
        "labels": format_layout(after.input_layout(1)),
    }
    return [row]


def _ops(graph: Graph, name: str) -> list[Op]:
    return [op for op in graph.ops if op.target.split(".")[1] == name]


COLUMNS = ("DP, ms", "ours, ms", "our mesh", "ours over DP, times", "published, times", "hybrid found")
PAPER = 'Jia et al., USENIX ATC 2022, "Whale: Efficient Giant Model Training over Heterogeneous GPUs", arXiv:2011.09208'
SETTINGS = {
    "model": f"ResNet50, {CLASSES:,} classes, 224 x 224 images, float32, AdamW, no pins",
    "cluster": f"preset {CLUSTER}: 8 V100 a node on NVLink, 50 Gbit/s a node shared by its 8 devices, six tenths of it reached",
    "ours": f"the plan found with the mesh left open, in {TIME_LIMIT_S:g} s of search; DP: the hand plan ddp over all devices at once",
    "hybrid found": "yes where all convolutions split the batch alone and the classifier's weight is split; where some convolutions "
    "are split by channel on one of the axes, that is said",
    "layouts": "one placement a mesh axis: S(d) split along dim d, P a pending sum, B whole, B* whole with a gradient to be summed",
    "time": "compute, communication and update one after the other: nothing overlaps, in either column",
}
NOT_FOUND = (
    "the batch of the published figures and how its GPUs were spread over nodes: the abstract and summaries at hand do not say; "
    "several batches are shown",
    "the optimizer: with AdamW as here, updating 205 M classifier parameters on every device is part of DP's time",
)
NOTES = (
    "the smaller the batch, the more the classifier's gradient weighs: the published figures lie where the batch a device makes them",
    "batch norm is over the whole batch, as on one device: both columns have its small all-reduces, which Whale's run does not",
    "Whale's run overlaps part of DP's reduction with backward and prices TensorFlow's own overheads, which are the same in both of "
    "its columns",
)
