"""Tracing a model on the meta device as if it were on the CPU.

Model code asks tensors for their device: it picks kernels by it, and makes tensors from numbers on it, which on the meta device loses
the numbers. So that a plan made from a meta model fits the real one, its tensors are replaced while tracing by fakes that say "cpu".
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch.export takes its fake tensors from here, there is no public way


@contextmanager
def as_if_on_cpu(model: nn.Module) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Swap every parameter and buffer for a CPU fake and swap them back at the end; yields what makes such a fake of a tensor."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}

    def imagine(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    originals = [dict(table) for table in tables]
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in fakes:
                    fakes[id(tensor)] = imagine(tensor)
                table[name] = None if tensor is None else fakes[id(tensor)]
        yield imagine
    finally:
        for table, original in zip(tables, originals):
            table.update(original)
