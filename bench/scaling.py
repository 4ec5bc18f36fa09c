"""Plan time against depth, devices and mesh axes, as a figure; against depth also as `autopar.plan` plans.

    python -m bench.scaling [--rows 'axes'] [--resume] [--repeat 1]

One model throughout, Llama-3 8B on H100 nodes, planned in a process of its own for every point: in the figure with
sequences of 8192 and without a memory limit, so that every depth has a plan without stages and microbatches.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import matplotlib
from rich.console import Console
from rich.progress import track

from bench.report import RESULTS, Cells, Row, Table, add, load
from bench.rows import parser, selected
from bench.search import mib, seconds
from bench.spawn import measured
from bench.suite import Case

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

_BASE = Case("llama3-8b", "h100", "8x8", 64, 8192, is_limited=False)


@dataclass(frozen=True)
class Sweep:
    """One panel: `xs[i]` is what is varied in `cases[i]`."""

    title: str
    label: str
    xs: tuple[int, ...]
    cases: tuple[Case, ...]
    setting: str

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of the points."""
        return tuple(f"{x} {self.label}" for x in self.xs)


_DEPTHS = (12, 24, 48, 96, 192)
_DEVICES = (8, 32, 128, 512, 2048, 8192, 16384)
_MESHES = ("64", "8x8", "4x4x4", "2x2x4x4")

SWEEPS = (
    Sweep("depth", "layers", _DEPTHS, tuple(replace(_BASE, layers=n) for n in _DEPTHS), "64 devices, mesh 8x8"),
    Sweep(
        "devices",
        "devices",
        _DEVICES,
        tuple(replace(_BASE, mesh=f"{n // 8}x8", batch=n) for n in _DEVICES),
        "32 layers, mesh n/8 x 8",
    ),
    Sweep(
        "axes",
        "mesh axes",
        (1, 2, 3, 4),
        tuple(replace(_BASE, mesh=f"a0={mesh}" if mesh == "64" else mesh) for mesh in _MESHES),
        "32 layers, 64 devices",
    ),
)


@dataclass(frozen=True)
class Line:
    """A part of the time, as it is drawn."""

    label: str
    color: str
    width: float


# Dark to light and thick to thin, so that the three are told apart without colour too.
LINES = (Line("model to plan", "#1b1b1b", 2.2), Line("trace", "#8a8a8a", 1.6), Line("search", "#0b62a4", 1.6))


def parts_of(row: Row) -> tuple[float, float, float]:
    """Seconds of each of `LINES`."""
    return row["plan_s"], row["times_s"]["trace"], row["times_s"]["search"]


def draw(rows: Mapping[str, Sequence[Row]], path: str) -> None:
    """A panel a sweep on common log-log scales, each line named where it ends, with the slope of a time that grows as
    what is varied.
    """
    sweeps = [sweep for sweep in SWEEPS if sweep.title in rows]
    size = (4.1 * len(sweeps), 3.9)
    figure, panels = plt.subplots(1, len(sweeps), figsize=size, sharey=True, layout="constrained")
    for sweep, panel in zip(sweeps, panels):
        _draw_panel(panel, sweep, rows[sweep.title])
    panels[0].set_ylabel("seconds")
    figure.suptitle("Planning Llama-3 8B, sequence 8192, on H100 nodes", x=0.01, ha="left", fontsize=12, weight="bold")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _draw_panel(panel: Axes, sweep: Sweep, rows: Sequence[Row]) -> None:
    xs = [row["x"] for row in rows]
    times = list(zip(*(parts_of(row) for row in rows)))
    for line, ys in zip(LINES, times):
        panel.plot(xs, ys, color=line.color, linewidth=line.width, marker="o", markersize=4, clip_on=False)
    for line, y in zip(LINES, _apart([ys[-1] for ys in times])):
        panel.annotate(
            line.label,
            (xs[-1], y),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=line.color,
            fontsize=9,
        )
    _draw_slope(panel, xs, max(times[0]))
    panel.set(xscale="log", yscale="log", xlabel=sweep.label, xlim=(xs[0] / 1.1, xs[-1] * 1.1))
    panel.set_title(f"{sweep.title}: {sweep.setting}", loc="left", fontsize=10)
    panel.xaxis.set_major_locator(FixedLocator(xs))
    panel.xaxis.set_minor_locator(NullLocator())
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    panel.xaxis.set_major_formatter(plain)
    panel.yaxis.set_major_formatter(plain)
    panel.tick_params(axis="x", labelsize=8, rotation=0 if len(xs) < 6 else 45)
    panel.grid(axis="y", color="#e5e5e5", linewidth=0.7)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_slope(panel: Axes, xs: list[int], top: float) -> None:
    """A short dashed line of slope 1 above the times."""
    ratio = min(4.0, (xs[-1] / xs[0]) ** 0.5)
    ends = (xs[0], xs[0] * ratio), (1.6 * top, 1.6 * top * ratio)
    panel.plot(*ends, color="#b0b0b0", linewidth=1, linestyle=(0, (4, 3)))
    panel.annotate(
        "slope 1",
        (ends[0][1], ends[1][1]),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color="#808080",
        fontsize=8,
    )


