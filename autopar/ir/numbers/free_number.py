"""Numbers of a graph that are arguments of the call: a program reads them by name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Graph, Op
from autopar.torch_compat import pytree

NAME = "__number_"  # what a program calls them, with the position of the argument behind


class FreeFloat(float):
    """A float with the position of the argument that it is, and its value in the call that was traced.

    No plain float equals it: an op that is given it is another one, for caches too.
    """

    position: int

    def __new__(cls, value: float, position: int) -> "FreeFloat":
        made = super().__new__(cls, value)
        made.position = position
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FreeFloat) and _key_of(self) == _key_of(other)

    def __hash__(self) -> int:
        return hash(_key_of(self))

    @property
    def text(self) -> str:
        """The number as source."""
        return name_of(self.position)


class FreeInt(int):
    """As `FreeFloat`, of an int."""

    position: int

    def __new__(cls, value: int, position: int) -> "FreeInt":
        made = super().__new__(cls, value)
        made.position = position
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FreeInt) and _key_of(self) == _key_of(other)

    def __hash__(self) -> int:
        return hash(_key_of(self))

    @property
    def text(self) -> str:
        """The number as source."""
        return name_of(self.position)


FreeNumber = FreeFloat | FreeInt


def _key_of(number: "FreeNumber") -> tuple[int, str]:
    return number.position, repr(number)


def free_number(value: float, position: int) -> FreeNumber:
    """An int or float as the argument at `position` of the flat call."""
    return FreeInt(value, position) if isinstance(value, int) else FreeFloat(value, position)


def is_number(leaf: object) -> bool:
    """Whether an argument may be a free number: neither bool nor a subclass, which models ask for."""
    return type(leaf) in (int, float)


def name_of(position: int) -> str:
    """The name of a number in a program."""
    return f"{NAME}{position}"


def has_numbers(op: Op) -> bool:
    """Whether an op is given free numbers."""
    return any(isinstance(leaf, (FreeFloat, FreeInt)) for leaf in pytree.tree_leaves((op.args, op.kwargs)))


def with_numbers(graph: Graph, numbers: Mapping[int, float]) -> Graph:
    """`graph` for a call with other numbers, by position."""

    def number(leaf: Any) -> Any:
        return free_number(numbers[leaf.position], leaf.position) if isinstance(leaf, (FreeFloat, FreeInt)) else leaf

    def op(old: Op) -> Op:
        args, kwargs = pytree.tree_map(number, (old.args, old.kwargs))
        return replace(old, args=args, kwargs=kwargs)

    ops = tuple(op(each) if has_numbers(each) else each for each in graph.ops)
    arguments = tuple(numbers.get(position, leaf) for position, leaf in enumerate(graph.arguments))
    return replace(graph, ops=ops, arguments=arguments)
