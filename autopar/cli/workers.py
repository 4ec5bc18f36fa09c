"""The worker processes of `autopar sweep`; this module imports nothing that takes time."""

import multiprocessing
import os
from multiprocessing import forkserver


def num_cores() -> int:
    """The number of cores that this process may use."""
    cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0))
    return cores or 1


def begin_workers() -> None:
    """Begin the server that workers are forked from, which imports what they need while this process does other work;
    nothing on one core, where this process plans all points.
    """
    if num_cores() > 1:
        multiprocessing.set_forkserver_preload(["autopar.cli.sweep_command"])
        forkserver.ensure_running()
