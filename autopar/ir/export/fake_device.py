"""Tracing a model on the meta device as if it were on the CPU.

Model code asks tensors for their device: it picks kernels by it, and makes tensors from numbers on it, which on the
meta device loses the numbers. So that a plan made from a meta model fits the real one, its tensors are replaced while
tracing by fakes that say "cpu".
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autopar.torch_compat import FakeTensorMode


@contextmanager
def as_if_on_cpu(model: nn.Module) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Swap every parameter and buffer for a fake and swap them back at the end; yields what makes such a fake of a
    tensor.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def imagine(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return imagine_like(tensor)

    with imagined(model, imagine):
        yield imagine


def imagine_like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor like this one, but on the CPU if it is on the meta device; a fake one if a FakeTensorMode is
    active.
    """
    device = "cpu" if tensor.is_meta else tensor.device
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def imagined(model: nn.Module, imagine: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Put what `imagine` makes of it in the place of every parameter and buffer, and put them back at the end; ties are
    kept.
    """
    fakes: dict[int, torch.Tensor] = {}
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    originals = [dict(table) for table in tables]
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in fakes:
                    fakes[id(tensor)] = imagine(tensor)
                table[name] = None if tensor is None else fakes[id(tensor)]
        yield
    finally:
        for table, original in zip(tables, originals):
            table.update(original)
