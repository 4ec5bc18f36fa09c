"""`autopar calibrate`: its arguments and what it does."""

import argparse
import importlib.util
from pathlib import Path

import torch.distributed as dist

from autopar.calibrate.fit_cluster import Fitted
from autopar.calibrate.fit_report import report
from autopar.calibrate.measure import FULL, QUICK
from autopar.calibrate.run_calibration import STALL_S, calibrate, save, world
from autopar.costmodel.cluster.load_cluster import load_cluster
from autopar.errors import AutoparError
from autopar.planner.status import status


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `autopar calibrate`."""
    parser.add_argument("--out", metavar="FILE", help="write the cluster as JSON, for --cluster and cluster=")
    parser.add_argument("--picture", metavar="FILE", help="draw measured and fitted times (needs matplotlib)")
    parser.add_argument("--links", metavar="CLUSTER", help="a preset or a file whose links a single rank takes")
    parser.add_argument("--quick", action="store_true", help="under 10 s: fewer shapes and sizes")
    parser.add_argument(
        "--stall",
        type=float,
        default=STALL_S,
        metavar="S",
        help=f"seconds after which a message counts as lost (default {STALL_S:g})",
    )
    parser.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    links = load_cluster(options.links) if options.links else None
    for path in (options.out, options.picture):
        _check_writable(path)
    if options.picture and not importlib.util.find_spec("matplotlib"):
        raise AutoparError("calibrate: --picture needs matplotlib: pip install 'autopar[bench]', or leave it out")
    with world(stall_s=options.stall):
        is_first = dist.get_rank() == 0
        with status() as tell:
            fitted = calibrate(links=links, effort=QUICK if options.quick else FULL, stall_s=options.stall, tell=tell)
        if is_first:
            print(report(fitted))
            if options.out:
                save(fitted.groups or fitted.cluster, options.out)
            if options.picture:
                _draw(fitted, options.picture)
    return 0


def _draw(fitted: Fitted, path: str) -> None:
    from autopar.calibrate.picture import draw

    draw(fitted, path)


def _check_writable(path: str | None) -> None:
    """AutoparError before minutes of work for a file that cannot be written after it."""
    if path and (not Path(path).absolute().parent.is_dir() or Path(path).is_dir()):
        raise AutoparError(f"calibrate: expected a file in a folder that exists, found {path!r}")
