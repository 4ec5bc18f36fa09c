"""Parameters and buffers that share memory without being one tensor: in parts each would have memory of its own."""

from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError


@torch.no_grad()
def check_own_memory(module: nn.Module, written: Collection[str]) -> None:
    """AutoparError if a parameter, or a buffer that is `written`, has entries in the memory of another tensor."""
    parameters = dict(module.named_parameters())
    for one, other in _sharing(parameters | dict(module.named_buffers())):
        if {one, other} & {*parameters, *written}:
            kinds = ["parameter" if fqn in parameters else "buffer" for fqn in (one, other)]
            kind = f"two {kinds[0]}s" if kinds[0] == kinds[1] else f"a {kinds[0]} and a {kinds[1]}"
            raise AutoparError(
                f"{one} and {other} are {kind} in the same memory: on one device what is written to one is written to"
                " the other, and in parts each would be trained by itself. To tie them, make them one object"
                " (head.weight = embedding.weight) or use one of them in forward (F.linear(x, weight.t())); else"
                " clone() one of them"
            )


def _sharing(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs with an entry in the same place."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for fqn, x in tensors.items():
        if not isinstance(x, DTensor) and not x.is_meta and x.numel():
            by_storage.setdefault(x.untyped_storage()._cdata, []).append((fqn, x))
    for held in by_storage.values():
        for number, (one, x) in enumerate(held):
            yield from ((one, other) for other, y in held[number + 1 :] if _have_common_entry(x, y))


def _have_common_entry(x: torch.Tensor, y: torch.Tensor) -> bool:
    (start, end), (begin, last) = _extent(x), _extent(y)
    if end <= begin or last <= start:
        return False
    size = x.untyped_storage().nbytes() // x.element_size()
    if x.dtype != y.dtype or x.is_complex():
        return True
    marks = torch.zeros(size, dtype=torch.bool)
    marks.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return bool(marks.as_strided(y.shape, y.stride(), y.storage_offset()).any())


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The bytes of the storage from its first to its last entry."""
    first, size = int(x.storage_offset()), x.element_size()
    last = first + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return first * size, (last + 1) * size
