"""`draw`: measured and fitted times as a picture; only this file needs matplotlib."""

import os

from matplotlib.figure import Figure

from autopar.calibrate.fit_cluster import Fitted
from autopar.calibrate.fit_report import by_term
from autopar.errors import AutoparError


def draw(fitted: Fitted, path: str | os.PathLike) -> None:
    """A picture of measured (dots) and fitted (lines) times of each term; AutoparError if it cannot be written."""
    figure = Figure(figsize=(14, 6), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, title, is_link in zip(panels, ("collectives and sends, by bytes", "ops, by flops or bytes"), (1, 0)):
        for term, points in by_term([point for point in fitted.points if (" among " in point.term) == is_link]).items():
            ordered = sorted(points, key=lambda point: point.at)
            dots = panel.plot([p.at for p in ordered], [p.measured_s for p in ordered], "o", markersize=3)
            color = dots[0].get_color()
            panel.plot([p.at for p in ordered], [p.fitted_s for p in ordered], "-", color=color, label=term)
        if panel.lines:
            panel.legend(fontsize="xx-small")
        panel.set(xscale="log", yscale="log", title=title, ylabel="seconds")
    figure.suptitle(fitted.cluster.source)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise AutoparError(f"calibrate: the picture cannot be written to {os.fspath(path)!r}: {error}") from error
