"""How a model scales: the best plan of each number of devices, with its speed, its memory and what it costs."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from autopar.answers.step_terms import AnyPlan
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.cluster.presets import datasheet_share
from autopar.costmodel.roofline import products_s
from autopar.explain.common_text import table
from autopar.ir.graph import Graph, Op
from autopar.plans.plan import Plan
from autopar.sbp.analysis.sequence_dim import batch_arguments
from autopar.units import format_bytes, format_seconds

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """The best plan of `model` with a global `batch` on so many `devices` of `cluster`.

    `plan`: its mesh, and its schedule if it has stages. `step_s`, `lower_bound_s`: predicted seconds. `tokens`: of a
    step, 0 where samples are no sequences of tokens. `mfu`: flop/s of the model, without recomputation, over the peak
    of all devices, the datasheet's for presets. `memory_bytes`: of the fullest device. `cost_per_million`: for a
    million tokens, or samples where there are none, in the currency of the price; NaN without a price. `error`: why
    there is no plan; all figures are NaN then.
    """

    model: str
    cluster: str
    devices: int
    batch: int
    tokens: int
    plan: str = ""
    step_s: float = math.nan
    lower_bound_s: float = math.nan
    samples_per_s: float = math.nan
    tokens_per_s: float = math.nan
    mfu: float = math.nan
    memory_bytes: float = math.nan
    cost_per_million: float = math.nan
    error: str = ""


def point_of(model: str, plan: AnyPlan, price_per_hour: float = math.nan) -> ScalingPoint:
    """The point of a plan. `price_per_hour`: of a device."""
    batch, tokens = batch_of(plan.graph)
    devices, step_s = plan.mesh.num_devices, plan.step_s
    schedule = "" if isinstance(plan, Plan) else f"; {plan.schedule.name}, m={plan.schedule.num_microbatches}"
    a_million_s = step_s * 1e6 / (tokens or batch or 1)
    return ScalingPoint(
        model=model,
        cluster=plan.cluster.name,
        devices=devices,
        batch=batch,
        tokens=tokens,
        plan=f"{plan.mesh}{schedule}",
        step_s=step_s,
        lower_bound_s=plan.lower_bound_s,
        samples_per_s=batch / step_s,
        tokens_per_s=tokens / step_s,
        mfu=peak_s(plan.graph, plan.cluster) / (devices * step_s),
        memory_bytes=max(plan.peak_bytes or plan.memory_bytes),
        cost_per_million=devices * price_per_hour * a_million_s / _HOUR_S,
    )


def batch_of(graph: Graph) -> tuple[int, int]:
    """(samples, tokens) of a step: the size of the arguments' batch dim, and of the first argument of token ids."""
    arguments = batch_arguments(graph)
    if not arguments:
        return 0, 0
    ids = [item for item in arguments if not item.value.dtype.is_floating_point and len(item.value.shape) == 2]
    return arguments[0].value.shape[0], math.prod(ids[0].value.shape) if ids else 0


def peak_s(graph: Graph, cluster: Cluster) -> float:
    """Seconds that the products of forward and backward take on one device at its peak rate."""
    known: dict[Op, float] = {}
    total = 0.0
    for op in graph.ops:
        key = op.nameless
        if key not in known:
            known[key] = products_s(op, cluster)
        total += known[key]
    return total * datasheet_share(cluster)


def format_points(points: Sequence[ScalingPoint]) -> str:
    """A table of the points, with the efficiency of each beside the first of its cluster and batch for each device."""
    lines = []
    for point in points:
        if point.error:
            lines.append([point.cluster, str(point.devices), str(point.batch), point.error])
            continue
        lines.append(
            [
                point.cluster,
                str(point.devices),
                str(point.batch),
                point.plan,
                format_seconds(point.step_s),
                f"{1 - point.lower_bound_s / point.step_s:.1%}",
                f"{point.samples_per_s:.4g}",
                f"{point.tokens_per_s:.4g}" if point.tokens else "",
                f"{point.mfu:.1%}",
                f"{efficiency(point, points):.0%}",
                format_bytes(point.memory_bytes),
                "" if math.isnan(point.cost_per_million) else f"{point.cost_per_million:.4g}",
            ]
        )
    what = "tokens" if any(point.tokens for point in points) else "samples"
    headers = [
        "cluster",
        "devices",
        "batch",
        "plan",
        "step",
        "gap",
        "samples/s",
        "tokens/s",
        "MFU",
        "scaling",
        "memory",
    ]
    return table(lines, [*headers, f"cost, 10^6 {what}"])


def efficiency(point: ScalingPoint, points: Iterable[ScalingPoint]) -> float:
    """Samples a second and device, over those of the fewest devices that are planned on this cluster."""
    same = [each for each in points if each.cluster == point.cluster and not each.error]
    least = min(same, key=lambda each: (each.devices, each.batch))
    return (point.samples_per_s / point.devices) / (least.samples_per_s / least.devices)


def points_json(points: Sequence[ScalingPoint]) -> str:
    """The points as a JSON list; null for figures that there are none of."""
    return json.dumps([_plain(point) for point in points], indent=1)


def _plain(point: ScalingPoint) -> Mapping[str, object]:
    return {key: None if isinstance(x, float) and math.isnan(x) else x for key, x in asdict(point).items()}


def points_csv(points: Sequence[ScalingPoint]) -> str:
    """The points as CSV, which `autopar schedule` reads; those without a plan are left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(ScalingPoint.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if x is None else x for key, x in _plain(p).items()} for p in points if not p.error)
    return text.getvalue()
