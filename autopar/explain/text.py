"""A report as text."""

from collections.abc import Iterable, Iterator

from autopar.explain.common_text import hand_table, on_host_lines, origin, step_line, table, timings_line, title, unfit
from autopar.explain.group_rows import format_groups
from autopar.explain.precision_text import precision_lines
from autopar.explain.report import CollectiveRow, GatheredOutputs, InputRow, OpRow, Report
from autopar.ir.print_graph import printable
from autopar.plans.serialise import HandCosts
from autopar.units import format_bytes, format_seconds

MOST_UNDIVIDED = 20  # lines; the JSON has them all
MOST_WHOLE = 10
MOST_FOUND = 160  # characters of what was discovered of an op; the JSON has all


def format_report(report: Report) -> str:
    """The text of a report, in sections of fixed order; the same plan gives the same text."""
    sections = [_head(report), _ops(report), _inputs(report), _collectives(report), _memory(report), _time(report)]
    remarks = [
        format_groups(report.groups),
        _hand(report),
        _meshes(report),
        _without_rule(report),
        _not_divided(report),
        _stayed_whole(report),
        timings_line(report.timings_s),
    ]
    return "\n\n".join(section for section in (*sections, *remarks) if section)


def _head(report: Report) -> str:
    finder = f"found by {report.found_by}" if report.found_by else ""
    least = f"no {report.bound_of} takes less than {format_seconds(report.lower_bound_s)} (gap {report.gap:.1%})"
    bound = least if report.lower_bound_s else "no lower bound"
    return "\n".join(
        [
            title(report.mesh, report.cluster, report.cluster_source, report.optimizer),
            "Placements by mesh axis: S(d) split along dim d, P pending sum, B whole"
            + (", B* whole with its gradient a pending sum." if report.trains else "."),
            *_of_own_tokens(report),
            step_line(report.step_s, finder, bound, is_from_file=report.is_from_file),
            *_gathered_outputs(report.gathered_outputs, trains=report.trains),
            *precision_lines(report.precision),
            *report.notes,
            *on_host_lines(len(report.state_on_host), report.state_on_host_bytes),
        ]
    )


def _of_own_tokens(report: Report) -> Iterator[str]:
    if any("L" in signature for row in report.ops for signature in row.signatures):
        yield "L: what each device has of its own tokens, in its own order (L(d)) or count (L)."
    if any("E(" in signature for row in report.ops for signature in row.signatures):
        yield "E(d): the rows of each device's own experts, sent to it by all devices."


def _gathered_outputs(gathered: GatheredOutputs, *, trains: bool) -> Iterator[str]:
    if gathered.count:
        each = f"{gathered.count} split outputs" if gathered.count > 1 else "a split output"
        yield (
            f"A call of model(...) gathers {each}, {format_bytes(gathered.num_bytes)} on every device in"
            f" {format_seconds(gathered.time_s)}; {'train_step does not, nor does ' if trains else 'not so with '}"
            'outputs="sharded".'
        )


def _ops(report: Report) -> str:
    shown = [row for row in report.ops if not row.is_quiet_view]
    note = f"Ops ({len(report.ops) - len(shown)} views that follow their input without communication are left out):"
    axes = [f"on {part}" for part in report.mesh.split(",")]
    return (
        note + "\n" + table([_op_line(row) for row in shown], ["op", "copies", *axes, "collectives per step", "source"])
    )


def _op_line(row: OpRow) -> list[str]:
    where = printable(" ".join(part for part in (row.module, row.line) if part))
    return [_name(row), str(row.count), *row.signatures, _cell(row.collectives), where]


def _name(row: OpRow) -> str:
    """The op's name, with its target if the name does not show it."""
    called = row.target.removeprefix("aten.").removesuffix(".default")
    return f"%{row.name}" if row.name.startswith(called.split(".")[0]) else f"%{row.name}: {called}"


def _cell(rows: Iterable[CollectiveRow]) -> str:
    return "\n".join(
        f"{row.phase:8} {row.count} {row.kind} {row.axis} {format_bytes(row.num_bytes)}, {format_seconds(row.time_s)}"
        for row in rows
    )


def _inputs(report: Report) -> str:
    lines = [_input_line(row) for row in report.inputs]
    headers = ["name", "copies", "kind", "value", "layout", "collectives per step"]
    return (
        "Parameters, buffers, constants and arguments (a bucket of gradients is listed at its first parameter):\n"
        + table(lines, headers)
    )


def _input_line(row: InputRow) -> list[str]:
    return [printable(row.fqn), str(row.count), row.kind, row.value, row.layout, _cell(row.collectives)]


