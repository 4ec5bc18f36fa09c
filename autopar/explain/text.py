"""A report as text for people."""

from collections.abc import Iterable, Mapping

from tabulate import tabulate

from autopar.explain.report import CollectiveRow, InputRow, OpRow, Report
from autopar.ir.print_graph import printable

MOST_UNDIVIDED = 20  # lines; the JSON has them all
FROM_FILE = "Taken from the plan's file"


def format_report(report: Report) -> str:
    """All sections, in a fixed order; the same plan gives the same text."""
    sections = [_head(report), _ops(report), _inputs(report), _collectives(report), _memory(report), _time(report)]
    remarks = [_hand(report), _meshes(report), _without_rule(report), _not_divided(report), _timings(report)]
    return "\n\n".join(section for section in (*sections, *remarks) if section)


def format_seconds(seconds: float) -> str:
    """A duration in the largest unit of which it has one.

    >>> format_seconds(0.00125)
    '1.25 ms'
    >>> format_seconds(0.99999)
    '1000 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1.0:
            return f"{_digits(seconds * scale)} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_bytes(num_bytes: float) -> str:
    """A size in binary units.

    >>> format_bytes(3 * 2**20), format_bytes(-1536)
    ('3 MiB', '-1.5 KiB')
    """
    if num_bytes < 0:
        return f"-{format_bytes(-num_bytes)}"
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{_digits(num_bytes / 1024**power)} {unit}"
    return f"{num_bytes:.0f} B"


def _digits(number: float) -> str:
    """Three digits, or as many as stand before the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def _head(report: Report) -> str:
    found = f"found by {report.found_by}" if report.found_by else ""
    least = f"no {report.bound_of} takes less than {format_seconds(report.lower_bound_s)} (gap {report.gap:.1%})"
    told = step_line(
        report.step_s, found, least if report.lower_bound_s else "no bound", is_from_file=report.is_from_file
    )
    cluster = f"{printable(report.cluster)} ({printable(report.cluster_source)})"
    return "\n".join(
        [
            f"Plan for mesh {report.mesh} on cluster {cluster}, optimizer {report.optimizer}.",
            (
                "Placements: S(d) split along dim d, P pending sum, B whole, B* whole with its gradient a pending sum;"
                " one a mesh axis."
            ),
            told,
            *report.notes,
            *([on_host_line(len(report.state_on_host), report.state_on_host_bytes)] if report.state_on_host else []),
        ]
    )


def step_line(step_s: float, found: str, bound: str, *, is_from_file: bool) -> str:
    """The step, what found the plan and what is proven of it; of a plan that was read from a file, that the file says
    so.
    """
    step = f"Step {format_seconds(step_s)}"
    if is_from_file:
        return f"{step}. {FROM_FILE}, not proven here: {printable('; '.join(filter(None, (found, bound))))}."
    return f"{', '.join(filter(None, (step, printable(found))))}; {printable(bound)}."


def on_host_line(num_parameters: int, num_bytes: int) -> str:
    """What is to be done about optimizer state that the plan has on the host."""
    return (
        f"Optimizer state of {num_parameters} parameters, {format_bytes(num_bytes)} a device, waits on the host: call "
        "autopar.offload_optimizer(optimizer, model) before training."
    )


def _ops(report: Report) -> str:
    shown = [row for row in report.ops if not row.is_quiet_view]
    note = f"Ops ({len(report.ops) - len(shown)} views that follow their input without communication are left out):"
    axes = [f"on {part}" for part in report.mesh.split(",")]
    return note + "\n" + _table([_op_line(row) for row in shown], ["op", "x", *axes, "collectives a step", "from"])


def _table(lines: list[list[str]], headers: list[str]) -> str:
    return tabulate(lines, headers, disable_numparse=True)


def _op_line(row: OpRow) -> list[str]:
    where = printable(" ".join(part for part in (row.module, row.line) if part))
    return [_name(row), str(row.count), *row.signatures, _cell(row.collectives), where]


def _name(row: OpRow) -> str:
    """The op's name, and what it calls where the name does not say so."""
    called = row.target.removeprefix("aten.").removesuffix(".default")
    return f"%{row.name}" if row.name.startswith(called.split(".")[0]) else f"%{row.name}: {called}"


def _cell(rows: Iterable[CollectiveRow]) -> str:
    return "\n".join(
        f"{row.phase:8} {row.count} {row.kind} {row.axis} {format_bytes(row.num_bytes)}, {format_seconds(row.time_s)}"
        for row in rows
    )


