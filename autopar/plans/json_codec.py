"""A codec of dataclasses as JSON objects, by the types of their fields: a field of a known type needs no code.

Reading checks every type; an error is a ValueError that names the field.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from autopar.costmodel.cluster.load_cluster import Cluster, cluster_from_json
from autopar.mesh import Shares
from autopar.plans.json_fields import Fields, shown
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import Layout, format_layout, format_shares, parse_layout, parse_shares
from autopar.sbp.signature import Signature, Strategy

Result = TypeVar("Result")

# Bytes of a device, infinite for no limit, which is null in JSON.
MemoryLimit = Annotated[float, "memory limit"]

# The fields of these stand beside those of the object that has one.
_INLINE = (Assignment,)


class _Codec(NamedTuple):
    """The functions that write a type as JSON and read it from the field of an object."""

    write: Callable[[Any], Any]
    read: Callable[[Fields, str], Any]


def as_json(kind: Any, value: Any) -> Any:
    """`value` as JSON content; it has the type `kind`, or at least the fields of that dataclass."""
    if kind in _CODECS:
        return _CODECS[kind].write(value)
    if is_dataclass(kind):
        return _object(kind, value)
    if get_origin(kind) is Mapping:
        return {name: as_json(get_args(kind)[1], item) for name, item in value.items()}
    items = [as_json(get_args(kind)[0], item) for item in value]
    return sorted(items) if get_origin(kind) is frozenset else items


def _object(kind: type, value: Any) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, part in _types(kind).items():
        item = getattr(value, name)
        content |= _object(part, item) if part in _INLINE else {name: as_json(part, item)}
    return content


def from_object(kind: type[Result], fields: Fields) -> Result:
    """The dataclass of type `kind` from `fields`, which must be exactly its own."""
    return _from_fields(kind, fields.only(*keys_of(kind)))


def keys_of(kind: type) -> Iterator[str]:
    """The keys of the JSON object of a dataclass."""
    for name, part in _types(kind).items():
        yield from keys_of(part) if part in _INLINE else [name]


def _from_fields(kind: type[Result], fields: Fields) -> Result:
    parts = _types(kind).items()
    return kind(
        **{name: _from_fields(part, fields) if part in _INLINE else _read(part, fields, name) for name, part in parts}
    )


def _read(kind: Any, fields: Fields, key: str) -> Any:
    if kind in _CODECS:
        return _CODECS[kind].read(fields, key)
    if is_dataclass(kind):
        return from_object(kind, fields.under(key))
    if get_origin(kind) is Mapping:
        under = fields.under(key)
        return {name: _read(get_args(kind)[1], under, name) for name in under}
    (item_kind, *_), items = get_args(kind), fields.list(key)
    of_items = [isinstance(item, dict) for item in items]
    places = [f"{key}.{number}" if is_object else key for number, is_object in enumerate(of_items)]
    items_read = (_read(item_kind, Fields({place: x}, fields.where), place) for place, x in zip(places, items))
    return get_origin(kind)(items_read)


@lru_cache(64)
def _types(kind: type) -> Mapping[str, Any]:
    """Name of each field -> its type, for a dataclass in a file, without ClassVars."""
    return get_type_hints(kind, include_extras=True)


def _strategy(fields: Fields, key: str) -> Strategy:
    return Strategy(tuple(map(parse_signature, fields.texts(key))))


def parse_signature(text: str) -> Signature:
    """The signature that `str` writes as `text`; ValueError if there is none.

    >>> str(parse_signature("S(1) S(0) -> P [vocabulary]"))
    'S(1) S(0) -> P [vocabulary]'
    """
    match = re.fullmatch(r"([^>]*) -> ([^\[]*?)(?: \[([^\]]+)\])?", text)
    if match is None:
        raise ValueError(f"not a signature: {shown(text)}")
    inputs, outputs = (
        tuple(placement for part in side.split() for placement in parse_layout(part)) for side in match.group(1, 2)
    )
    return Signature(inputs, outputs, match[3] or "")


def _shares(fields: Fields, key: str) -> Shares:
    pairs = (text.partition(":") for text in fields.texts(key))
    return tuple((int(axis), parse_shares(rows)) for axis, _, rows in pairs)


def _memory_limit(fields: Fields, key: str) -> float:
    return math.inf if fields[key] is None else fields.number(key, least=1.0)


def _itself(value: Result) -> Result:
    return value


_CODECS: Mapping[Any, _Codec] = {
    str: _Codec(_itself, Fields.text),
    bool: _Codec(_itself, Fields.flag),
    int: _Codec(_itself, Fields.whole),
    float: _Codec(_itself, Fields.number),
    MemoryLimit: _Codec(lambda limit: None if limit == math.inf else limit, _memory_limit),
    Layout: _Codec(format_layout, lambda fields, key: parse_layout(fields.text(key))),
    Strategy: _Codec(lambda strategy: [str(signature) for signature in strategy.signatures], _strategy),
    Shares: _Codec(lambda shares: [f"{axis}:{format_shares(rows)}" for axis, rows in shares], _shares),
    Cluster: _Codec(
        lambda cluster: json.loads(cluster.to_json()),
        lambda fields, key: cluster_from_json(json.dumps(fields.under(key).content)),
    ),
}