def _apart(ys: list[float], least_ratio: float = 1.6) -> list[float]:
    """`ys` moved up where labels would lie on one another.

    >>> _apart([1.0, 1.0, 8.0], 2.0)
    [1.0, 2.0, 8.0]
    """
    moved = dict.fromkeys(range(len(ys)), 0.0)
    lowest = 0.0
    for index in sorted(moved, key=lambda i: ys[i]):
        moved[index] = max(ys[index], lowest * least_ratio)
        lowest = moved[index]
    return list(moved.values())


def cells(row: Row) -> Iterable[Cells]:
    """The numbers behind one point."""
    times = (*map(seconds, parts_of(row)), seconds(row["times_s"]["price"]))
    yield str(row["x"]), row["mesh"], *times, f"{row['gap']:.1e}", mib(row["peak_bytes"])


def _table(sweep: Sweep) -> Table:
    header = (sweep.label, "mesh", *(f"{line.label}, s" for line in LINES), "price, s", "gap", "peak, MiB")
    return Table(
        sweep.title,
        f"llama3-8b, sequence 8192, on h100 without a memory limit; {sweep.setting}.",
        header,
        sweep.rows,
        cells,
    )


_DEPTHS_AS_PLANNED = (8, 32, 126, 512)
AS_PLANNED = {
    f"{layers} layers, {memory}": replace(
        _BASE, sequence=4096, layers=layers, is_limited=memory == "limited", time_limit_s=90.0
    )
    for memory in ("ample", "limited")
    for layers in _DEPTHS_AS_PLANNED
}


def depth_cells(row: Row) -> Iterable[Cells]:
    """The CPU seconds of one plan."""
    times, memory = row["times_s"], "limited" if row["is_limited"] else "ample"
    used = (times["trace"] + times["plan"], times["trace"], times["plan"], times["peaks"])
    plan = (row["mesh"], row["schedule"], f"{row['step_s'] * 1e3:.0f}", f"{row['memory_bytes'] / 2**30:.1f}")
    yield str(row["layers"]), memory, *plan, f"{row['gap']:.1e}", *map(seconds, used)


_PLANNED = Table(
    "depth as planned",
    "llama3-8b, 64 x 4096 tokens, on h100, mesh 8x8, as `autopar.plan` plans: microbatches and activation checkpointing"
    " where they gain, the peak of memory checked. CPU seconds, child processes included, in a process that has planned"
    " two layers before. With memory limited the limit is that of the devices: 8 layers do not fill it, from 32 on it"
    " binds; from 126 on nothing fits in one pass without activation checkpointing.",
    (
        "layers",
        "memory",
        "mesh",
        "schedule",
        "step, ms",
        "estimate, GiB",
        "gap",
        "trace and plan, CPU s",
        "trace",
        "plan",
        "of it peaks",
    ),
    tuple(AS_PLANNED),
    depth_cells,
)
TABLES = (*map(_table, SWEEPS), _PLANNED)


def main(arguments: list[str] | None = None) -> None:
    """Measure, save after each point, and draw; RuntimeError if a point cannot be measured."""
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=1, help="times are medians of so many runs")
    settings = options.parse_args(arguments)
    wanted = selected(TABLES, settings, "scaling")
    points = [
        (sweep.title, "whole", *point) for sweep in SWEEPS for point in zip(sweep.rows, sweep.xs, sweep.cases)
    ] + [(_PLANNED.title, "depth", name, case.layers, case) for name, case in AS_PLANNED.items()]
    points = [point for point in points if point[2] in wanted[point[0]]]
    for title, kind, name, x, case in track(points, "scaling", console=Console(stderr=True)):
        row = {"row": name, "x": x, **asdict(case), **measured(kind, case, repeat=settings.repeat)}
        if "error" in row:
            raise RuntimeError(f"{title} {x}: {row['error']}")
        add("scaling", TABLES, {title: [row]}, {"repeat": settings.repeat})
    draw(load("scaling"), str(RESULTS / "scaling.png"))
    print("written to bench/results/scaling.md, scaling.json and scaling.png")


if __name__ == "__main__":
    main()
