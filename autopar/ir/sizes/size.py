"""`Size`: a number of a program that follows from the size of an argument, found by comparing programs."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from math import lcm
from typing import Any

import torch

NAME = "__size"  # what a program calls the size of the argument


class Size(int):
    """The number `(slope * size + constant) / divisor`, with its value where the program was made. A part of a split
    dim is one, and is no number for sizes that do not divide.
    """

    slope: int
    constant: int
    divisor: int

    def __new__(cls, value: int, slope: int, constant: int, divisor: int = 1) -> "Size":
        made = super().__new__(cls, value)
        made.slope, made.constant, made.divisor = slope, constant, divisor
        return made

    def at(self, size: int) -> int:
        """The number for another size that divides."""
        return (self.slope * size + self.constant) // self.divisor

    def divides(self, size: int, parts: int = 1) -> bool:
        """Whether the number for another size has so many equal parts, none of them empty."""
        number = self.slope * size + self.constant
        return number > 0 and number % (self.divisor * parts) == 0

    @property
    def text(self) -> str:
        """The number as source."""
        product = NAME if self.slope == 1 else f"{self.slope} * {NAME}"
        number = f"({product} + {self.constant})" if self.constant else f"({product})"
        return number if self.divisor == 1 else f"({number} // {self.divisor})"


class Different(Exception):
    """Raised if programs differ in more than numbers that are affine in a size."""


def fit(sizes: Sequence[int], items: Sequence[Any]) -> Any:
    """The last of `items`, equal but for integers, with each that is not the same in all of them a `Size`.

    `items`: nested dataclasses, tuples and constants, one for each of at least three different `sizes`. Different if
    anything else differs, or a number is not affine in the size.
    """
    last = items[-1]
    if any(type(item) is not type(last) for item in items):
        raise Different(f"{type(last).__name__} in one program, {type(items[0]).__name__} in another")
    if type(last) is int:
        return last if all(item == last for item in items) else _affine(sizes, items)
    if isinstance(last, (tuple, list)):
        if any(len(item) != len(last) for item in items):
            raise Different("one program has more of something than another")
        return type(last)(fit(sizes, same) for same in zip(*items))
    if is_dataclass(last) and not isinstance(last, type):
        named = {each.name: fit(sizes, [getattr(item, each.name) for item in items]) for each in fields(last)}
        changed = {name: value for name, value in named.items() if value is not getattr(last, name)}
        return replace(last, **changed) if changed else last
    if any(item is not last and item != last for item in items):
        raise Different(f"{last!r} in one program, {items[0]!r} in another")
    return last


def at(item: Any, size: int) -> Any:
    """`item`, of `fit`, with the numbers for another size."""
    if isinstance(item, Size):
        return item.at(size)
    if isinstance(item, (tuple, list)) and not isinstance(item, torch.Size):
        return type(item)(at(one, size) for one in item)
    if is_dataclass(item) and not isinstance(item, type):
        return replace(item, **{each.name: at(getattr(item, each.name), size) for each in fields(item)})
    return item


def sizes_in(item: Any) -> Iterator[Size]:
    """The numbers of `item`, of `fit`, that follow from the size."""
    if isinstance(item, Size):
        yield item
    elif isinstance(item, (tuple, list)):
        for one in item:
            yield from sizes_in(one)
    elif is_dataclass(item) and not isinstance(item, type):
        for each in fields(item):
            yield from sizes_in(getattr(item, each.name))


def _affine(sizes: Sequence[int], numbers: Sequence[int]) -> Size:
    slope = Fraction(numbers[-1] - numbers[0], sizes[-1] - sizes[0])
    constant = numbers[-1] - slope * sizes[-1]
    if any(slope * size + constant != number for size, number in zip(sizes, numbers, strict=True)):
        raise Different(f"{numbers} for sizes {sizes}")
    divisor = lcm(slope.denominator, constant.denominator)
    return Size(numbers[-1], int(slope * divisor), int(constant * divisor), divisor)
