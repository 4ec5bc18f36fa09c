"""`autopar.grouped_linear`: rows sorted by group, each times the weight of its group, stored as those of linear are."""

import torch

from autopar.ir.graph import resolve

GROUPED_LINEAR = "autopar.grouped_linear.default"

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("grouped_linear(Tensor input, Tensor weight, Tensor offs) -> Tensor")
_LIBRARY.define("grouped_loop(Tensor input, Tensor weight, Tensor offs) -> Tensor")
_LIBRARY.define("grouped_outer(Tensor left, Tensor right, Tensor offs) -> Tensor")

_ALIGNED_BYTES = 16  # that torch's kernel wants of the strides of rows


def _grouped_linear(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows offs[e - 1] to offs[e] of x [t, k] times weight[e] [n, k]; rows behind the last group are zero."""
    sizes = (size * weight.element_size() % _ALIGNED_BYTES for size in weight.shape[1:])
    has_kernel = x.dtype == weight.dtype == torch.bfloat16 and x.device.type != "cpu"
    if has_kernel and not any(sizes):
        return resolve("aten._grouped_mm.default")(x, weight.mT, offs)
    return torch.ops.autopar.grouped_loop.default(x, weight, offs)


def _grouped_loop(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The same, a product for each group."""
    out, start = x.new_zeros(x.shape[0], weight.shape[1]), 0
    for matrix, end in zip(weight, offs.tolist()):
        torch.mm(x[start:end], matrix.mT, out=out[start:end])
        start = end
    return out


def _grouped_outer(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """For each group the sum over its rows of left [t, n] times right [t, k]: [groups, n, k]."""
    out, start = left.new_zeros(offs.shape[0], left.shape[1], right.shape[1]), 0
    for matrix, end in zip(out, offs.tolist()):
        torch.mm(left[start:end].mT, right[start:end], out=matrix)
        start = end
    return out


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, offs = ctx.saved_tensors  # type: ignore[attr-defined]
    (gradient,) = gradients
    needs_x, needs_weight, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
    of_x = torch.ops.autopar.grouped_loop.default(gradient, weight.mT, offs) if needs_x else None
    return of_x, torch.ops.autopar.grouped_outer.default(gradient, x, offs) if needs_weight else None, None


_LIBRARY.impl("grouped_linear", _grouped_linear, "CompositeImplicitAutograd")
for _name, _kernel in (("grouped_loop", _grouped_loop), ("grouped_outer", _grouped_outer)):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _kernel, _device)
torch.library.register_fake(
    "autopar::grouped_loop", lambda x, weight, offs: x.new_empty(x.shape[0], weight.shape[1]), lib=_LIBRARY
)
torch.library.register_fake(
    "autopar::grouped_outer",
    lambda left, right, offs: left.new_empty(offs.shape[0], left.shape[1], right.shape[1]),
    lib=_LIBRARY,
)
torch.library.register_autograd("autopar::grouped_loop", _backward, setup_context=_keep, lib=_LIBRARY)
