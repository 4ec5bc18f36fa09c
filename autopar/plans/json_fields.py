"""Checked reading of JSON text from outside, field by field; an error is a ValueError that names the field."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.print_graph import printable

# A bound far above every size, count and time of a plan; products of several such numbers are still finite.
LARGEST = 1e30
_SHOWN = 60  # characters of an unexpected item in an error


def parse(text: str) -> Any:
    """The content of the JSON `text`.

    ValueError for other text or a duplicate key, RecursionError if it nests too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {shown(next(key for key in content if keys.count(key) > 1))} is given twice")
    return content


def _constant(name: str) -> float:
    if name != "Infinity":  # the bandwidth of a free link
        raise ValueError(f"it holds {name}")
    return math.inf


def shown(item: Any) -> str:
    """`item` as text for an error: on one line, and shortened if it is long."""
    if isinstance(item, dict | list):
        return f"{'an object' if isinstance(item, dict) else 'a list'} of {len(item)}"
    return printable(ascii(item) if isinstance(item, str) else repr(item), _SHOWN)


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a JSON object; `where`: its path in the text."""

    content: Mapping[str, Any]
    where: str = ""

    @classmethod
    def of(cls, item: Any, where: str = "") -> "Fields":
        """The fields of `item`; ValueError if it is no object."""
        if not isinstance(item, dict):
            raise ValueError(f"{where or 'the text'}: expected an object, found {shown(item)}")
        return cls(item, where)

    def __getitem__(self, key: str) -> Any:
        if key not in self.content:
            raise ValueError(f"it lacks {self._place(key)!r}")
        return self.content[key]

    def text(self, key: str) -> str:
        """The string called `key`."""
        return self._checked(key, self[key], str, "text")

    def number(self, key: str, *, least: float = 0.0) -> float:
        """The finite number called `key`, at least `least`."""
        item = self[key]
        if type(item) not in (int, float) or not least <= item <= LARGEST:
            raise ValueError(
                f"{self._place(key)}: expected a number from {least:g} to {LARGEST:g}, found {shown(item)}"
            )
        return float(item)

    def whole(self, key: str, *, least: int = 0) -> int:
        """The whole number called `key`, at least `least`."""
        item = self[key]
        if type(item) is not int or not least <= item <= LARGEST:
            raise ValueError(f"{self._place(key)}: expected a whole number from {least} on, found {shown(item)}")
        return item

    def flag(self, key: str) -> bool:
        """The truth value called `key`."""
        return self._checked(key, self[key], bool, "true or false")

    def list(self, key: str) -> list[Any]:
        """The list called `key`, of anything."""
        return self._checked(key, self[key], list, "a list")

    def texts(self, key: str) -> tuple[str, ...]:
        """The list of strings called `key`."""
        return tuple(self._checked(key, item, str, "a list of text") for item in self.list(key))

    def under(self, key: str) -> "Fields":
        """The fields of the object called `key`."""
        return Fields.of(self[key], self._place(key))

    def only(self, *keys: str) -> "Fields":
        """The fields themselves; ValueError if there are others than `keys`."""
        if stray := sorted(set(self.content) - set(keys)):
            raise ValueError(f"{self.where or 'the text'}: expected no key {shown(stray[0])}")
        return self

    def without(self, *keys: str) -> "Fields":
        """The fields other than `keys`."""
        return Fields({key: item for key, item in self.content.items() if key not in keys}, self.where)

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def _checked(self, key: str, item: Any, kind: type, expected: str) -> Any:
        if type(item) is not kind:
            raise ValueError(f"{self._place(key)}: expected {expected}, found {shown(item)}")
        return item

    def _place(self, key: str) -> str:
        key = printable(key, _SHOWN)
        return f"{self.where}.{key}" if self.where else key
