"""Groups of isomorphic modules of a model, of which one can be traced for all."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Tracing a module alone costs as much as tracing a dozen modules within a model (measured: 85 ms, and 6 ms for each
# module of a Llama layer).
_LEAST_SAVED = 48

_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_PLAIN = (bool, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice)


@dataclass(frozen=True, slots=True)
class Alike:
    """A group of modules, by FQN, that differ only in their tensors' contents and in `numbers`.

    `numbers`: (path of the submodule, name) of integer attributes that are different in each, such as a layer's index.
    """

    members: tuple[str, ...]
    numbers: tuple[tuple[str, str], ...]


def find_alike(model: nn.Module, least_saved: int = _LEAST_SAVED) -> tuple[Alike, ...]:
    """The groups of isomorphic modules, outermost modules first, that save at least `least_saved` traced modules.

    Isomorphic modules have equal class, training mode, submodules, shapes and kinds of parameters and buffers, and all
    other attributes equal: by value if they are plain, by identity if not. Modules with hooks are in no group.
    """
    keys: dict[int, Any] = {}
    _key(model, keys, {})
    counts = Counter(keys.values())
    by_key: dict[Any, list[tuple[str, nn.Module]]] = {}
    _collect(model, "", keys, counts, least_saved, by_key, set())
    groups = [group for members in by_key.values() for group in _split(members)]
    return tuple(
        group for group in groups if _saved(len(group.members), model.get_submodule(group.members[0])) >= least_saved
    )


def _saved(count: int, module: nn.Module) -> int:
    return (count - 1) * sum(1 for _ in module.modules())


def _collect(
    module: nn.Module,
    fqn: str,
    keys: dict[int, Any],
    counts: Counter,
    least_saved: int,
    by_key: dict[Any, list],
    seen: set[int],
) -> None:
    """Add the outermost modules that save enough to `by_key`, by key."""
    for name, child in module.named_children():
        path, key = f"{fqn}.{name}".removeprefix("."), keys[id(child)]
        if id(child) in seen:
            continue
        seen.add(id(child))
        has_forward = type(child).forward is not nn.Module.forward
        if has_forward and _saved(counts[key], child) >= least_saved:
            by_key.setdefault(key, []).append((path, child))
        else:
            _collect(child, path, keys, counts, least_saved, by_key, seen)


def _key(module: nn.Module, keys: dict[int, Any], known: dict[Any, int]) -> Any:
    """Enter `module` and all inside it into `keys`: equal numbers for equal modules, but for their integers."""
    if id(module) not in keys:
        keys[id(module)] = id(module)  # a module inside itself
        children = tuple(
            (name, None if child is None else _key(child, keys, known)) for name, child in module._modules.items()
        )
        own = _own(module)
        keys[id(module)] = -1 - len(known) if own is None else known.setdefault((own, children), len(known))
        if own is None:
            known[object()] = -1
    return keys[id(module)]


def _own(module: nn.Module) -> Any:
    """A hashable key of the module without its submodules; None if it is in no group."""
    attributes = module.__dict__
    if any(value for name, value in attributes.items() if name.endswith(_HOOKS) and "state_dict" not in name):
        return None
    tensors = [*module._parameters.items(), *module._buffers.items()]
    if any(type(x) not in (nn.Parameter, torch.Tensor, type(None)) for _, x in tensors):
        return None
    plain = tuple(
        (name, _plain(attributes[name])) for name in sorted(attributes) if name not in _TABLES and not _is_hooks(name)
    )
    state = tuple((name, _tensor(x), name in module._non_persistent_buffers_set) for name, x in tensors)
    return type(module), len(module._parameters), state, plain


_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def _is_hooks(name: str) -> bool:
    return name.endswith(_HOOKS) or name in ("_state_dict_pre_hooks", "_is_full_backward_hook")


def _tensor(x: torch.Tensor | None) -> Any:
    return None if x is None else (type(x), x.shape, x.stride(), x.dtype, x.requires_grad, x.device)


def _plain(value: Any) -> Any:
    """A hashable key of an attribute, equal for equal plain values and for the same object; all integers are equal."""
    return "int" if type(value) is int else _exact(value)


def _exact(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_exact(item) for item in value)
    if type(value) is dict:
        return dict, tuple((_exact(key), _exact(item)) for key, item in value.items())
    if type(value) in (*_PLAIN, int):
        return type(value), repr(value)  # repr tells 0.0 from -0.0 and nan equals nan
    return "is", id(value)


def _split(members: Sequence[tuple[str, nn.Module]]) -> Iterator[Alike]:
    """Groups whose members have equal integers except those that number them, and the same sharing inside."""
    integers = [dict(_integers(module)) for _, module in members]
    numbering = tuple(place for place in integers[0] if len({values[place] for values in integers}) == len(members) > 1)
    groups: dict[Any, list[str]] = {}
    for (fqn, module), values in zip(members, integers):
        rest = tuple(value for place, value in values.items() if place not in numbering)
        groups.setdefault((rest, _sharing(module)), []).append(fqn)
    return (Alike(tuple(fqns), numbering) for fqns in groups.values())


def _integers(module: nn.Module) -> Iterator[tuple[tuple[str, str], int]]:
    for path, inner in module.named_modules(remove_duplicate=False):
        yield from (((path, name), value) for name, value in inner.__dict__.items() if type(value) is int)


def _sharing(module: nn.Module) -> tuple[int, ...]:
    """For each tensor and submodule inside, the position of its first occurrence."""
    first: dict[int, int] = {}
    inside = [inner for _, inner in module.named_modules(remove_duplicate=False)]
    tensors = [x for inner in inside for x in (*inner._parameters.values(), *inner._buffers.values())]
    return tuple(first.setdefault(id(item), len(first)) for item in (*inside, *tensors))
