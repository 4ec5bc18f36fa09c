"""What the texts of plans with and without stages have in common."""

from collections.abc import Iterator, Mapping, Sequence

from tabulate import tabulate

from autopar.ir.print_graph import printable
from autopar.plans.serialise import HandCosts
from autopar.units import format_bytes, format_seconds

FROM_FILE = "Taken from the plan's file"


def table(lines: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """The lines below their headers; numbers stay as they are written."""
    return tabulate(lines, headers, disable_numparse=True)


def title(mesh: str, cluster: str, source: str, optimizer: str) -> str:
    """What the plan is for; `source`: where the cluster's rates are from."""
    return f"Plan for mesh {mesh} on cluster {printable(cluster)} ({printable(source)}), optimizer {optimizer}."


def step_line(step_s: float, found: str, bound: str, *, is_from_file: bool) -> str:
    """The step, how the plan was found and what bound is proven; of a plan that was read from a file, that the file
    says so.
    """
    step = f"Step {format_seconds(step_s)}"
    if is_from_file:
        return f"{step}. {FROM_FILE}, not proven here: {printable('; '.join(filter(None, (found, bound))))}."
    return f"{', '.join(filter(None, (step, printable(found))))}; {printable(bound)}."


def on_host_lines(num_parameters: int, num_bytes: int) -> Iterator[str]:
    """How to offload the optimizer state of so many parameters, `num_bytes` of a device; none if there are none."""
    if num_parameters:
        yield (
            f"Optimizer state of {num_parameters} parameters, {format_bytes(num_bytes)} a device, waits on the host:"
            " call autopar.offload_optimizer(optimizer, model) before training."
        )


def origin(*, is_from_file: bool) -> str:
    """A remark that a number is a file's claim, or nothing."""
    return f" ({FROM_FILE.lower()})" if is_from_file else ""


def hand_table(
    hand: Mapping[str, HandCosts], this_plan: HandCosts, limit_bytes: float | None, *, is_from_file: bool
) -> str:
    """The hand plans beside this plan, and which of them exceed the memory limit; nothing if there are none."""
    if not hand:
        return ""
    lines = []
    for name, costs in {"this plan": this_plan, **hand}.items():
        ratio = f"{costs.step_s / this_plan.step_s:.2f}" if this_plan.step_s else "-"
        memory = format_bytes(costs.memory_bytes) + unfit(costs.memory_bytes, limit_bytes)
        lines.append([printable(name), format_seconds(costs.step_s), ratio, memory])
    above = (
        f"{FROM_FILE}, plans written by hand beside it"
        if is_from_file
        else "Beside plans written by hand, priced alike"
    )
    return f"{above}:\n{table(lines, ['plan', 'step', 'ratio', 'memory'])}"


def unfit(num_bytes: float, limit_bytes: float | None) -> str:
    """A remark that so many bytes exceed the limit, None for no limit, or nothing."""
    return ", does not fit" if limit_bytes is not None and num_bytes > limit_bytes else ""


def timings_line(timings_s: Mapping[str, float]) -> str:
    """How long each stage of planning took."""
    spent = ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in timings_s.items())
    return f"Planning: {spent}." if spent else ""
