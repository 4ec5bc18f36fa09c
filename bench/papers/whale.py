"""Whale (USENIX ATC 2022): ResNet50 with 100,000 classes, where splitting the classifier beats data parallelism; here
it must be found.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product

import torch

from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph, Op
from autopar.models.vision import Classifier, resnet50
from autopar.plans.plan import Plan
from autopar.sbp.placement import format_layout
from bench.papers.compare import compare, traced
from bench.papers.section import Paper, table
from bench.report import Row

CLUSTERS = {25: "v100-25g", 50: "v100-50g", 100: "v100-100g"}  # Gbit/s of a node
CLASSES = 100_000
PER_DEVICE = (16, 32, 64, 128)
PUBLISHED = {8: 1.13, 16: 1.66, 32: 2.43}  # hybrid over data parallel, by number of V100
TIME_LIMIT_S = 8.0


def resnet_graph(batch: int, num_classes: int) -> Graph:
    """ResNet50 with its loss, float32."""
    with torch.device("meta"):
        return traced(
            Classifier(resnet50(num_classes)), torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
        )


def row_name(count: int, gbit: int, per_device: int) -> str:
    """
    >>> row_name(8, 50, 32)
    'Whale, 8 V100, 50 Gbit/s, 32 each'
    """
    return f"Whale, {count} V100, {gbit} Gbit/s, {per_device} each"


def measure(count: int, gbit: int, per_device: int, num_classes: int = CLASSES) -> Mapping[str, Sequence[Row]]:
    """One setting."""
    name, graph = row_name(count, gbit, per_device), resnet_graph(per_device * count, num_classes)
    row = {
        "row": name,
        "V100": count,
        "Gbit/s a node": gbit,
        "batch a device": per_device,
        "published, times": PUBLISHED[count],
    }
    try:
        found = compare(graph, count, load_cluster(CLUSTERS[gbit]), time_limit_s=TIME_LIMIT_S)
    except InfeasibleError as error:
        return {HYBRID: [{"row": name, "error": str(error)}]}
    plan, ddp_s, step_s = found.plan, found.ddp.costs.step_s, found.plan.costs.step_s
    fits = "yes" if found.ddp.costs.memory_bytes <= plan.memory_limit_bytes else "no"
    values = {"DP, ms": 1e3 * ddp_s, "DP fits": fits, "ours, ms": 1e3 * step_s, "our mesh": str(plan.mesh)}
    values["ours over DP, times"] = ddp_s / step_s
    return {
        HYBRID: [row | values | {"hybrid found": hybrid_of(plan)}],
        CLASSIFIER: [{"row": name} | classifier_row(plan)],
    }


def hybrid_of(plan: Plan) -> str:
    """How far what Whale's authors wrote by hand was found: the batch split in front, the classifier's weight split."""
    signatures = {op.name: plan.assignment.strategies[op.name].signatures for op in plan.graph.ops}
    by_channel = sum(any(x.inputs[1].is_split for x in signatures[op.name]) for op in _ops(plan.graph, "conv2d"))
    if not any(x.inputs[1].is_split for op in _ops(plan.graph, "linear") for x in signatures[op.name]):
        return "no"
    return f"yes; {by_channel} convolutions by channel too" if by_channel else "yes"


def classifier_row(plan: Plan) -> Row:
    """Layouts of what the classifier and the loss read and make, and of the weight as it is stored."""
    (classifier,), (loss,) = _ops(plan.graph, "linear"), _ops(plan.graph, "cross_entropy_loss")
    weight, head = classifier.inputs[1], plan.assignment.strategies[classifier.name]
    after = plan.assignment.strategies[loss.name]
    values = (
        plan.mesh.num_devices,
        str(plan.mesh),
        format_layout(head.input_layout(0)),
        format_layout(plan.assignment.layouts[weight.name]),
        format_layout(head.input_layout(1)),
        format_layout(head.output_layout(0)),
        format_layout(after.input_layout(0)),
        format_layout(after.input_layout(1)),
    )
    return dict(zip(LAYOUTS, values))


def _ops(graph: Graph, name: str) -> list[Op]:
    return [op for op in graph.ops if op.target.split(".")[1] == name]


HYBRID, CLASSIFIER = "Whale: hybrid over data parallel", "Whale: the classifier in the plans found"
COLUMNS = (
    "V100",
    "Gbit/s a node",
    "batch a device",
    "DP, ms",
    "DP fits",
    "ours, ms",
    "our mesh",
    "ours over DP, times",
    "published, times",
    "hybrid found",
)
LAYOUTS = (
    "V100",
    "mesh",
    "features in",
    "weight [classes, features] stored",
    "weight as used",
    "logits out",
    "logits in the loss",
    "labels",
)
SETTINGS = {
    "model": f"ResNet50, {CLASSES:,} classes, 224 x 224 images, float32, AdamW, no pins",
    "cluster": (
        "presets v100-25g, v100-50g and v100-100g: 8 V100 a node on NVLink; its 8 devices share 25, 50 or 100 Gbit/s a"
        " node, six tenths of which are reached"
    ),
    "ours": (
        f"the plan found with the mesh left open, in {TIME_LIMIT_S:g} s of search, without stages; DP: the hand plan"
        " ddp over all devices at once, priced also where it takes more memory than a device has; both predicted by"
        " the cost model"
    ),
    "hybrid found": (
        "yes where all convolutions split the batch alone and the classifier's weight is split; where some convolutions"
        " are split by channel on one of the axes, that is said"
    ),
    "layouts": (
        "one placement a mesh axis: S(d) split along dim d, P a pending sum, B whole, B* whole with a gradient to be"
        " summed"
    ),
    "time": "compute, communication and update one after the other: nothing overlaps, in either column",
}
NOT_KNOWN = (
    (
        "the batch of the published figures, the rate of the links between nodes and how the GPUs were spread over"
        " nodes: the abstract and summaries at hand do not say; all combinations of the rates and batches of the table"
        " are calculated"
    ),
    "the optimizer: with AdamW as here, updating 205 M classifier parameters on every device is part of DP's time",
)
NOTES = (
    (
        "the smaller the batch and the slower the links, the more the classifier's gradient weighs: what can be said is"
        " the range over the settings, not the row that comes near the published figure"
    ),
    (
        "batch norm is over the whole batch, as on one device: both columns have its small all-reduces, which Whale's"
        " run does not"
    ),
    (
        "Whale's run overlaps part of DP's reduction with backward and prices TensorFlow's own overheads, which are the"
        " same in both of its columns"
    ),
)
_CASES = {row_name(*one): partial(measure, *one) for one in product(PUBLISHED, CLUSTERS, PER_DEVICE)}
WHALE = Paper(
    "Whale",
    'Jia et al., USENIX ATC 2022, "Whale: Efficient Giant Model Training over Heterogeneous GPUs", arXiv:2011.09208',
    SETTINGS,
    NOT_KNOWN,
    NOTES,
    (table(HYBRID, COLUMNS, _CASES), table(CLASSIFIER, LAYOUTS, [row_name(count, 50, 32) for count in PUBLISHED])),
    _CASES,
)
