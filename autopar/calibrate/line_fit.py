"""`fit_line`: latency and seconds a byte from measured times, robust against outliers; `fit_bent`: a least time too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

# Residuals beyond this many typical ones (median absolute residual) count by their size, not by its square: Huber,
# "Robust Estimation of a Location Parameter", 1964, with his 1.345 of a normal deviation, 1.4826 median residuals.
_HUBER = 1.345 * 1.4826
_ROUNDS = 50
_LEAST_RESIDUAL = 1e-6
_LEAST_GAIN = 0.9  # the error of a bent line over that of a straight one, which it replaces only if that is clear


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds `alpha_s + beta_s_per_byte * num_bytes`, and `least_s` at least; none of them below 0."""

    alpha_s: float
    beta_s_per_byte: float
    least_s: float = 0.0

    def at(self, num_bytes: float) -> float:
        """Seconds of `num_bytes`."""
        return max(self.least_s, self.alpha_s + self.beta_s_per_byte * num_bytes)


def fit_line(num_bytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least relative errors: Huber's estimate, by weighted least squares repeated.

    Errors are relative, so that a small message counts as much as a large one. One size gives a line through 0.

    >>> line = fit_line([1e3, 1e6, 1e7, 1e8], [2e-5, 1.01e-3, 5e-2, 0.10001])  # the third is an outlier
    >>> abs(line.beta_s_per_byte / 1e-9 - 1) < 0.05
    True
    """
    sizes, times = np.asarray(num_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    assert len(sizes) == len(times) > 0 and (times > 0).all(), "measured times are positive"
    if len(set(sizes)) == 1:
        return Line(0.0, float(np.median(times) / max(sizes[0], 1.0)))
    line = _start(sizes, times)
    for _ in range(_ROUNDS):
        before, line = line, _solved(sizes, times, _weights(line, sizes, times))
        if abs(line.at(sizes[-1]) / before.at(sizes[-1]) - 1) + abs(line.at(sizes[0]) / before.at(sizes[0]) - 1) < 1e-9:
            break
    return line


def fit_bent(num_bytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line of `fit_line`, or one through the larger sizes with the median of the smaller ones as the least time,
    whichever has the least mean relative error; that of the largest counts most, as it does in a step.

    Buffers on the way, such as the bucket of a rate limiter, take small messages at once, so that a straight line
    through all sizes is too flat for large ones.

    >>> line = fit_bent([1e3, 1e4, 1e5, 1e6, 1e7], [4e-3, 4e-3, 4.1e-3, 1e-2, 1e-1])
    >>> abs(line.beta_s_per_byte / 1e-8 - 1) < 0.01, line.least_s
    (True, 0.004)
    """
    points = sorted(zip(num_bytes, seconds))
    sizes = sorted(set(num_bytes))
    straight = fit_line(num_bytes, seconds)
    bent = [_bent(points, largest) for largest in sizes[1:-2]]

    def error(line: Line) -> float:
        return sum(rank**2 * abs(line.at(size) / time - 1) for rank, (size, time) in enumerate(points, 1))

    best = min(bent, key=error, default=straight)
    return best if error(best) < _LEAST_GAIN * error(straight) else straight


def _bent(points: Sequence[tuple[float, float]], largest: float) -> Line:
    """The line through the sizes above `largest`, with the median time of the others as the least."""
    least_s = float(np.median([time for size, time in points if size <= largest]))
    return replace(fit_line(*zip(*(point for point in points if point[0] > largest))), least_s=least_s)


def _start(sizes: np.ndarray, times: np.ndarray) -> Line:
    """The medians of the lines through two neighbouring sizes, which no single outlier moves far (Theil 1950)."""
    order = np.argsort(sizes, kind="stable")
    slopes = [(times[b] - times[a]) / (sizes[b] - sizes[a]) for a, b in pairwise(order.tolist()) if sizes[b] > sizes[a]]
    slope = max(float(np.median(slopes[len(slopes) // 2 :])), 0.0)  # small messages say little of the slope
    return Line(max(float(np.median((times - slope * sizes)[order[: len(order) // 2 + 1]])), 0.0), slope)


def _weights(line: Line, sizes: np.ndarray, times: np.ndarray) -> np.ndarray:
    residuals = np.abs((line.alpha_s + line.beta_s_per_byte * sizes) / times - 1)
    typical = max(float(np.median(residuals)), _LEAST_RESIDUAL)
    return np.minimum(1.0, _HUBER * typical / np.maximum(residuals, _LEAST_RESIDUAL))


def _solved(sizes: np.ndarray, times: np.ndarray, weights: np.ndarray) -> Line:
    """Weighted least squares of relative errors over lines without negative parts."""
    ones, slopes, roots = 1 / times, sizes / times, np.sqrt(weights)
    columns = np.stack([ones * roots, slopes * roots], axis=1)
    scale = np.linalg.norm(columns, axis=0)
    both = np.linalg.lstsq(columns / scale, roots, rcond=None)[0] / scale
    if (both >= 0).all():
        return Line(float(both[0]), float(both[1]))
    alone = [Line(float((ones * weights).sum() / (ones**2 * weights).sum()), 0.0)]
    alone.append(Line(0.0, float((slopes * weights).sum() / (slopes**2 * weights).sum())))
    return min(
        alone,
        key=lambda line: float((weights * ((line.alpha_s + line.beta_s_per_byte * sizes) / times - 1) ** 2).sum()),
    )
