"""Parts of text that plans with and without stages share."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from tabulate import tabulate

from autopar.costmodel.cluster.hardware import Cluster
from autopar.ir.print_graph import printable
from autopar.plans.serialise import HandCosts
from autopar.units import format_bytes, format_seconds

FROM_FILE = "From the plan's file"


def table(lines: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """The lines as a table with headers; numbers stay as written."""
    return tabulate(lines, headers, disable_numparse=True)


def title(mesh: str, cluster: str, source: str, optimizer: str) -> str:
    """The title of a plan's text; `source`: of the cluster's figures."""
    return f"Plan for mesh {mesh} on cluster {printable(cluster)} ({printable(source)}), optimizer {optimizer}."


def origin_of_figures(cluster: Cluster) -> str:
    """The origin of the cluster's figures; of a calibration its age, and what its error means for the choice."""
    calibration = cluster.calibration
    if calibration is None:
        return cluster.source
    error = f"fit error {calibration.fit_error:.1%} (worst {calibration.worst_error:.0%})"
    return f"{cluster.source}, {_age(calibration.date)}; {error}: plans whose prices are closer than that are a tie"


def _age(date: str) -> str:
    """The time since `date` (ISO 8601) in the largest unit in which it is at least 1."""
    try:
        then = datetime.fromisoformat(date)
    except ValueError:
        return "of unknown age"
    seconds = (datetime.now(UTC) - then.astimezone(UTC)).total_seconds()
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if count := int(seconds // length):
            return f"{count} {unit}{'s' * (count > 1)} ago" if count > 0 else "dated in the future"
    return "just now"


def step_line(step_s: float, finder: str, bound: str, *, is_from_file: bool) -> str:
    """The line with the step, how the plan was found, and its bound, marked as a claim if it is from a file."""
    step = f"Step {format_seconds(step_s)}"
    if is_from_file:
        return f"{step}. {FROM_FILE}, not verified by this run: {printable('; '.join(filter(None, (finder, bound))))}."
    return f"{', '.join(filter(None, (step, printable(finder))))}; {printable(bound)}."


def on_host_lines(num_parameters: int, num_bytes: int) -> Iterator[str]:
    """The line on how to offload the optimizer state of `num_parameters`, `num_bytes` of a device.

    None without state.
    """
    if num_parameters:
        yield (
            f"Optimizer state of {num_parameters} parameters, {format_bytes(num_bytes)} per device, is offloaded to the"
            " host: call autopar.offload_optimizer(optimizer, model) before training."
        )


def origin(*, is_from_file: bool) -> str:
    """A remark that a figure is a file's claim, or ""."""
    return f" ({FROM_FILE.lower()})" if is_from_file else ""


def hand_table(
    hand: Mapping[str, HandCosts], this_plan: HandCosts, limit_bytes: float | None, *, is_from_file: bool
) -> str:
    """The table of hand plans compared with this plan, marked if they exceed the memory limit; "" if there are none."""
    if not hand:
        return ""
    lines = []
    for name, costs in {"this plan": this_plan, **hand}.items():
        ratio = f"{costs.step_s / this_plan.step_s:.2f}" if this_plan.step_s else "-"
        memory = format_bytes(costs.memory_bytes) + unfit(costs.memory_bytes, limit_bytes)
        lines.append([printable(name), format_seconds(costs.step_s), ratio, memory])
    above = (
        f"{FROM_FILE}, compared with hand plans"
        if is_from_file
        else "Compared with hand plans, priced by the same cost model"
    )
    return f"{above}:\n{table(lines, ['plan', 'step', 'ratio', 'memory'])}"


def unfit(num_bytes: float, limit_bytes: float | None) -> str:
    """A remark that `num_bytes` exceed the limit (None: no limit), or ""."""
    return ", exceeds the limit" if limit_bytes is not None and num_bytes > limit_bytes else ""


def timings_line(timings_s: Mapping[str, float]) -> str:
    """The line with the time of each stage of planning."""
    spent = ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in timings_s.items())
    return f"Planning: {spent}." if spent else ""
