"""A plan and its successors on other devices, as text and as JSON."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from autopar.answers.comparison_text import format_details
from autopar.answers.moved_state import DeviceState, MovedState, StateBytes
from autopar.answers.replan import Replanned, Successor
from autopar.answers.step_terms import AnyPlan
from autopar.explain.common_text import table
from autopar.ir.print_graph import printable
from autopar.plans.plan import Plan
from autopar.units import format_bytes, format_seconds

MOST_DEVICES = 16  # rows of devices; the JSON has them all
_HEADERS = ["", "before", "after", "after, layouts kept"]


def format_replanned(found: Replanned) -> str:
    """The plans side by side, the state that moves, when that is paid, and the decisions that differ."""
    parts = (_plans(found), _paid(found), _gone(found), _kinds(found.after.state), _devices(found.after.state))
    return "\n\n".join([*filter(None, parts), format_details(found.details)])


def replanned_json(found: Replanned) -> dict[str, Any]:
    """The content of `format_replanned` as plain dicts, lists, strings and numbers."""
    paid = found.weighed.paid_after_steps
    return {
        "before": _plan_json(found.before),
        "after": _successor_json(found.after),
        "closest": found.closest and _successor_json(found.closest),
        "why_none": found.why_none,
        "gain_s": found.weighed.gain_s,
        "more_s": found.weighed.more_s,
        "paid_after_steps": None if math.isinf(paid) else paid,
        "details": found.details.as_json(),
    }


def _plan_json(plan: AnyPlan) -> dict[str, Any]:
    told = {"mesh": str(plan.mesh), "schedule": _schedule(plan), "step_s": plan.step_s, "gap": plan.gap}
    return told | {"found_by": plan.found_by, "memory_bytes": max(plan.memory_bytes), "peak_bytes": plan.peak_bytes}


def _successor_json(found: Successor) -> dict[str, Any]:
    return _plan_json(found.plan) | {"state": _state_json(found.state), "read_s": found.read_s}


def _state_json(state: MovedState) -> dict[str, Any]:
    return {
        "seconds": state.seconds,
        "gone": state.gone,
        "lost": state.lost,
        "kinds": {kind: asdict(each) for kind, each in state.kinds.items()},
        "devices": [asdict(device) for device in state.devices],
    }


def _schedule(plan: AnyPlan) -> str:
    return "" if isinstance(plan, Plan) else str(plan.schedule)


def _plans(found: Replanned) -> str:
    successors = [found.after, *([found.closest] if found.closest else [])]
    plans = [found.before, *(each.plan for each in successors)]
    lines = [
        ["mesh", *(str(plan.mesh) for plan in plans)],
        ["schedule", *map(_schedule, plans)],
        ["step", *(format_seconds(plan.step_s) for plan in plans)],
        ["gap to the lower bound", *(f"{plan.gap:.1%}" for plan in plans)],
        ["found by", *(printable(plan.found_by) for plan in plans)],
        ["peak of a device", *(format_bytes(max(plan.peak_bytes or plan.memory_bytes)) for plan in plans)],
        ["moved, all devices", "", *(format_bytes(each.state.total.moved) for each in successors)],
        ["moved, most of a device", "", *(format_bytes(each.state.most_moved) for each in successors)],
        ["from other devices", "", *(format_bytes(each.state.total.received) for each in successors)],
        ["from a checkpoint", "", *(format_bytes(each.state.total.read) for each in successors)],
        ["time on the links", "", *(format_seconds(each.state.seconds) for each in successors)],
        ["time of reading", "", *(format_seconds(each.read_s) if each.read_s else "" for each in successors)],
    ]
    devices = f"{found.before.mesh.num_devices} devices before, {found.after.plan.mesh.num_devices} after"
    none = "" if found.closest else f"\nNo plan keeps the layouts of the one before: {printable(found.why_none)}."
    shown = [line for line in lines if any(line[1:])]
    return f"Plan for {devices}, on cluster {printable(found.after.plan.cluster.name)}:\n" + (
        table(shown, _HEADERS[: len(plans) + 1]) + none
    )


def _paid(found: Replanned) -> str:
    if found.closest is None:
        return ""
    weighed = found.weighed
    if not weighed.gain_s and not weighed.more_s:
        return "The plan made anew and the one that keeps the layouts take the same."
    gain, more = (format_seconds(abs(each)) for each in (weighed.gain_s, weighed.more_s))
    step = f"A step of the plan made anew takes {gain} {'less' if weighed.gain_s >= 0 else 'more'}"
    move = f"moving the state to it {more} {'more' if weighed.more_s >= 0 else 'less'} than where layouts are kept"
    if math.isinf(weighed.paid_after_steps):
        return f"{step}, and {move}: take the plan that keeps the layouts."
    steps = math.ceil(weighed.paid_after_steps)
    return f"{step}, and {move}: " + (
        f"that is paid after {steps} step{'s' * (steps > 1)}." if steps else "it is the better one at once."
    )


def _gone(found: Replanned) -> str:
    state = found.after.state
    if not state.gone:
        return ""
    ranks = f"Gone: {_ranks(state.gone)} of the plan before."
    if not state.lost:
        return f"{ranks} All that they held others hold too."
    return (
        f"{ranks} {format_bytes(state.lost)} of the state nobody else held: it is read from the newest checkpoint, and"
        " the steps since then are lost."
        + " How long reading takes is not in the time above."
        * (not found.after.read_s)
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    runs = []
    for _, run in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        first, *_, last = [rank for _, rank in run] * 2
        runs.append(str(first) if first == last else f"{first}-{last}")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(runs)}"


def _kinds(state: MovedState) -> str:
    lines = [[kind, *_cells(each)] for kind, each in (*state.kinds.items(), ("total", state.total))]
    headers = ["state of all devices", "needed", "held already", "from other devices", "from a checkpoint"]
    return table(lines, headers)


def _cells(each: StateBytes) -> list[str]:
    return [format_bytes(number) for number in (each.needed, each.held, each.received, each.read)]


def _devices(state: MovedState) -> str:
    rows = list(_alike(state.devices))
    left = f"\nThe other {len(rows) - MOST_DEVICES} rows are in --json." * (len(rows) > MOST_DEVICES)
    headers = ["rank", "was", "held before", "needs", "held already", "from other devices", "from a checkpoint"]
    return table(rows[:MOST_DEVICES], headers) + left


def _alike(devices: tuple[DeviceState, ...]) -> Iterator[list[str]]:
    """A line for each run of devices that follow one another and are alike."""

    def kind(device: DeviceState) -> tuple:
        return device.before, device.state, device.was - device.rank if device.was >= 0 else None

    for (before, state, shift), run in itertools.groupby(devices, kind):
        first, *_, last = [device.rank for device in run] * 2
        ranks, was = ([str(end) for end in (first + by, last + by)] for by in (0, shift or 0))
        names = ["-".join(dict.fromkeys(each)) for each in (ranks, was)]
        yield [names[0], "new" if shift is None else names[1], format_bytes(before), *_cells(state)]
