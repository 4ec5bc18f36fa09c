"""Forms of torch's ops whose gradients consist of ops that ranks can split, and that can be differentiated again.

Norms are written out, for their fused backwards read statistics that autograd takes for constants, and give several
tensors or none. Backwards of convolutions are convolutions, and those of pointwise ops are torch's own decompositions.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Given = Mapping[str, Any]

# Those whose decomposition is a function of the gradient and the values alone, without statistics.
_DECOMPOSED = """tanh sigmoid threshold leaky_relu softplus gelu silu mish hardswish hardsigmoid hardtanh elu logit
    glu _prelu_kernel mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss nll_loss
    nll_loss2d _softmax_data _log_softmax_data select slice diagonal unfold embedding_dense"""
# Those of which a backward reads more than the result: the weight of all targets, which follows from these alone.
_FORWARD = ("aten.nll_loss_forward", "aten.nll_loss2d_forward")


@lru_cache(maxsize=1)
def backward_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions under which a backward is traced."""
    names = {f"aten.{name.replace('_data', '')}_backward{'_data' * ('_data' in name)}" for name in _DECOMPOSED.split()}
    names.update(_FORWARD)
    known = torch.export.default_decompositions().items()
    table = {op: function for op, function in known if str(op).removesuffix(".default") in names}
    return table | {torch.ops.aten.convolution_backward.default: _convolution_backward}


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *options: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a convolution with respect to `x`, `weight` and bias (V. Dumoulin, F. Visin: A guide to
    convolution arithmetic for deep learning, arXiv 1603.07285, chapter 4).
    """
    _, stride, padding, dilation, transposed, _, groups, output_mask = options
    spatial, kernel = x.dim() - 2, weight.shape[2:]
    stride, padding, dilation = (_each(given, spatial) for given in (stride, padding, dilation))
    of_x = of_weight = of_bias = None
    if output_mask[0] and transposed:
        of_x = torch.convolution(grad, weight, None, stride, padding, dilation, False, [0] * spatial, groups)
    elif output_mask[0]:
        reached = [
            (n - 1) * s - 2 * p + d * (k - 1) + 1
            for n, s, p, d, k in zip(grad.shape[2:], stride, padding, dilation, kernel)
        ]
        rest = [n - m for n, m in zip(x.shape[2:], reached)]
        of_x = torch.convolution(grad, weight, None, stride, padding, dilation, True, rest, groups)
    if output_mask[1]:
        around, inside = (grad, x) if transposed else (x, grad)
        # Each channel is a sample, and the samples are the channels; groups of the weight are groups of both.
        around = around.unflatten(1, (groups, -1)).permute(2, 1, 0, *range(3, spatial + 3)).flatten(1, 2)
        inside = inside.unflatten(1, (groups, -1)).permute(1, 2, 0, *range(3, spatial + 3)).flatten(0, 1)
        made = torch.convolution(around, inside, None, dilation, padding, stride, False, [0] * spatial, groups)
        for dim, size in enumerate(kernel):
            made = made.narrow(dim + 2, 0, size)
        of_weight = made.transpose(0, 1)
    if output_mask[2]:
        of_bias = grad.sum([0, *range(2, grad.dim())])
    return of_x, of_weight, of_bias


def _each(given: Sequence[int], count: int) -> list[int]:
    return list(given) * count if len(given) == 1 else list(given)


def _normed(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`x`, with channels in dim 1, times `weight` plus `bias`."""
    weight, bias = (None if each is None else each.view(-1, *[1] * (x.dim() - 2)) for each in (weight, bias))
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(given: Given) -> Tensor:
    made = _normed(given["input"], list(range(-len(given["normalized_shape"]), 0)), given["eps"])
    made = made if given["weight"] is None else made * given["weight"]
    return made if given["bias"] is None else made + given["bias"]


def _rms_norm(given: Given) -> Tensor:
    x, eps, dims = given["input"], given["eps"], list(range(-len(given["normalized_shape"]), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    made = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return made if given["weight"] is None else made * given["weight"]


def _group_norm(given: Given) -> Tensor:
    x = given["input"]
    parts = x.reshape(x.shape[0], given["num_groups"], -1)
    return _scaled(_normed(parts, [2], given["eps"]).reshape(x.shape), given["weight"], given["bias"])


def _batch_norm(given: Given) -> Tensor:
    x, mean, variance = given["input"], given["running_mean"], given["running_var"]
    if given["training"] or mean is None or variance is None:
        made = _normed(x, [0, *range(2, x.dim())], given["eps"])
    else:
        shape = (-1, *[1] * (x.dim() - 2))
        made = (x - mean.view(shape)) * torch.rsqrt(variance.view(shape) + given["eps"])
    return _scaled(made, given["weight"], given["bias"])


def _instance_norm(given: Given) -> Tensor:
    if not given["use_input_stats"]:
        return _batch_norm({**given, "training": False})
    made = _normed(given["input"], list(range(2, given["input"].dim())), given["eps"])
    return _scaled(made, given["weight"], given["bias"])


def _batch_norm_with_statistics(given: Given) -> tuple[Tensor, ...]:
    mean, variance = given["running_mean"].detach(), given["running_var"].detach()
    return _batch_norm(given), mean, mean, mean, variance  # of which only the first has a gradient


def _log_sigmoid(given: Given) -> Tensor:
    return -torch.nn.functional.softplus(-given["self"])


# Each takes the arguments of the op by their names in its schema.
WRITTEN_OUT: Mapping[str, Callable[[Given], Any]] = {
    "aten.layer_norm.default": _layer_norm,
    "aten.log_sigmoid.default": _log_sigmoid,  # whose backward reads what forward kept
    "aten.rms_norm.default": _rms_norm,
    "aten.group_norm.default": _group_norm,
    "aten.batch_norm.default": _batch_norm,
    "aten.instance_norm.default": _instance_norm,
    "aten._native_batch_norm_legit_functional.default": _batch_norm_with_statistics,
}
