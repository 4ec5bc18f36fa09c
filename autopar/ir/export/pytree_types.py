"""Registration of output types that torch's pytree does not know: dataclasses, and the caches of transformers."""

import dataclasses
from typing import Any

from autopar.ir.attention.keep_flex import register_block_mask
from autopar.ir.inference.kv_caches import register_caches
from autopar.torch_compat import pytree


def register_types(tree: Any) -> None:
    """Register every dataclass type inside `tree` (and the caches of
    transformers, if it is imported) as a pytree node.
    """
    register_caches()
    register_block_mask()
    for leaf in pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            pytree.register_dataclass(type(leaf))
            register_types([getattr(leaf, item.name) for item in dataclasses.fields(leaf)])
