"""Registration of output types that torch's pytree does not know: dataclasses, and the caches of transformers."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.ir.attention.keep_flex import register_block_mask
from autopar.torch_compat import pytree


def register_types(tree: Any) -> None:
    """Register every dataclass type inside `tree` (and the caches of
    transformers, if it is imported) as a pytree node.
    """
    _register_caches()
    register_block_mask()
    for leaf in pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            pytree.register_dataclass(type(leaf))
            register_types([getattr(leaf, item.name) for item in dataclasses.fields(leaf)])


def _register_caches() -> None:
    if "transformers" not in sys.modules:
        return
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    register_dynamic_cache_export_support()
    known = pytree.SUPPORTED_NODES[DynamicCache]
    if not isinstance(known.unflatten_fn, _Cache):
        pytree.SUPPORTED_NODES[DynamicCache] = known._replace(unflatten_fn=_Cache(known.unflatten_fn))
    if EncoderDecoderCache not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            EncoderDecoderCache,
            lambda cache: ([cache.self_attention_cache, cache.cross_attention_cache], None),
            lambda caches, _: EncoderDecoderCache(*caches),
            flatten_with_keys_fn=_both_caches,
            serialized_type_name="transformers.cache_utils.EncoderDecoderCache",
        )


def _both_caches(cache: Any) -> tuple[list[tuple[Any, Any]], None]:
    names = ("self_attention_cache", "cross_attention_cache")
    return [(pytree.GetAttrKey(name), getattr(cache, name)) for name in names], None


@dataclasses.dataclass(frozen=True)
class _Cache:
    """Puts a DynamicCache together again.

    `unflatten`, transformers' own, joins each tensor to an empty plain one, which a DTensor refuses: it is given
    stand-ins, and the tensors are put in their places.
    """

    unflatten: Callable[[Any, Any], Any]

    def __call__(self, values: Any, context: Any) -> Any:
        if not any(isinstance(x, DTensor) for x in pytree.tree_leaves(values)):
            return self.unflatten(values, context)
        cache = self.unflatten(pytree.tree_map_only(torch.Tensor, _stand_in, values), context)
        tensors = dict(zip(context[0], values))
        layers = [layer for layer in cache.layers if layer.keys is not None]
        for layer, keys, contents in zip(layers, tensors["key_cache"], tensors["value_cache"]):
            layer.keys, layer.values, layer.device = keys, contents, keys.device
        return cache


def _stand_in(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")
