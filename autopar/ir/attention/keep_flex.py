"""While a model is exported, each call of torch's `flex_attention` is recorded as one op, `autopar.flex_attention`."""

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import BlockMask

from autopar.errors import TraceError
from autopar.ir.attention.flex_op import BLOCKS_OF_KEYS, BLOCKS_OF_QUERIES, FLEX
from autopar.ir.attention.index_functions import broadcasting, functions_called, traced
from autopar.ir.attention.keep_sinks import sinks_kept
from autopar.ir.graph import resolve
from autopar.torch_compat import pytree

_TENSORS = (*BLOCKS_OF_QUERIES, *BLOCKS_OF_KEYS)
_NO_ORDERS = "a BlockMask with an order of writes (dq_write_order) is not kept: make it without"
_ORDERS = ("dq_write_order", "dq_write_order_full", "dq_kv_order")


@contextmanager
def flex_attention_kept() -> Iterator[None]:
    """Calls of `flex_attention` inside are ops, those of `create_block_mask` ops without torch.func.

    Their code is exchanged, since models hold the functions themselves, and what torch.compile made of them.
    """
    with _runs(of_torch.flex_attention, _attention), _runs(of_torch.create_block_mask, _mask), sinks_kept():
        yield


_SIGNATURES = {name: inspect.signature(getattr(of_torch, name)) for name in ("flex_attention", "create_block_mask")}


@contextmanager
def _runs(function: Any, other: FunctionType) -> Iterator[None]:
    kept = function.__code__, function.__defaults__, function.__kwdefaults__
    function.__code__, function.__defaults__, function.__kwdefaults__ = other.__code__, None, None
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = kept


def _attention(*args, **kwargs):  # runs with the names of torch's module, as the next one
    from autopar.ir.attention import keep_flex

    return keep_flex.attention(keep_flex.bound("flex_attention", args, kwargs))


def _mask(*args, **kwargs):
    from autopar.ir.attention import keep_flex

    return keep_flex.block_mask(keep_flex.bound("create_block_mask", args, kwargs))


def bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimpleNamespace:
    """The arguments of a call of one of the functions, with defaults."""
    given = _SIGNATURES[name].bind(*args, **kwargs)
    given.apply_defaults()
    return SimpleNamespace(**given.arguments)


def attention(given: SimpleNamespace) -> Any:
    """The result of `flex_attention` for these arguments, by the op."""
    query, key, value, mask, aux = given.query, given.key, given.value, given.block_mask, given.return_aux
    _check(query, key, value, mask, given.enable_gqa)
    if aux is not None and aux.max_scores:
        raise TraceError("flex_attention returns no largest scores here: ask for lse alone")
    functions, captured = traced(given.score_mod, None if mask is None else mask.mask_mod, query.device)
    blocks = () if mask is None else tuple(_for_batch(getattr(mask, name), len(query)) for name in _TENSORS)
    size = (1, 1) if mask is None else tuple(mask.BLOCK_SIZE)
    scale = 1 / math.sqrt(query.shape[-1]) if given.scale is None else given.scale
    out, lse = resolve(FLEX)(query, key, value, blocks, captured, functions, scale, size)
    if aux is not None:
        return out, of_torch.AuxOutput(lse=lse if aux.lse else None, max_scores=None)
    return (out, lse) if given.return_lse else out


def _for_batch(blocks: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """A tensor of a BlockMask with a row for each sample, if it has several: of masks that ranks give for their parts
    of the batch, each is that of all samples of a part.
    """
    if blocks is None or len(blocks) in (1, batch):
        return blocks
    return blocks.repeat_interleave(batch // len(blocks), dim=0)


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: BlockMask | None, enable_gqa: bool
) -> None:
    shapes = [tuple(x.shape) for x in (query, key, value)]
    told = f"flex_attention of query {shapes[0]}, key {shapes[1]}, value {shapes[2]}"
    if any(len(shape) != 4 for shape in shapes):
        raise TraceError(f"{told}: expected [batch, heads, tokens, head size] each")
    (batch, heads, tokens, size), (key_batch, key_heads, num_keys, key_size), of_value = shapes
    if key_batch not in (batch, 1) or key_size != size or of_value[:3] != shapes[1][:3]:
        raise TraceError(f"{told}: batches, keys or head sizes do not fit one another")
    if heads % key_heads or (heads != key_heads and not enable_gqa):
        raise TraceError(f"{told}: expected equal numbers of heads, or a multiple with enable_gqa=True")
    if block_mask is None:
        return
    lengths = tuple(block_mask.seq_lengths)
    if lengths != (tokens, num_keys):
        raise TraceError(f"{told}: the BlockMask is of {lengths[0]} queries and {lengths[1]} keys: make another")
    rows = tuple(block_mask.kv_num_blocks.shape[:2])
    if batch % rows[0] or rows[1] not in (1, heads):
        raise TraceError(f"{told}: the BlockMask is of {rows[0]} samples and {rows[1]} heads: expected as many, or 1")
    _refuse_orders(block_mask)


def _refuse_orders(mask: BlockMask) -> None:
    if any(getattr(mask, name, None) is not None for name in _ORDERS):
        raise TraceError(_NO_ORDERS)


def register_block_mask() -> None:
    """BlockMasks may be arguments of models, with the tensors that their functions capture."""
    if BlockMask not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            BlockMask,
            _leaves,
            _joined,
            flatten_with_keys_fn=_named_leaves,
            serialized_type_name="torch.nn.attention.flex_attention.BlockMask",
        )


