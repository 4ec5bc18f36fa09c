"""Output types that torch's pytree does not know: dataclasses, and the caches of transformers."""

import dataclasses
import sys
from typing import Any

from torch.utils import _pytree as pytree  # the only registry that torch.export reads


def register_types(tree: Any) -> None:
    """Register every dataclass type inside `tree` (and the caches of transformers, if it is imported) as a pytree node."""
    _register_caches()
    for leaf in pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            pytree.register_dataclass(type(leaf))
            register_types([getattr(leaf, item.name) for item in dataclasses.fields(leaf)])


def _register_caches() -> None:
    if "transformers" not in sys.modules:
        return
    from transformers.cache_utils import EncoderDecoderCache
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    register_dynamic_cache_export_support()
    if EncoderDecoderCache not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            EncoderDecoderCache,
            lambda cache: ([cache.self_attention_cache, cache.cross_attention_cache], None),
            lambda caches, _: EncoderDecoderCache(*caches),
            flatten_with_keys_fn=lambda cache: (
                [(pytree.GetAttrKey(name), getattr(cache, name)) for name in ("self_attention_cache", "cross_attention_cache")],
                None,
            ),
            serialized_type_name="transformers.cache_utils.EncoderDecoderCache",
        )
