"""A report as text for people."""

from collections.abc import Iterable

from tabulate import tabulate

from autopar.explain.report import CollectiveRow, InputRow, OpRow, Report

MOST_UNDIVIDED = 20  # lines; the JSON has them all


def format_report(report: Report) -> str:
    """All sections, in a fixed order; the same plan gives the same text."""
    sections = [_head(report), _ops(report), _inputs(report), _collectives(report), _memory(report), _time(report), _hand(report)]
    return "\n\n".join(section for section in (*sections, _without_rule(report), _not_divided(report), _timings(report)) if section)


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.00125)
    '1.25 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1.0:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_bytes(num_bytes: float) -> str:
    """
    >>> format_bytes(3 * 2**20)
    '3 MiB'
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _head(report: Report) -> str:
    return "\n".join(
        [
            f"Plan for mesh {report.mesh} on cluster {report.cluster} ({report.cluster_source}), optimizer {report.optimizer}.",
            "Placements: S(d) split along dim d, P pending sum, B whole, B* whole with its gradient a pending sum; one a mesh axis.",
            f"Step {format_seconds(report.step_s)}; no plan takes less than {format_seconds(report.lower_bound_s)} (gap {report.gap:.1%}).",
        ]
    )


def _ops(report: Report) -> str:
    shown = [row for row in report.ops if not row.is_quiet_view]
    note = f"Ops ({len(report.ops) - len(shown)} views that follow their input without communication are left out):"
    axes = [f"on {part}" for part in report.mesh.split(",")]
    return note + "\n" + tabulate([_op_line(row) for row in shown], ["op", "x", *axes, "forward", "backward", "from"], disable_numparse=True)


def _op_line(row: OpRow) -> list[str]:
    where = " ".join(part for part in (row.module, row.line) if part)
    name = f"%{row.name}: {row.target.removeprefix('aten.')}"
    return [name, str(row.count), *row.signatures, _cell(row.collectives, "forward"), _cell(row.collectives, "backward"), where]


def _cell(rows: Iterable[CollectiveRow], phase: str) -> str:
    return "\n".join(
        f"{row.count} {row.kind} {row.axis} {format_bytes(row.num_bytes)}, {format_seconds(row.time_s)}" for row in rows if row.phase == phase
    )


def _inputs(report: Report) -> str:
    lines = [_input_line(row) for row in report.inputs]
    return "Parameters, buffers, constants and arguments:\n" + tabulate(
        lines, ["name", "x", "kind", "value", "layout", "forward", "backward"], disable_numparse=True
    )


def _input_line(row: InputRow) -> list[str]:
    return [row.fqn, str(row.count), row.kind, row.value, row.layout, _cell(row.collectives, "forward"), _cell(row.collectives, "backward")]


def _collectives(report: Report) -> str:
    lines = [[row.phase, row.axis, row.kind, str(row.count), format_bytes(row.num_bytes), format_seconds(row.time_s)] for row in report.totals]
    if not lines:
        return "Collectives: none."
    return "Collectives a step:\n" + tabulate(lines, ["phase", "axis", "kind", "number", "bytes", "time"], disable_numparse=True)


def _memory(report: Report) -> str:
    total = sum(report.memory_bytes.values())
    lines = [[kind, format_bytes(size)] for kind, size in (*report.memory_bytes.items(), ("all", total))]
    limit = "" if report.memory_limit_bytes is None else f" (limit {format_bytes(report.memory_limit_bytes)})"
    return f"Memory a device{limit}:\n" + tabulate(lines, ["kind", "bytes"], disable_numparse=True)


def _time(report: Report) -> str:
    lines = [[kind, format_seconds(seconds)] for kind, seconds in (*report.time_s.items(), ("step", report.step_s))]
    return "Time of a step:\n" + tabulate(lines, ["kind", "time"], disable_numparse=True)


def _hand(report: Report) -> str:
    if not report.hand:
        return ""
    here = ["this plan", format_seconds(report.step_s), "1.00", format_bytes(sum(report.memory_bytes.values()))]
    others = [
        [name, format_seconds(cost["step_s"]), f"{cost['step_s'] / report.step_s:.2f}" if report.step_s else "-", format_bytes(cost["memory_bytes"])]
        for name, cost in report.hand.items()
    ]
    return "Beside plans written by hand, priced alike:\n" + tabulate([here, *others], ["plan", "step", "ratio", "memory"], disable_numparse=True)


def _without_rule(report: Report) -> str:
    if not report.without_rule:
        return "Every op has a rule."
    targets = {row.name: row.target for row in report.ops}
    lines = [[f"%{name}", targets[name], format_seconds(seconds)] for name, seconds in report.without_rule.items()]
    return "Whole on every device for want of a rule:\n" + tabulate(lines, ["op", "target", "costs a step"], disable_numparse=True)


def _not_divided(report: Report) -> str:
    if not report.not_divided:
        return "Every mesh axis divides every dim it could split."
    lines = [[row["axis"], row["name"], str(row["dim"]), str(row["size"])] for row in report.not_divided]
    rest = f"\n... and {len(lines) - MOST_UNDIVIDED} more, all in the JSON" if len(lines) > MOST_UNDIVIDED else ""
    table = tabulate(lines[:MOST_UNDIVIDED], ["axis", "of", "dim", "size"], disable_numparse=True)
    return "Never split, because the axis does not divide the dim:\n" + table + rest


def _timings(report: Report) -> str:
    if not report.timings_s:
        return ""
    return "Planning: " + ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in report.timings_s.items()) + "."
