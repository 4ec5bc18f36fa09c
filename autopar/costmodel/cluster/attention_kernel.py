"""The kernel that torch picks for attention on a GPU, by shapes and dtype.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. FlashAttention needs compute capability 8.0, as does
bfloat16 in the memory-efficient kernel. cuDNN's kernel, preferred on some GPUs, stands beside FlashAttention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The fused kernels; attention that none of them takes is written out as separate products.
FLASH, EFFICIENT, SEPARATE = "flash", "efficient", "separate"
FUSED = (FLASH, EFFICIENT)
# In place of the kernels of a device: whichever is fastest, for lower bounds.
ANY = "any"

_HALVES = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_HEAD = 256


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The facts of an attention that decide on its kernel; shapes are [batch, heads, tokens, head size]."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    has_mask: bool
    is_causal: bool


def attention_kernel(call: AttentionCall, kernels: Sequence[str] = FUSED) -> str:
    """The kernel of a device that has the fused `kernels`.

    >>> heads = (8, 16, 1024, 64)
    >>> call = AttentionCall(heads, heads, heads, torch.bfloat16, has_mask=False, is_causal=True)
    >>> attention_kernel(call), attention_kernel(call, ("efficient",))
    ('flash', 'separate')
    """
    if FLASH in kernels and _takes_flash(call):
        return FLASH
    return EFFICIENT if EFFICIENT in kernels and _takes_efficient(call, kernels) else SEPARATE


def _takes_flash(call: AttentionCall) -> bool:
    is_square = call.query[-2] == call.key[-2] or not call.is_causal
    is_alike = call.query[-1] == call.key[-1] == call.value[-1] <= _LARGEST_FLASH_HEAD
    return len(call.query) == 4 and not call.has_mask and call.dtype in _HALVES and is_square and is_alike


def _takes_efficient(call: AttentionCall, kernels: Sequence[str]) -> bool:
    """Whether the numbers of heads of queries and keys are equal, and sizes aligned; values may differ in size."""
    aligned = 16 // call.dtype.itemsize
    is_aligned = call.query[-1] == call.key[-1] and call.query[-1] % aligned == 0 == call.value[-1] % aligned
    dtypes = (torch.float16, torch.float32) + (torch.bfloat16,) * (FLASH in kernels)
    return len(call.query) == 4 and call.dtype in dtypes and call.query[1] == call.key[1] and is_aligned
