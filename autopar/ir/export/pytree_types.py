"""Arguments and outputs that torch.export does not know: dataclasses and the caches of transformers, which are
registered with torch's pytree, and constants, in place of which it gets texts.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn

from autopar.ir.attention.keep_flex import register_block_mask
from autopar.ir.inference.kv_caches import register_caches
from autopar.torch_compat import pytree

_STRANGE = (complex, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, Enum)  # as constants
_held: dict[str, Any] = {}  # text -> the constant that it stands for


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


@contextmanager
def constants_as_texts(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """A context in which `model` may be called with the arguments it gives, `args` and `kwargs` with texts for what
    torch.export does not take as a constant, and returns such texts; its forward sees the constants themselves.
    """
    given = _texts(call := (args, kwargs))
    hooks = [model.register_forward_hook(lambda *seen: _texts(seen[-1]))]
    if given is not call:
        hooks.append(model.register_forward_pre_hook(lambda _, *own: _constants(own), with_kwargs=True, prepend=True))
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


def constant_of(leaf: Any) -> Any:
    """The constant that a text stands for; any other leaf as it is."""
    return _held.get(leaf, leaf) if isinstance(leaf, str) else leaf


def _constants(tree: Any) -> Any:
    return pytree.tree_map(constant_of, tree)


def _texts(tree: Any) -> Any:
    """`tree` itself where it has no such constant: the model may keep what it is given, and gives."""
    return pytree.tree_map(_text_of, tree) if any(map(_is_strange, pytree.tree_leaves(tree))) else tree


def _is_strange(leaf: Any) -> bool:
    return isinstance(leaf, _STRANGE) and not isinstance(leaf, (int, str))  # as enums may be


def _text_of(leaf: Any) -> Any:
    if not _is_strange(leaf):
        return leaf
    name = leaf.name if isinstance(leaf, Enum) else repr(leaf)
    text = f"autopar constant {id(type(leaf))} {name}"
    _held[text] = leaf
    return text
