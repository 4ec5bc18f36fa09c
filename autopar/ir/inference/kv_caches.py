"""transformers' key-value caches: as trees of tensors, and written to where a call is given one.

A `DynamicCache` is a Python object that the model writes to: after a call it holds what the call added. A program has
tensors in and out, so that what it gives for a cache is put into the object that the call was given (`giving_back`).

A layer with a sliding window drops what lies before it, and counts in Python what it has seen. A program would have
that number fixed. So layers are given to the model without a window, which keeps all and masks what lies before it:
the numbers are the same. A cache that has dropped something is refused as an argument.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError, TraceError
from autopar.torch_compat import pytree

_STATIC = ["key_cache", "value_cache", "cumulative_length"]
REMEDY = "use_cache=False, or past_key_values=transformers.DynamicCache() in the first call, which keeps all tokens"


_NUMBER = "_autopar_number"  # attribute of a cache in a trace: its number among those that the call was given
_kinds: list[type] = []
_given: list[list[Any]] = []  # the caches of the calls that are under way, innermost last


def register_caches() -> None:
    """Make the caches of transformers pytree nodes, if it is imported."""
    if "transformers" not in sys.modules or _kinds:
        return
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    register_dynamic_cache_export_support()
    _kinds.extend((DynamicCache, EncoderDecoderCache, StaticCache))
    known = pytree.SUPPORTED_NODES[DynamicCache]
    pytree.SUPPORTED_NODES[DynamicCache] = known._replace(
        flatten_fn=_parts, unflatten_fn=_dynamic, flatten_with_keys_fn=_named_parts
    )
    pytree.register_pytree_node(
        EncoderDecoderCache,
        lambda cache: ([cache.self_attention_cache, cache.cross_attention_cache], _number(cache)),
        lambda caches, number: _numbered(EncoderDecoderCache(*caches), number),
        flatten_with_keys_fn=_both_caches,
        serialized_type_name="transformers.cache_utils.EncoderDecoderCache",
    )
    pytree.register_pytree_node(
        StaticCache,
        _static_parts,
        _static,
        flatten_with_keys_fn=_named_static_parts,
        serialized_type_name="transformers.cache_utils.StaticCache",
    )


def caches_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The caches among the arguments of a call, in the order of keywords."""
    return [x for x in (*args, *(kwargs[name] for name in sorted(kwargs))) if _is_cache(x)]


@contextmanager
def giving_back(caches: list[Any]) -> Iterator[None]:
    """Inside, outputs that are `caches` that the call was given are put together as these very objects."""
    _given.append(caches)
    try:
        yield
    finally:
        _given.pop()