def _inputs(report: Report) -> str:
    lines = [_input_line(row) for row in report.inputs]
    headers = ["name", "x", "kind", "value", "layout", "collectives a step"]
    return (
        "Parameters, buffers, constants and arguments (gradients reduced together are at the first of them):\n"
        + _table(lines, headers)
    )


def _input_line(row: InputRow) -> list[str]:
    return [printable(row.fqn), str(row.count), row.kind, row.value, row.layout, _cell(row.collectives)]


def _collectives(report: Report) -> str:
    lines = [
        [r.phase, r.axis, r.kind, str(r.count), format_bytes(r.num_bytes), format_seconds(r.time_s)]
        for r in report.totals
    ]
    if not lines:
        return "Collectives: none."
    return "Collectives a step:\n" + _table(lines, ["phase", "axis", "kind", "number", "bytes", "time"])


def _memory(report: Report) -> str:
    total = sum(report.memory_bytes.values())
    peak = total if report.peak_bytes is None else report.peak_bytes
    most = total if report.is_from_file else peak
    lines = [[kind, format_bytes(size)] for kind, size in (*report.memory_bytes.items(), ("all", total))]
    origin = f" ({FROM_FILE.lower()})" if report.is_from_file else ""
    lines += [] if peak == total else [[f"at one time, as the program runs{origin}", format_bytes(peak)]]
    limit = (
        ""
        if report.memory_limit_bytes is None
        else f" (limit {format_bytes(report.memory_limit_bytes)}{_unfit(report, most)})"
    )
    return f"Memory a device{limit}:\n" + _table(lines, ["kind", "bytes"])


def _time(report: Report) -> str:
    lines = [[kind, format_seconds(seconds)] for kind, seconds in (*report.time_s.items(), ("step", report.step_s))]
    return "Time of a step:\n" + _table(lines, ["kind", "time"])


def _hand(report: Report) -> str:
    if not report.hand:
        return ""
    here = {"this plan": {"step_s": report.step_s, "memory_bytes": sum(report.memory_bytes.values())}}
    lines = [_hand_line(name, cost, report) for name, cost in (here | report.hand).items()]
    return hand_title(is_from_file=report.is_from_file) + _table(lines, ["plan", "step", "ratio", "memory"])


def hand_title(*, is_from_file: bool) -> str:
    """Above the table of plans by hand."""
    return (
        f"{FROM_FILE}, plans written by hand beside it:\n"
        if is_from_file
        else "Beside plans written by hand, priced alike:\n"
    )


def _meshes(report: Report) -> str:
    if len(report.meshes_s) < 2:
        return ""
    lines = [[mesh, format_seconds(cost_s)] for mesh, cost_s in report.meshes_s.items()]
    return "Meshes searched (n: nodes, d: devices of a node):\n" + _table(lines, ["mesh", "best step"])


def _hand_line(name: str, cost: Mapping[str, float], report: Report) -> list[str]:
    ratio = f"{cost['step_s'] / report.step_s:.2f}" if report.step_s else "-"
    memory = format_bytes(cost["memory_bytes"]) + _unfit(report, cost["memory_bytes"])
    return [printable(name), format_seconds(cost["step_s"]), ratio, memory]


def _unfit(report: Report, num_bytes: float) -> str:
    is_over = report.memory_limit_bytes is not None and num_bytes > report.memory_limit_bytes
    return ", does not fit" if is_over else ""


def _without_rule(report: Report) -> str:
    if not report.without_rule:
        return "Every op has a rule."
    targets = {row.name: row.target for row in report.ops}
    lines = [[f"%{name}", targets[name], format_seconds(seconds)] for name, seconds in report.without_rule.items()]
    return "Whole on every device for want of a rule:\n" + _table(lines, ["op", "target", "costs a step"])


def _not_divided(report: Report) -> str:
    if not report.not_divided:
        return "Every mesh axis divides every dim it could split."
    lines = [[row["axis"], printable(row["name"]), str(row["dim"]), str(row["size"])] for row in report.not_divided]
    rest = f"\n... and {len(lines) - MOST_UNDIVIDED} more, all in the JSON" if len(lines) > MOST_UNDIVIDED else ""
    table = _table(lines[:MOST_UNDIVIDED], ["axis", "of", "dim", "size"])
    return "Never split, because the axis does not divide the dim:\n" + table + rest


def _timings(report: Report) -> str:
    if not report.timings_s:
        return ""
    return (
        "Planning: "
        + ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in report.timings_s.items())
        + "."
    )
