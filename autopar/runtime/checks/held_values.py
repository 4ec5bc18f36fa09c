"""Contents of attributes and variables as something that compares: plain values, containers, configs, tensors."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
CONTAINERS = (list, tuple, dict, set, deque)
MOST_NESTED = 3  # objects within objects that are looked into
MOST_ITEMS = 1000  # of a container or array that are all compared; of a larger one NUM_SAMPLED and the length
NUM_SAMPLED = 100


def is_small(x: Any) -> bool:
    """Whether a variable outside of a model is watched: a plain value, a container, array or tensor, or a config."""
    return isinstance(x, (*PLAIN, *CONTAINERS, torch.Tensor, numpy.ndarray)) or is_settings(x, MOST_NESTED)


def is_settings(x: Any, depth: int) -> bool:
    """Whether `x` is an object of plain values, containers and objects like it, as a config is."""
    inside = None if isinstance(x, (nn.Module, type, ModuleType)) or callable(x) else _inside(x)
    return inside is not None and all(
        isinstance(item, (*PLAIN, *CONTAINERS)) or (depth > 0 and is_settings(item, depth - 1))
        for item in inside.values()
    )


def settings_inside(x: Any, depth: int = MOST_NESTED) -> list[Any]:
    """The objects in the attributes of a config, and in theirs."""
    if isinstance(x, (*PLAIN, *CONTAINERS, torch.Tensor)) or not is_settings(x, depth):
        return []
    inner = [item for item in (_inside(x) or {}).values() if not isinstance(item, (*PLAIN, *CONTAINERS))]
    return [*inner, *(one for item in inner for one in settings_inside(item, depth - 1))]


def copied(x: Any) -> Any:
    """The mutable parts of `x`: for containers and objects such as a config the items that compare simply."""
    if isinstance(x, (list, tuple, deque)):
        return [len(x), *map(item_of, _sample([*x] if isinstance(x, deque) else x))]
    if isinstance(x, (set, frozenset)):
        return [len(x), *(sorted(map(repr, x)) if len(x) <= MOST_ITEMS else islice(x, NUM_SAMPLED))]
    if isinstance(x, torch.Tensor):
        return [x._version, x.requires_grad] if not x.is_inference() else None
    if isinstance(x, numpy.ndarray):
        return [x.shape, str(x.dtype), _sample(x.reshape(-1)).tobytes()]
    if isinstance(x, partial):
        return [id(x.func), *map(item_of, x.args), *((name, item_of(item)) for name, item in x.keywords.items())]
    inside = x if isinstance(x, Mapping) else getattr(x, "__dict__", _fields_of(x))
    if isinstance(x, (nn.Module, type, ModuleType)) or callable(x) or not isinstance(inside, Mapping):
        return None
    return {repr(key): item_of(item) for key, item in inside.items()}


def _sample(x: Any) -> Any:
    return x if len(x) <= MOST_ITEMS else x[:: len(x) // NUM_SAMPLED]


def dict_of(x: Any) -> dict[Any, Any] | None:
    """The dict that has all of which `copied` tells, if Python counts the writes to it: of a plain dict or object."""
    is_other_mapping = isinstance(x, Mapping) and type(x) is not dict
    if is_other_mapping or isinstance(x, (list, tuple, set, frozenset, deque, torch.Tensor, numpy.ndarray, partial)):
        return None
    inside = x if type(x) is dict else getattr(x, "__dict__", None)
    return inside if type(inside) is dict else None


def _inside(x: Any) -> dict[Any, Any] | None:
    return _fields_of(x) if (counted := dict_of(x)) is None else counted


def _fields_of(x: Any) -> dict[str, Any] | None:
    """The fields of an object of dataclass(slots=True) or of attrs, which has no dict; None of any other."""
    of_attrs = [each.name for each in getattr(type(x), "__attrs_attrs__", ())]
    fields = getattr(type(x), "__dataclass_fields__", of_attrs)
    return {name: getattr(x, name) for name in fields if hasattr(x, name)} or None


def item_of(x: Any) -> Any:
    """An item of a container as it is compared: a plain value, what a small container prints, or which object it is."""
    if isinstance(x, PLAIN):
        return x
    if not isinstance(x, CONTAINERS):
        return id(x)
    return repr(x) if len(x) <= NUM_SAMPLED else (id(x), len(x))


def nested_in(dicts: Iterable[dict]) -> list[Any]:
    """The containers among the values of `dicts`, whose own writes nobody counts: of a large dict the first ones."""
    return [x for each in dicts for x in islice(each.values(), MOST_ITEMS) if isinstance(x, CONTAINERS)]


def _are_plain(items: Iterable[Any]) -> bool:
    return all(isinstance(item, PLAIN) for item in items)


def reader_of(x: Any) -> tuple[Callable[[], Any], Any]:
    """(a function, what it returned): it returns something else once the content of `x` is another; quick, as it is
    called before each step.
    """
    if type(x) is dict and len(x) <= MOST_ITEMS and _are_plain(x.values()):
        return lambda: x, x.copy()
    if type(x) is tuple and all(isinstance(item, PLAIN) or (type(item) is list and _are_plain(item)) for item in x):
        return lambda: x, tuple(item.copy() if type(item) is list else item for item in x)
    if type(x) not in (list, set) or not _are_plain(x):
        return partial(copied, x), copied(x)
    if len(x) <= MOST_ITEMS:
        return lambda: x, x.copy()
    step = len(x) // NUM_SAMPLED
    read = (lambda: (len(x), x[::step])) if isinstance(x, list) else (lambda: (len(x), [*islice(x, NUM_SAMPLED)]))
    return read, read()