@contextmanager
def caches_numbered(model: nn.Module) -> Iterator[None]:
    """Inside, a cache that calls of `model` are given has a number, by which it is found in what they give.

    TraceError where the model writes to a cache that it does not give, or that is inside another argument.
    """
    before: list[tuple[Any, list[int]]] = []

    def number(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before[:] = [(x, _identities(x)) for x in _caches_in((args, kwargs))]
        for index, cache in enumerate(caches_given(args, kwargs)):
            setattr(cache, _NUMBER, index)
            for layer in getattr(cache, "layers", ()) if type(cache) is _kinds[-1] else ():
                layer.cumulative_length = layer.cumulative_length.clone()  # which the model writes to
                if layer.is_initialized:
                    layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found = [_number(x) for x in _caches_in(output)]
        for cache, identities in before:
            if _identities(cache) != identities and (_number(cache) is None or _number(cache) not in found):
                raise TraceError(
                    f"the model writes to a {type(cache).__name__} that it was given, which is"
                    f" {'inside another argument' if _number(cache) is None else 'not among what it gives'}; give it as"
                    " an argument of its own, and return it from forward"
                )

    hooks = (
        model.register_forward_pre_hook(number, with_kwargs=True),
        model.register_forward_hook(check, with_kwargs=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def written_in_place(spec: Any) -> frozenset[int]:
    """Numbers of the leaves of an output that the model writes to where they are: those of a `StaticCache` that the
    call was given.
    """
    found, number = set[int](), 0
    stack = [spec]
    while stack:
        node = stack.pop()
        if node.type is not None and node.type in _kinds[2:] and node.context[-1] is not None:
            found.update(range(number, number + node.num_leaves))
        if not node.num_children:
            number += node.num_leaves
        stack += [node.child(i) for i in reversed(range(node.num_children))]
    return frozenset(found)


def remedy_of(leaf: Any) -> str:
    """The remedy for an argument that is no tree of tensors."""
    if any(f"{kind.__module__}.{kind.__name__}" == "transformers.cache_utils.Cache" for kind in type(leaf).__mro__):
        return (
            "of caches give a transformers.DynamicCache (leave out cache_implementation), which is appended to in place"
        )
    return "turn it into one of them before the call"


def check_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """AutoparError if a call is given a cache that has dropped tokens behind a sliding window."""
    for cache in caches_given(args, kwargs):
        for part in (cache,) if hasattr(cache, "layers") else (cache.self_attention_cache, cache.cross_attention_cache):
            if isinstance(part, _kinds[0]) and any(window is not None for window in _windows(part)):
                raise AutoparError(
                    "the cache of a call has layers with a sliding window that dropped tokens, of which a program does"
                    f" not know how many; expected one that has all tokens so far: {REMEDY}"
                )


def _is_cache(x: Any) -> bool:
    return type(x) in _kinds


def _caches_in(tree: Any) -> list[Any]:
    return [x for x in pytree.tree_leaves(tree, is_leaf=_is_cache) if _is_cache(x)] if _kinds else []


def _number(cache: Any) -> int | None:
    return getattr(cache, _NUMBER, None)


def _numbered(cache: Any, number: int | None) -> Any:
    """The `cache` that a call gives; the one that it was given itself, with the content of `cache`."""
    if number is None:
        return cache
    if not _given:
        setattr(cache, _NUMBER, number)
        return cache
    given = _given[-1][number]
    vars(given).update(vars(cache))
    return given


def _identities(cache: Any) -> list[int]:
    return [id(x) for x in pytree.tree_leaves(cache)]


def _windows(cache: Any) -> list[int | None]:
    """For each layer its sliding window, if it has dropped tokens."""
    from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer):
            raise AutoparError(_other_layer(cache, layer))
    return [
        layer.sliding_window if _length(layer) < getattr(layer, "cumulative_length", 0) else None
        for layer in cache.layers
    ]


def _other_layer(cache: Any, layer: Any) -> str:
    return (
        f"a {type(cache).__name__} has a {type(layer).__name__}, of which no program of autopar knows what it keeps;"
        f" expected layers of keys and values: {REMEDY}"
    )


def _length(layer: Any) -> int:
    return 0 if not isinstance(layer.keys, torch.Tensor) or layer.keys.ndim < 2 else layer.keys.shape[-2]


def _parts(cache: Any) -> tuple[list[list[torch.Tensor]], list[Any]]:
    layers = [layer for layer in cache.layers if layer.keys is not None]
    parts = [layer.keys for layer in layers], [layer.values for layer in layers]
    return [*parts], [["key_cache", "value_cache"], _windows(cache), _number(cache)]


def _fill(layer: Any, keys: Any, values: Any) -> None:
    layer.keys, layer.values, layer.is_initialized = keys, values, True
    if isinstance(keys, torch.Tensor):  # and none that stands for one
        layer.dtype, layer.device = keys.dtype, keys.device


def _named_parts(cache: Any) -> tuple[list[tuple[Any, list[torch.Tensor]]], list[Any]]:
    parts, context = _parts(cache)
    return [(pytree.MappingKey(name), part) for name, part in zip(context[0], parts, strict=True)], context


def _dynamic(parts: Any, context: list[Any]) -> Any:
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache()
    for keys, values, window in zip_longest(*parts, context[1]):
        layer = DynamicLayer() if window is None else DynamicSlidingWindowLayer(sliding_window=window)
        if keys is not None:
            _fill(layer, keys, values)
        if window is not None:  # more than it has: it is refused as an argument
            layer.cumulative_length = _length(layer) + 1
        cache.layers.append(layer)
    return _numbered(cache, context[2])


def _static_parts(cache: Any) -> tuple[list[list[torch.Tensor]], list[Any]]:
    from transformers.cache_utils import StaticLayer

    for layer in cache.layers:
        if type(layer) is not StaticLayer:
            raise AutoparError(_other_layer(cache, layer))
    made = [layer for layer in cache.layers if layer.is_initialized]
    lengths = [layer.cumulative_length for layer in cache.layers]
    sizes = [(layer.max_cache_len, layer.is_initialized) for layer in cache.layers]
    return [[x.keys for x in made], [x.values for x in made], lengths], [*_STATIC, sizes, _number(cache)]


def _named_static_parts(cache: Any) -> tuple[list[tuple[Any, list[torch.Tensor]]], list[Any]]:
    parts, context = _static_parts(cache)
    return [(pytree.MappingKey(name), part) for name, part in zip(_STATIC, parts, strict=True)], context


def _static(parts: Any, context: list[Any]) -> Any:
    from transformers.cache_utils import Cache, StaticCache, StaticLayer

    keys, values, lengths = (iter(part) for part in parts)
    cache = StaticCache.__new__(StaticCache)
    Cache.__init__(cache, layers=[StaticLayer(max_cache_len=size) for size, _ in context[-2]])
    for layer, (_, is_made) in zip(cache.layers, context[-2]):
        layer.cumulative_length = next(lengths)
        if is_made:
            _fill(layer, next(keys), next(values))
    return _numbered(cache, context[-1])


def _both_caches(cache: Any) -> tuple[list[tuple[Any, Any]], int | None]:
    names = ("self_attention_cache", "cross_attention_cache")
    return [(pytree.GetAttrKey(name), getattr(cache, name)) for name in names], _number(cache)
