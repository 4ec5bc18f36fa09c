"""The picture of `bench.cluster`: each library's step over autopar's, by network and model."""

from collections.abc import Sequence
from statistics import median

import matplotlib

from bench.cluster.libraries import LIBRARIES, variants_of
from bench.cluster.run_ranks import OWN
from bench.report import Row

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

_HUES = ("#1f5fa8", "#c2571a", "#e3a257", "#c9b458", "#3b8a4b", "#8b62b5", "#5f5f5f")
_COLORS = dict(zip(LIBRARIES, _HUES, strict=True))
_TICKS = (0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 7, 10)


def draw(rows: Sequence[Row], path: str) -> None:
    """A line for each row, a dot on it for each library: how many times autopar's step that of the library is."""
    names = [f"{row['model']}, {row['network']}" for row in rows]
    figure, panel = plt.subplots(figsize=(7.4, 1.3 + 0.27 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        own = median(row["seconds"][OWN])
        for library, color in _COLORS.items():
            times = [median(row["seconds"][name]) for name in variants_of(library, row["seconds"])]
            if times:
                label = library if place == _first_with(library, rows) else None
                panel.plot(min(times) / own, place, "o", color=color, markersize=6, label=label, clip_on=False)
    panel.axvline(1, color="#404040", linewidth=1)
    panel.set(xscale="log", yticks=range(len(rows)), yticklabels=names, ylim=(len(rows) - 0.5, -0.5))
    panel.xaxis.set_major_locator(FixedLocator(_TICKS))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.set_xlabel("step of the library over that of autopar's plan (right of 1: autopar is faster)")
    panel.grid(axis="both", color="#ececec", linewidth=0.7)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9, handletextpad=0.2)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _first_with(library: str, rows: Sequence[Row]) -> int:
    return next(place for place, row in enumerate(rows) if variants_of(library, row["seconds"]))
