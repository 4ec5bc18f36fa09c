"""Plan time against depth, devices and mesh axes, as a figure.

    python -m bench.scaling [--repeat 3] [--quick]

One model throughout, Llama-3 8B with sequences of 8192 on H100 nodes, planned in a process of its own for
every point; without a memory limit, so that every depth has a plan.
"""

import argparse
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import matplotlib
from rich.console import Console
from rich.progress import track

from bench.report import RESULTS, Section, save_sections
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
    """One panel: `xs[i]` is what is varied in `cases[i]`; `quick`: how many of the first points a quick run takes."""

    title: str
    label: str
    xs: tuple[int, ...]
    cases: tuple[Case, ...]
    setting: str


_DEPTHS = (12, 24, 48, 96, 192)
_DEVICES = (8, 32, 128, 512, 2048, 8192, 16384)
_MESHES = ("64", "8x8", "4x4x4", "2x2x4x4")

SWEEPS = (
    Sweep("depth", "layers", _DEPTHS, tuple(replace(_BASE, layers=n) for n in _DEPTHS), "64 devices, mesh 8x8"),
    Sweep("devices", "devices", _DEVICES, tuple(replace(_BASE, mesh=f"{n // 8}x8", batch=n) for n in _DEVICES), "32 layers, mesh n/8 x 8"),
    Sweep("axes", "mesh axes", (1, 2, 3, 4), tuple(replace(_BASE, mesh=f"a0={mesh}" if mesh == "64" else mesh) for mesh in _MESHES),
          "32 layers, 64 devices"),
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A part of the time, as it is drawn."""

    label: str
    color: str
    width: float


# Dark to light and thick to thin, so that the three are told apart without colour too.
LINES = (Line("model to plan", "#1b1b1b", 2.2), Line("trace", "#8a8a8a", 1.6), Line("search", "#0b62a4", 1.6))


def parts_of(row: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds of each of `LINES`."""
    return row["plan_s"], row["times_s"]["trace"], row["times_s"]["search"]


def draw(rows: dict[str, list[dict[str, Any]]], path: str) -> None:
    """A panel a sweep on common log-log scales, each line named where it ends, with the slope of a time that grows as what is varied."""
    figure, panels = plt.subplots(1, len(rows), figsize=(4.1 * len(rows), 3.9), sharey=True, layout="constrained")
    for sweep, panel in zip([sweep for sweep in SWEEPS if sweep.title in rows], panels):
        _draw_panel(panel, sweep, rows[sweep.title])
    panels[0].set_ylabel("seconds")
    figure.suptitle("Planning Llama-3 8B, sequence 8192, on H100 nodes", x=0.01, ha="left", fontsize=12, weight="bold")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _draw_panel(panel: Axes, sweep: Sweep, rows: list[dict[str, Any]]) -> None:
    xs = [row["x"] for row in rows]
    times = list(zip(*(parts_of(row) for row in rows)))
    for line, ys in zip(LINES, times):
        panel.plot(xs, ys, color=line.color, linewidth=line.width, marker="o", markersize=4, clip_on=False)
    for line, y in zip(LINES, _apart([ys[-1] for ys in times])):
        panel.annotate(line.label, (xs[-1], y), xytext=(7, 0), textcoords="offset points", va="center", color=line.color, fontsize=9)
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
    panel.annotate("slope 1", (ends[0][1], ends[1][1]), xytext=(4, 0), textcoords="offset points", va="center", color="#808080", fontsize=8)


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


def section_of(sweep: Sweep, rows: list[dict[str, Any]]) -> Section:
    """The numbers behind one panel."""
    header = (sweep.label, "mesh", *(f"{line.label}, s" for line in LINES), "price, s", "gap", "peak, MiB")
    cells = tuple(
        (
            str(row["x"]), row["mesh"], *map(seconds, parts_of(row)), seconds(row["times_s"]["price"]), f"{row['gap']:.1e}",
            mib(row["peak_bytes"]),
        )
        for row in rows
    )  # fmt: skip
    return Section(sweep.title, sweep.setting + ".", header, cells, tuple(rows))


def measure(points: Iterable[tuple[Sweep, int, Case]], repeat: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of each sweep; RuntimeError if a point cannot be measured."""
    found: dict[str, list[dict[str, Any]]] = {}
    for sweep, x, case in points:
        row = measured("plan", case, repeat=repeat)
        if "error" in row:
            raise RuntimeError(f"{sweep.title} {x}: {row['error']}")
        found.setdefault(sweep.title, []).append({"x": x, **asdict(case), **row})
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure, draw and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, help="times are medians of so many runs (default 3; 1 if quick)")
    parser.add_argument("--quick", action="store_true", help="the first two points of each panel, once")
    settings = parser.parse_args(arguments)
    repeat = settings.repeat or (1 if settings.quick else 3)
    points = [(sweep, x, case) for sweep in SWEEPS for x, case in list(zip(sweep.xs, sweep.cases))[: 2 if settings.quick else None]]
    rows = measure(track(points, "scaling", console=Console(stderr=True)), repeat)
    sections = [section_of(sweep, rows[sweep.title]) for sweep in SWEEPS]
    print(save_sections("scaling", sections, {"model": "llama3-8b, sequence 8192", "cluster": "h100, no memory limit", "repeat": repeat}))
    draw(rows, str(RESULTS / "scaling.png"))
    print("written to bench/results/scaling.md, scaling.json and scaling.png")


if __name__ == "__main__":
    main()
