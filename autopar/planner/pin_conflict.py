"""Which pins make every plan too large: a smallest set that does."""

from collections.abc import Callable, Mapping


def binding_pins(
    pins: Mapping[str, str], least_bytes: Callable[[Mapping[str, str]], float], limit_bytes: float
) -> tuple[str, ...]:
    """Names of pins that no plan within the limit meets together, while it could meet all but any one of them.

    `least_bytes`: the least memory that a plan with these pins takes. () if the limit cannot be met without pins
    either, or with all.

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
