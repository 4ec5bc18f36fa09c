"""Linear layers whose three products are of float8, with scales taken from the largest magnitudes, as people write them
(torchao.float8's dynamic scaling): one scale a tensor, or one a row.
"""

from typing import Any

import torch
from torch import nn

TENSORWISE, ROWWISE = "tensorwise", "rowwise"
Pair = tuple[torch.Tensor, torch.Tensor]


def quantised(x: torch.Tensor, dtype: torch.dtype, dim: int | None) -> Pair:
    """`x` in float8 and the scale that it was divided by: of all of it, or along `dim` of each row."""
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (largest.double().clamp(min=1e-12) / torch.finfo(dtype).max).float()
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


def product(a: Pair, b: Pair, dtype: torch.dtype) -> torch.Tensor:
    """a [m, k] times b [k, n]."""
    left, right = a[0].contiguous(), b[0].t().contiguous().t()
    scales = (
        scale.clone(memory_format=torch.contiguous_format) for scale in (a[1], b[1])
    )  # a stride of 1 is asked for
    return torch._scaled_mm(left, right, *scales, out_dtype=dtype)


class Float8Product(torch.autograd.Function):
    """x [.., k] times weight [n, k] transposed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scaling: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        dim = None if scaling == TENSORWISE else 1
        flat, turned = quantised(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn, dim), weight
        of_weight = quantised(turned, torch.float8_e4m3fn, dim)
        result = product(flat, (of_weight[0].t(), of_weight[1].t()), x.dtype)
        return result.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        rows, columns = (None, None) if ctx.scaling == TENSORWISE else (1, 0)
        wide = torch.float8_e5m2 if ctx.scaling == TENSORWISE else torch.float8_e4m3fn
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_rows = quantised(flat, wide, rows)
        of_x = product(of_rows, quantised(weight, torch.float8_e4m3fn, columns), x.dtype)
        of_columns = of_rows if columns is None else quantised(flat, wide, columns)
        inputs = quantised(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn, columns)
        of_weight = product((of_columns[0].t(), of_columns[1].t()), inputs, weight.dtype)
        return of_x.reshape(x.shape), of_weight, None


class Float8Linear(nn.Linear):
    """A linear layer in float8."""

    scaling = TENSORWISE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = Float8Product.apply(x, self.weight, self.scaling)
        return result if self.bias is None else result + self.bias


def in_float8(model: nn.Module, scaling: str = TENSORWISE) -> nn.Module:
    """`model` with all linear layers in float8, but for those named `head`."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not name.endswith("head"):
            module.__class__, module.scaling = Float8Linear, scaling
    return model
