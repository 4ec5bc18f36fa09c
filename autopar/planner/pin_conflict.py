"""`binding_pins`: a minimal set of pins that makes every plan exceed the memory limit."""

from collections.abc import Callable, Mapping


def binding_pins(
    pins: Mapping[str, str], least_bytes: Callable[[Mapping[str, str]], float], limit_bytes: float
) -> tuple[str, ...]:
    """The names of a minimal set of pins that together leave no plan within the limit.

    Without any one of them a plan fits. `least_bytes`: pins -> least memory of a plan with them. () if no plan fits
    without pins either, or if one fits with all.

    >>> binding_pins({"a": "B", "b": "B", "c": "B"}, lambda pins: 10 * len(pins.keys() & {"a", "c"}), 15)
    ('a', 'c')
    """
    if least_bytes({}) > limit_bytes or least_bytes(pins) <= limit_bytes:
        return ()
    needed = dict(pins)
    for fqn in pins:
        fewer = {name: layout for name, layout in needed.items() if name != fqn}
        if least_bytes(fewer) > limit_bytes:
            needed = fewer
    return tuple(needed)
