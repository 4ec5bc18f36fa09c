"""`least_cover`: the subset of sizes with the least sum that is large enough."""

import math
from collections.abc import Iterator, Sequence

# The resolution of sums, as a share of the total.
_RESOLUTION = 2**20


def least_cover(sizes: Sequence[int], need: float) -> tuple[int, ...] | None:
    """Positions of the sizes with the least sum that is not below `need`, large sizes first; None if all are too few.

    Exact if the sizes have a common divisor of at least a millionth of their sum; otherwise each is rounded down to a
    millionth of it.

    >>> least_cover([5, 8, 8, 3], 12)
    (0, 1)
    """
    total = sum(sizes)
    if need > total:
        return None
    if need <= 0:
        return ()
    unit = max(math.gcd(*sizes), total // _RESOLUTION)
    least = math.ceil(need / unit)
    if sum(size // unit for size in sizes) < least:  # because of rounding down
        return tuple(range(len(sizes)))
    return tuple(sorted(_needed(sizes, list(_taken(sizes, unit, least)), need)))


def _taken(sizes: Sequence[int], unit: int, least: int) -> Iterator[int]:
    """Subset sum by a bitset: bit s of a number is set if some of the sizes so far add up to s units."""
    alike: dict[int, list[int]] = {}
    for position, size in enumerate(sizes):
        alike.setdefault(size, []).append(position)
    known = (1 << (least + max(sizes) // unit + 1)) - 1
    reached, steps = 1, []
    for size in sorted(alike, reverse=True):
        for part in _parts(alike[size]):
            steps.append((reached, size // unit * len(part), part))
            reached |= (reached << steps[-1][1]) & known
    enough = reached >> least
    sum_left = least + (enough & -enough).bit_length() - 1
    for before, step, part in reversed(steps):
        if not before >> sum_left & 1:
            sum_left -= step
            yield from part


def _needed(sizes: Sequence[int], taken: Sequence[int], need: float) -> Iterator[int]:
    """The taken positions without those that rounding made superfluous."""
    spare = sum(sizes[position] for position in taken) - need
    for position in sorted(taken, key=lambda one: -sizes[one]):
        if sizes[position] > spare:
            yield position
        else:
            spare -= sizes[position]


def _parts(positions: Sequence[int]) -> Iterator[Sequence[int]]:
    """The positions in parts of 1, 2, 4, ... and a rest, of which some have any given number of positions in all."""
    start, number = 0, 1
    while start < len(positions):
        yield positions[start : start + number]
        start, number = start + number, 2 * number
