"""Planning makes many small objects that stay: looking through all of them for cycles takes a seventh of its time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects made between two collections, and collections of a generation before the next. Planning GPT-39B took 406 MiB
# so, 401 else.
_THRESHOLDS = (20_000, 20, 20)


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Collect garbage less often than Python does by default, and no more often than the caller does; also a
    decorator.
    """
    before = gc.get_threshold()
    if not before[0]:  # the caller collects by itself
        yield
        return
    gc.set_threshold(*map(max, before, _THRESHOLDS))
    try:
        yield
    finally:
        gc.set_threshold(*before)
