"""Figures of a prediction beside its measurement: errors, rank correlation, regret; and a least-squares fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pair:
    """A measured row and its prediction; rows of one `group` are plans among which one chooses."""

    group: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """The prediction over the measurement, less 1."""
        return self.predicted_s / self.measured_s - 1


def mean_error(pairs: Sequence[Pair]) -> float:
    return sum(abs(pair.error) for pair in pairs) / len(pairs)


def worst_error(pairs: Sequence[Pair]) -> float:
    return max(abs(pair.error) for pair in pairs)


def rank_correlation(pairs: Sequence[Pair]) -> float:
    """Spearman's: the correlation of the ranks, equal figures having their mean rank."""
    measured, predicted = (_ranks([getattr(p, name) for p in pairs]) for name in ("measured_s", "predicted_s"))
    return float(np.corrcoef(measured, predicted)[0, 1]) if len(pairs) > 1 else 1.0


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def regrets(pairs: Sequence[Pair]) -> list[float]:
    """For each group of several plans the measured time of the one predicted to be fastest over the least, less 1."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.group, []).append(pair)
    several = [members for members in groups.values() if len(members) > 1]
    return [
        min(members, key=lambda p: p.predicted_s).measured_s / min(p.measured_s for p in members) - 1
        for members in several
    ]


# Steps of the fit, each of which halves the error at least where the times are smooth in the numbers; and the relative
# step of its differences.
_ROUNDS, _STEP = 4, 0.02


def fitted(
    predict: Callable[[Sequence[float]], Sequence[float]], measured_s: Sequence[float], start: Sequence[float]
) -> tuple[float, ...]:
    """The positive numbers with the least sum of squares of log(predicted / measured), by Gauss-Newton in logarithms.

    `predict`: seconds of each row for some numbers. No step changes a number by more than a factor of e.
    """

    def residual(logs: np.ndarray) -> np.ndarray:
        return np.log(np.asarray(predict(np.exp(logs).tolist()))) - np.log(np.asarray(measured_s))

    logs = np.log(np.asarray(start, dtype=np.float64))
    now = residual(logs)
    for _ in range(_ROUNDS):
        columns = [(residual(logs + _STEP * unit) - now) / _STEP for unit in np.eye(len(logs))]
        step = np.clip(np.linalg.lstsq(np.stack(columns, axis=1), -now, rcond=1e-6)[0], -1, 1)
        while (after := residual(logs + step)) @ after > now @ now and np.abs(step).max() > 1e-3:
            step = step / 2
        if after @ after >= now @ now:
            break
        logs, now = logs + step, after
    return tuple(np.exp(logs).tolist())
