"""`fair_shares`: the devices of jobs that start together, for the largest product of their speeds."""

import math
from collections.abc import Mapping, Sequence

from autopar.errors import AutoparError
from autopar.jobs.simulate_jobs import Share
from autopar.jobs.workload import SpeedCurve


def parse_mix(text: str, curves: Mapping[str, SpeedCurve]) -> tuple[str, ...]:
    """The models of "gpt2,llama3-8b:2", each as often as it has jobs; AutoparError for one whose steps nobody knows.

    >>> parse_mix("a,b:2", {"a": SpeedCurve("a", {}), "b": SpeedCurve("b", {})})
    ('a', 'b', 'b')
    """
    models: list[str] = []
    for part in text.split(","):
        name, _, count = part.strip().rpartition(":")
        if not name or not count.isdigit():  # a model's name may have a colon itself
            name, count = part.strip(), "1"
        if name not in curves:
            raise AutoparError(f"--fit {text}: no steps of {name!r} are known (known: {', '.join(sorted(curves))})")
        if int(count) < 1:
            raise AutoparError(f"--fit {text}: expected a positive number of jobs of {name}, found {count}")
        models += [name] * int(count)
    return tuple(models)


def fair_shares(models: Sequence[str], curves: Mapping[str, SpeedCurve], num_devices: int) -> tuple[Share, ...]:
    """The share of each job, for the largest product of speeds: no other division raises some jobs' speeds by a larger
    share, in sum, than it lowers those of the others (Nash, "The Bargaining Problem", 1950; Kelly, 1997, calls it
    proportional fairness).

    Exact, by dynamic programming over the jobs and the devices left. AutoparError if the jobs do not fit together.
    """
    # best[n]: (sum of logarithms of speeds, sizes) of the jobs so far on n devices
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (num_devices + 1)
    for model in models:
        curve = curves[model]
        following: list[tuple[float, tuple[int, ...]]] = [(-math.inf, ())] * (num_devices + 1)
        for devices in range(num_devices + 1):
            for size in curve.sizes:
                if size <= devices and best[devices - size][0] > -math.inf:
                    total, sizes = best[devices - size]
                    following[devices] = max(following[devices], (total - math.log(curve.step_s(size)), (*sizes, size)))
        best = following
    total, sizes = best[num_devices]
    if total == -math.inf:
        least = sum(curves[model].sizes[0] for model in models)
        raise AutoparError(f"these {len(models)} jobs need {least} devices at least, there are {num_devices}")
    pairs = zip(models, sizes)
    return tuple(Share(size, curves[model].step_s(size), curves[model].plan_of(size)) for model, size in pairs)
