"""Durations and sizes as text for people."""


def format_seconds(seconds: float) -> str:
    """A duration in the largest unit in which it is at least 1.

    >>> format_seconds(0.00125)
    '1.25 ms'
    >>> format_seconds(0.99999)
    '1000 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1.0:
            return f"{_digits(seconds * scale)} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_bytes(num_bytes: float) -> str:
    """A size in binary units.

    >>> format_bytes(3 * 2**20), format_bytes(-1536)
    ('3 MiB', '-1.5 KiB')
    """
    if num_bytes < 0:
        return f"-{format_bytes(-num_bytes)}"
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{_digits(num_bytes / 1024**power)} {unit}"
    return f"{num_bytes:.0f} B"


def _digits(number: float) -> str:
    """A number with three digits, or all digits before the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
