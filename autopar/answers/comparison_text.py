"""A comparison of two plans as text."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.answers.compare_plans import ChangedRow, Comparison
from autopar.explain.common_text import table
from autopar.ir.print_graph import printable
from autopar.units import format_bytes, format_seconds

MOST_ROWS = 40  # the JSON has them all
_TIE = 1e-9  # seconds a step; prices are sums of floats


def format_comparison(found: Comparison) -> str:
    """Which plan is faster, and the details."""
    return f"{verdict(found)}\n\n{format_details(found)}"


def format_details(found: Comparison) -> str:
    """The facts that differ, time and memory by term, and the decisions that differ."""
    sections = (part(found) for part in (_facts, _time, _memory, _rows, _followed))
    return "\n\n".join(section for section in sections if section)


def verdict(found: Comparison) -> str:
    """One sentence: which plan is faster and by how much, or that they tie."""
    (a, b), (before, after) = found.names, found.step_s
    if abs(after - before) <= _TIE * max(before, after):
        return f"No difference: a tie; a step of {a} and of {b} takes {format_seconds(before)}."
    more = f"{format_seconds(abs(after - before))} {'more' if after > before else 'less'}"
    return (
        f"A step of {b} takes {more} than one of {a}: {format_seconds(after)}, {format_seconds(before)}"
        f" ({after / before:.3f} times)."
    )


def _facts(found: Comparison) -> str:
    lines = [[what, *map(printable, pair)] for what, pair in found.facts.items() if pair[0] != pair[1]]
    return table(lines, ["", *found.names]) if lines else ""


def _time(found: Comparison) -> str:
    return "Time of a step by term:\n" + _terms(found.terms_s, found.names, "step", format_seconds)


def _memory(found: Comparison) -> str:
    return "Memory of a device by the estimate:\n" + _terms(found.memory_bytes, found.names, "total", format_bytes)


def _terms(
    terms: Mapping[str, tuple[float, float]], names: tuple[str, str], total: str, text: Callable[[float], str]
) -> str:
    sums = sum(a for a, _ in terms.values()), sum(b for _, b in terms.values())
    lines = [[name, text(a), text(b), signed(b - a, text)] for name, (a, b) in (*terms.items(), (total, sums))]
    return table(lines, ["term", *names, f"{names[1]} - {names[0]}"])


def signed(change: float, text: Callable[[float], str]) -> str:
    """A change with its sign, "" if it is none.

    >>> signed(-0.002, format_seconds), signed(0.0, format_seconds)
    ('-2 ms', '')
    """
    return "" if not change else f"{'+' if change > 0 else '-'}{text(abs(change))}"


def _rows(found: Comparison) -> str:
    unmatched = [
        f"{number} ops or tensors only in {name}" for name, number in zip(found.names, found.num_unmatched) if number
    ]
    same = f"{found.num_same} decisions are the same" + "".join(f", {text}" for text in unmatched)
    if not found.rows:
        return f"No decision differs; {same}."
    shown = found.rows[:MOST_ROWS]
    left = f" The {len(found.rows) - MOST_ROWS} with the least change are left out." * (len(found.rows) > MOST_ROWS)
    lines = list(_lines(shown, found.names))
    headers = ["name", "copies", *found.names, "seconds a step"]
    return f"Decisions that differ ({same}).{left}\n" + table(lines, headers)


def _followed(found: Comparison) -> str:
    if not found.followed:
        return ""
    lines = [[name, copies, *terms] for name, copies, _, _, *terms in _lines(found.followed[:MOST_ROWS], found.names)]
    return "Same decision, other time:\n" + table(lines, ["name", "copies", "seconds a step"])


def _lines(rows: Iterable[ChangedRow], names: tuple[str, str]) -> Iterator[list[str]]:
    for row in rows:
        terms = "\n".join(f"{signed(change, format_seconds)} {term}" for term, change in row.changes_s.items())
        yield [printable(row.name), copies(row.copies), _layout(row.before), _layout(row.after), terms]


def _layout(text: str) -> str:
    return printable(text).replace("; ", "\n")


def copies(names: tuple[str, ...]) -> str:
    """The number of copies, and which, if their names differ in one number.

    >>> copies(("h.0.fc", "h.1.fc", "h.2.fc", "h.5.fc")), copies(("head",))
    ('4 (0-2, 5)', '1')
    """
    parts = [name.split(".") for name in names]
    differing = {at for row in parts for at, (one, first) in enumerate(zip(row, parts[0])) if one != first}
    if len(differing) != 1 or len({len(row) for row in parts}) > 1:
        return str(len(names))
    (at,) = differing
    numbers = [row[at] for row in parts]
    if not all(number.isdigit() for number in numbers):
        return str(len(names))
    return f"{len(names)} ({_ranges(sorted(map(int, numbers)))})"


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
