"""Time of an op on one device: a roofline on its local shapes."""

import math
from collections.abc import Callable, Mapping

from autopar.costmodel.activations.autograd_footprint import footprint
from autopar.costmodel.cluster.hardware import Cluster
from autopar.ir.graph import Op, Value, arguments_of
from autopar.sbp.placement import local_shape
from autopar.sbp.signature import Strategy

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]

# Backward of fused attention runs 5 products for the 2 of forward (Dao, FlashAttention-2, 2023, section 4.1).
ATTENTION_BACKWARD_RATIO = 2.5


def _matmul(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    return 2.0 * math.prod(outputs[0]) * inputs[0][-1]


def _addmm(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    return 2.0 * math.prod(outputs[0]) * inputs[1][-1]


def _einsum(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    left = arguments_of(op)["equation"].replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for letters, shape in zip(left, inputs):
        named = letters.replace("...", "")
        free = len(shape) - len(named)
        start = letters.find("...")
        split = start if start >= 0 else len(letters)
        sizes.update(zip(named[:split], shape))
        sizes.update(zip(named[split:], shape[split + free :]))
        sizes.update({f"...{free - i}": size for i, size in enumerate(shape[split : split + free])})
    return 2.0 * math.prod(sizes.values()) if len(inputs) > 1 else 0.0


def _conv(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    arguments = arguments_of(op)
    is_transposed = "transpose" in op.target or bool(arguments.get("transposed"))
    return 2.0 * math.prod(inputs[0] if is_transposed else outputs[0]) * math.prod(inputs[1][1:])


def _attention(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    query, value = inputs[0], inputs[2]
    # a causal mask leaves half of the scores; of split queries the last part, which all wait for, sees more of the keys
    seen = 1 - 0.5 * query[-2] / value[-2] if arguments_of(op)["is_causal"] else 1.0
    pairs = math.prod(query[:-1]) * value[-2] * seen
    return 2.0 * pairs * (query[-1] + value[-1])


def _inner(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    return 2.0 * math.prod(outputs[0]) * (inputs[0][-1] if inputs[0] else 1)


def _tensordot(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    return 2.0 * math.prod(outputs[0]) * math.prod(inputs[0][dim] for dim in arguments_of(op)["dims_self"])


def _recurrent(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    """Each weight of each layer and direction meets each step of each sample."""
    weights = [shape for shape, value in zip(inputs, op.inputs) if value in _weights(op)]
    return 2.0 * math.prod(inputs[0][:-1]) * sum(map(math.prod, weights))


def _weights(op: Op) -> tuple[Value, ...]:
    """The matrices among the parameters of a recurrent op."""
    slots = arguments_of(op)["params"]
    return tuple(value for value in (op.inputs[slot.index] for slot in slots) if len(value.shape) == 2)


# Flops of one forward run on local shapes, by name of the op without overload; what is absent only moves bytes.
FLOPS: Mapping[str, Callable[[Op, Shapes, Shapes], float]] = {
    "aten.linear": _matmul,
    "autopar.turned_linear": _matmul,
    "aten.matmul": _matmul,
    "aten.mm": _matmul,
    "aten.bmm": _matmul,
    "aten.mv": _matmul,
    "aten.dot": _matmul,
    "aten._grouped_mm": _matmul,
    "transformers.grouped_mm_fallback": _matmul,
    "aten.inner": _inner,
    "aten.tensordot": _tensordot,
    "aten.lstm": _recurrent,
    "aten.gru": _recurrent,
    "aten.rnn_tanh": _recurrent,
    "aten.rnn_relu": _recurrent,
    "aten.addmm": _addmm,
    "aten.baddbmm": _addmm,
    "aten.addmv": _addmm,
    "aten.einsum": _einsum,
    "aten.conv1d": _conv,
    "aten.conv2d": _conv,
    "aten.conv3d": _conv,
    "aten.conv_transpose1d": _conv,
    "aten.conv_transpose2d": _conv,
    "aten.conv_transpose3d": _conv,
    "aten.convolution": _conv,
    "aten.scaled_dot_product_attention": _attention,
}


def family(target: str) -> str:
    """The target without its overload."""
    return target.rsplit(".", 1)[0]


def local_shapes(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Shapes, Shapes]:
    """Local shapes of the inputs and of the outputs."""
    inputs = tuple(local_shape(v.shape, strategy.input_layout(i), mesh_shape) for i, v in enumerate(op.inputs))
    return inputs, tuple(local_shape(v.shape, strategy.output_layout(i), mesh_shape) for i, v in enumerate(op.outputs))


def op_flops(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    """Flops of a forward run of `op` on tensors of these shapes: those of its products, 0 for other ops."""
    count = FLOPS.get(family(op.target))
    return count(op, inputs, outputs) if count else 0.0


def op_bytes(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    """Bytes a forward run reads and writes; 0 for views."""
    if footprint(op).is_view:
        return 0.0
    read = [math.prod(shape) * value.dtype.itemsize for shape, value in zip(inputs, op.inputs)]
    written = sum(math.prod(shape) * value.dtype.itemsize for shape, value in zip(outputs, op.outputs))
    if family(op.target) == "aten.embedding":
        read[0] = min(read[0], written)  # reads the rows it looks up
    return float(sum(read) + written)


def op_time(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...], cluster: Cluster) -> tuple[float, float]:
    """Seconds of forward and backward on one device: the larger of flops over flop/s and bytes over memory bandwidth.

    Backward of a product is one product per input that needs a gradient; other ops move as many bytes as forward.
    """
    return shapes_time(op, *local_shapes(op, strategy, mesh_shape), cluster)


def shapes_time(op: Op, inputs: Shapes, outputs: Shapes, cluster: Cluster) -> tuple[float, float]:
    """`op_time` for given local shapes."""
    if not op.outputs:
        return 0.0, 0.0
    flops_s = op_flops(op, inputs, outputs) / cluster.peak_flops_per_s(op.outputs[0].dtype)
    bytes_s = op_bytes(op, inputs, outputs) / cluster.memory_bandwidth_bytes_per_s
    products = _backward_products(op) if flops_s else 1.0
    is_tracked = not op.is_no_grad and any(value.needs_grad for value in op.outputs)
    return max(flops_s, bytes_s), max(products * flops_s, bytes_s * max(products, 1.0)) if is_tracked else 0.0


def _backward_products(op: Op) -> float:
    """Products of backward, in products of forward."""
    if family(op.target) == "aten.scaled_dot_product_attention":
        return ATTENTION_BACKWARD_RATIO
    return float(sum(value.needs_grad for value in _operands(op)))


# Products of an activation and a weight.
_LAYERS = frozenset(
    f"aten.{name}" for name in ("linear", "addmm", "mm", "conv1d", "conv2d", "conv3d", "convolution")
) | {"autopar.turned_linear"}


def weight_share(op: Op) -> float:
    """What part of a layer's backward makes its weight's gradient: one of its products; 0 for other ops."""
    if family(op.target) not in _LAYERS:
        return 0.0
    activation, weight = _operands(op)
    return weight.needs_grad / max(1, activation.needs_grad + weight.needs_grad)


def _operands(op: Op) -> tuple[Value, ...]:
    """The factors of a product, without what is added to it."""
    count = FLOPS[family(op.target)]
    if count is _einsum:
        return op.inputs
    if count is _recurrent:
        return op.inputs[0], _weights(op)[0]
    return op.inputs[1:3] if count is _addmm else op.inputs[:2]