@dataclass(frozen=True, eq=False)
class _KnownMask:
    """The function of a BlockMask that was taken apart."""

    name: str
    captured: tuple[Any, ...]

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        function = functions_called(self.name).mask
        assert function is not None, f"{self.name} has no mask"
        return function(batch, head, query, key, *self.captured)


def _leaves(mask: BlockMask) -> tuple[list[Any], tuple[Any, ...]]:
    """By torch's own way the leaves depend on whether a model is exported."""
    if isinstance(mask.mask_mod, _KnownMask):
        name, captured = mask.mask_mod.name, mask.mask_mod.captured
    else:
        name, captured = traced(None, mask.mask_mod, mask.kv_num_blocks.device)
    _refuse_orders(mask)
    tensors = [getattr(mask, each) for each in _TENSORS]
    return [*tensors, *captured], (tuple(mask.seq_lengths), tuple(mask.BLOCK_SIZE), name)


def _named_leaves(mask: BlockMask) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    leaves, context = _leaves(mask)
    names = [*_TENSORS, *(f"captured_{i}" for i in range(len(leaves) - len(_TENSORS)))]
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves)], context


def _joined(leaves: Iterable[Any], context: tuple[Any, ...]) -> BlockMask:
    """Not by its constructor, which asks the leaves for their dims: they may be of any type."""
    values, (lengths, size, name) = list(leaves), context
    mask = BlockMask.__new__(BlockMask)
    vars(mask).update(dict(zip(_TENSORS, values)) | dict.fromkeys((*_ORDERS, "dq_kv_order_spt")))
    vars(mask).update(seq_lengths=lengths, BLOCK_SIZE=size, mask_mod=_KnownMask(name, tuple(values[len(_TENSORS) :])))
    return mask


def block_mask(given: SimpleNamespace) -> BlockMask:
    """The result of `create_block_mask` for these arguments: the function is computed at all indices at once."""
    if getattr(given, "compute_dq_write_order", False):
        raise TraceError(_NO_ORDERS)
    size = given.BLOCK_SIZE if isinstance(given.BLOCK_SIZE, tuple | list) else (given.BLOCK_SIZE, given.BLOCK_SIZE)
    lengths, leading = (given.Q_LEN, given.KV_LEN), (given.B or 1, given.H or 1)
    device = torch.device(given.device or torch.get_default_device())
    name, captured = traced(None, given.mask_mod, device)
    indices = [
        torch.arange(n, dtype=torch.int32, device=device).view([-1 if i == place else 1 for i in range(4)])
        for place, n in enumerate((*leading, *lengths))
    ]
    is_seen = broadcasting(name)(*indices, *captured).expand(*leading, *lengths)
    blocks = [-(-length // own) for length, own in zip(lengths, size)]
    padded = F.pad(is_seen, (0, blocks[1] * size[1] - lengths[1], 0, blocks[0] * size[0] - lengths[0]))
    num_seen = padded.view(*leading, blocks[0], size[0], blocks[1], size[1]).sum((3, 5))
    is_full = num_seen == size[0] * size[1]
    separates = getattr(given, "separate_full_blocks", True)  # from torch 2.13 on
    kinds = ((num_seen > 0) & ~is_full, is_full) if separates else (num_seen > 0, None)
    by_queries = [each for kind in kinds for each in _ordered(kind)]
    by_keys = [each for kind in kinds for each in _ordered(None if kind is None else kind.mT)]
    tensors: dict[str, Any] = dict(zip(_TENSORS, (*by_queries, *by_keys)))
    return BlockMask(lengths, **tensors, BLOCK_SIZE=(size[0], size[1]), mask_mod=given.mask_mod)


def _ordered(is_wanted: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(their number, their indices and behind these the others') of the wanted blocks of each row."""
    if is_wanted is None:
        return None, None
    wanted = is_wanted.to(torch.int32)
    indices = torch.argsort(wanted, dim=-1, descending=True, stable=True)
    return wanted.sum(-1).to(torch.int32), indices.to(torch.int32).contiguous()
