"""Tracing of a model on the meta device as if it were on the CPU.

Model code depends on the device of tensors: it chooses kernels by it, and makes tensors from numbers on it, which on
the meta device loses the numbers. So that a plan made from a meta model fits the real one, its tensors are replaced
while tracing by fake tensors on "cpu".
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.torch_compat import FakeTensorMode


@contextmanager
def as_if_on_cpu(model: nn.Module) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """A context in which parameters and buffers are fake tensors; its value makes a fake tensor like a given one."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def make(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return fake_like(tensor)

    with replaced_tensors(model, make):
        yield make


def fake_like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor like `tensor`, on the CPU if that is on the meta device; a fake one under a FakeTensorMode."""
    device = "cpu" if tensor.is_meta else tensor.device
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def replaced_tensors(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """A context in which `make` of each parameter and buffer replaces it; ties are kept."""
    fakes: dict[int, torch.Tensor] = {}
    tables: list[dict[str, Any]] = [
        table for module in model.modules() for table in (module._parameters, module._buffers)
    ]
    originals = [dict(table) for table in tables]
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in fakes:
                    fakes[id(tensor)] = make(tensor)
                table[name] = None if tensor is None else fakes[id(tensor)]
        yield
    finally:
        for table, original in zip(tables, originals):
            table.update(original)
