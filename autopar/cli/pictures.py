"""Pictures of sweeps and of jobs; only this file of the command needs matplotlib."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autopar.answers.scaling import ScalingPoint
from autopar.errors import AutoparError
from autopar.jobs.simulate_jobs import JobLog

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def can_draw(command: str) -> None:
    """AutoparError, before minutes of work, if there is no matplotlib."""
    if not importlib.util.find_spec("matplotlib"):
        raise AutoparError(f"{command}: --picture needs matplotlib: pip install 'autopar[bench]', or leave it out")


def draw_scaling(points: Sequence[ScalingPoint], path: str | os.PathLike) -> None:
    """Samples a second, with linear scaling dashed, and MFU over the number of devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, share = figure.subplots(1, 2)
    lines: dict[tuple[str, float], list[ScalingPoint]] = {}
    is_weak = len({point.batch for point in points}) > len(
        {(p.batch, p.cluster) for p in points if p.devices == points[0].devices}
    )
    for point in points:
        if not point.error:
            lines.setdefault((point.cluster, point.batch / point.devices if is_weak else point.batch), []).append(point)
    for (cluster, batch), found in lines.items():
        found.sort(key=lambda point: point.devices)
        sizes = [point.devices for point in found]
        label = f"{cluster}, batch {batch:g}{' a device' if is_weak else ''}"
        color = speed.plot(sizes, [point.samples_per_s for point in found], "o-", label=label)[0].get_color()
        first = found[0]
        speed.plot(sizes, [first.samples_per_s * size / first.devices for size in sizes], "--", color=color, alpha=0.4)
        share.plot(sizes, [point.mfu for point in found], "o-", color=color, label=label)
    speed.set(xscale="log", yscale="log", xlabel="devices", ylabel="samples/s", title="speed (dashed: linear)")
    share.set(xscale="log", xlabel="devices", ylabel="share of peak flop/s", title="MFU", ylim=(0, None))
    if lines:
        share.legend(fontsize="small")
    figure.suptitle(points[0].model if points else "")
    _save(figure, path, "sweep")


def draw_jobs(logs: Mapping[str, JobLog], path: str | os.PathLike) -> None:
    """A Gantt chart for each policy: devices in use by model over time, and the jobs that wait."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.2 * len(logs) + 0.6), layout="constrained")
    panels = figure.subplots(len(logs), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, log) in zip(panels, logs.items()):
        models = {job.name: job.model for job in log.jobs}
        kinds = sorted(set(models.values()))
        moments = sorted({0.0, *(x for each in log.intervals for x in (each.start_s, each.end_s))})
        used = [[0] * len(moments) for _ in kinds]
        place = {moment: number for number, moment in enumerate(moments)}
        for each in log.intervals:
            row = used[kinds.index(models[each.job])]
            for at in range(place[each.start_s], place[each.end_s]):
                row[at] += each.share.devices
        hours = [moment / 3600 for moment in moments]
        panel.stackplot(hours, used, labels=kinds, step="post")
        waits = [sum(j.submitted_s <= now < log.started_s[j.name] for j in log.jobs) for now in moments]
        panel.step(hours, waits, "k", where="post", linewidth=0.8, label="jobs that wait")
        panel.axhline(log.num_devices, color="grey", linewidth=0.6)
        panel.set(ylabel="devices", title=name)
    panels[-1].set(xlabel="hours")
    panels[0].legend(fontsize="xx-small", ncols=4)
    _save(figure, path, "schedule")


def _save(figure: "Figure", path: str | os.PathLike, command: str) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise AutoparError(f"{command}: the picture cannot be written to {os.fspath(path)!r}: {error}") from error