def _collectives(report: Report) -> str:
    lines = [
        [
            r.phase,
            r.axis,
            f"{r.kind}, {r.algorithm}" if r.algorithm else r.kind,
            str(r.count),
            format_bytes(r.num_bytes),
            format_seconds(r.time_s),
        ]
        for r in report.totals
    ]
    if not lines:
        return "Collectives: none."
    return "Collectives per step:\n" + table(lines, ["phase", "axis", "kind", "number", "bytes", "time"])


def _memory(report: Report) -> str:
    total = sum(report.memory_bytes.values())
    peak = total if report.peak_bytes is None else report.peak_bytes
    most = total if report.is_from_file else peak
    # at the op with the largest transient, gradients of what its backward has not reached yet are not there
    sizes = {kind if size >= 0 else f"{kind}, less later gradients": size for kind, size in report.memory_bytes.items()}
    lines = [[kind, format_bytes(size)] for kind, size in (*sizes.items(), ("total", total))]
    claim = origin(is_from_file=report.is_from_file)
    lines += [] if peak == total else [[f"peak, in a dry run of the program{claim}", format_bytes(peak)]]
    limit = (
        ""
        if report.memory_limit_bytes is None
        else f" (limit {format_bytes(report.memory_limit_bytes)}{unfit(most, report.memory_limit_bytes)})"
    )
    return f"Memory per device{limit}:\n" + table(lines, ["kind", "bytes"])


def _time(report: Report) -> str:
    lines = [[kind, format_seconds(seconds)] for kind, seconds in (*report.time_s.items(), ("step", report.step_s))]
    return "Time per step:\n" + table(lines, ["kind", "time"])


def _hand(report: Report) -> str:
    here = HandCosts(report.step_s, sum(report.memory_bytes.values()))
    return hand_table(report.hand, here, report.memory_limit_bytes, is_from_file=report.is_from_file)


def _meshes(report: Report) -> str:
    if len(report.meshes_s) < 2:
        return ""
    lines = [[mesh, format_seconds(cost_s)] for mesh, cost_s in report.meshes_s.items()]
    return "Meshes searched (n: nodes, d: devices within a node):\n" + table(lines, ["mesh", "best step"])


def _without_rule(report: Report) -> str:
    if not report.without_rule:
        return "Every op has a sharding rule."
    targets = {row.name: row.target for row in report.ops}
    lines = [
        [
            f"%{name}",
            targets[name],
            format_seconds(seconds),
            printable(report.discovered.get(name, "whole"), MOST_FOUND),
        ]
        for name, seconds in report.without_rule.items()
    ]
    return "Ops without a sharding rule, and the ways to split them that were discovered by running samples:\n" + table(
        lines, ["op", "target", "time per step", "discovered"]
    )


def _not_divided(report: Report) -> str:
    if not report.not_divided:
        if not report.uneven:
            return "The size of every mesh axis divides every dim that it could split."
        return _uneven(report)
    lines = [
        [
            row["axis"],
            printable(row["name"]),
            str(row["dim"]),
            str(row["size"] or ""),
            " or ".join(map(str, row["degrees"])),
            format_seconds(row["time_s"]) if row["time_s"] else "",
        ]
        for row in report.not_divided
    ]
    rest = f"\n... and {len(lines) - MOST_UNDIVIDED} more, all in the JSON" if len(lines) > MOST_UNDIVIDED else ""
    rows = table(lines[:MOST_UNDIVIDED], ["axis", "tensor", "dim", "size", "next degrees", "costs a step at most"])
    uneven = f"\n{_uneven(report)}" if report.uneven else ""
    return "Dims never split along an axis, because its size does not divide theirs:\n" + rows + rest + uneven


def _uneven(report: Report) -> str:
    names = ", ".join(map(printable, report.uneven[:MOST_UNDIVIDED]))
    more = f" and {len(report.uneven) - MOST_UNDIVIDED} more" if len(report.uneven) > MOST_UNDIVIDED else ""
    longer = (
        f" Ops take {format_seconds(report.uneven_s)} a step longer than on equal parts." if report.uneven_s else ""
    )
    what = "Split in parts that differ in size, priced as the first rank's, the largest, or in shares"
    return f"{what}: {names}{more}.{longer}"


def _stayed_whole(report: Report) -> str:
    if not report.stayed_whole:
        return ""
    lines = [
        [
            printable(row.name),
            str(row.count),
            row.axes,
            format_bytes(row.num_bytes) if row.num_bytes else "",
            format_seconds(row.time_s) if row.time_s else "",
        ]
        for row in report.stayed_whole[:MOST_WHOLE]
    ]
    more = len(report.stayed_whole) - len(lines)
    rest = f"\n... and {more} more, all in the JSON" if more else ""
    headers = ["tensor or op", "copies", "whole on", "memory of each device", "repeated time of a step"]
    return (
        "Whole although large, and what a split would save at most (--why NAME tells why):\n"
        + table(lines, headers)
        + rest
    )
