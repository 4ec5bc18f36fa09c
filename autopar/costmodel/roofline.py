"""The time of an op on one device, by a roofline on its local shapes."""

import math
from dataclasses import replace

import torch

from autopar.costmodel.activations.autograd_footprint import footprint
from autopar.costmodel.cluster.attention_kernel import ANY, SEPARATE, AttentionCall, attention_kernel
from autopar.costmodel.cluster.hardware import Cluster
from autopar.costmodel.cluster.measured_terms import memory_share, product_share
from autopar.costmodel.function_flops import function_flops
from autopar.ir.function_ops import is_function
from autopar.ir.functions.function_body import body_on
from autopar.ir.graph import Graph, Op, arguments_of
from autopar.ir.inference.append_op import APPEND, WRITE
from autopar.ir.loops.body import body_called
from autopar.ir.loops.scan_op import SCAN
from autopar.ir.op_facts import ATTENTION, FLEX_ATTENTION, Shapes, facts_of, family, share_of_step
from autopar.mesh import Mesh
from autopar.sbp.assignment import Assignment
from autopar.sbp.placement import local_shape
from autopar.sbp.signature import Strategy


def local_shapes(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> tuple[Shapes, Shapes]:
    """The local shapes of the inputs and of the outputs of `op` under `strategy`."""
    inputs = tuple(local_shape(v.shape, strategy.input_layout(i), mesh_shape) for i, v in enumerate(op.inputs))
    return inputs, tuple(local_shape(v.shape, strategy.output_layout(i), mesh_shape) for i, v in enumerate(op.outputs))


def op_flops(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    """Flops of a forward of `op` on tensors of these shapes, those of its products; 0 for other ops."""
    if is_function(op):
        return function_flops(op, inputs)[0]
    product = facts_of(op.target).product
    return product.flops(op, inputs, outputs) if product else 0.0


def training_flops(op: Op) -> float:
    """Flops of a forward and a backward of `op` as a whole, those of its products."""
    shapes = tuple(value.shape for value in op.inputs), tuple(value.shape for value in op.outputs)
    flops = op_flops(op, *shapes)
    return flops * (1 + _backward_products(op, shapes[0])) if flops else 0.0


def products_s(op: Op, cluster: Cluster) -> float:
    """Seconds that the products of a forward and a backward of `op` as a whole take at the cluster's rates."""
    body = body_on(op, tuple(value.shape for value in op.inputs))
    if body is None:
        flops = training_flops(op)
        return flops / cluster.peak_flops_per_s(_rate_dtype(op)) if flops else 0.0
    return sum(products_s(inner, cluster) for inner in body.ops)


def op_bytes(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    """Bytes that a forward of `op` reads and writes; 0 for views, of writes in place the new rows alone."""
    if footprint(op).is_view:
        return 0.0
    read = [math.prod(shape) * value.dtype.itemsize for shape, value in zip(inputs, op.inputs)]
    written = sum(math.prod(shape) * value.dtype.itemsize for shape, value in zip(outputs, op.outputs))
    if op.target in (APPEND, WRITE):
        return 2.0 * read[-1]
    if facts_of(op.target).is_lookup:
        read[0] = min(read[0], written)
    return float(sum(read) + written)


def op_time(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...], cluster: Cluster) -> tuple[float, float]:
    """Seconds of forward and backward on one device.

    Each kernel takes the larger of flops over flop/s and bytes over memory bandwidth, at the shares of these that the
    op reaches on the cluster, and the fixed cost of a kernel. Backward of a product is one product per input that needs
    a gradient; other ops move as many bytes as forward.
    """
    return shapes_time(op, *local_shapes(op, strategy, mesh_shape), cluster)


def shapes_time(op: Op, inputs: Shapes, outputs: Shapes, cluster: Cluster) -> tuple[float, float]:
    """`op_time` for given local shapes."""
    if not op.outputs:
        return 0.0, 0.0
    if op.target == SCAN:
        return _in_steps(op, inputs, outputs, cluster)
    if family(op.target) == ATTENTION and _is_dense(op, inputs):
        return _written_out(op, inputs, outputs, cluster)
    if is_function(op):
        return _as_ops(op, inputs, outputs, cluster)
    if family(op.target) != ATTENTION:
        return _one_kernel(op, inputs, outputs, cluster)
    if not cluster.attention_kernels:
        return _fused(op, inputs, outputs, cluster)
    if cluster.attention_kernels == (ANY,):
        return min(_fused(op, inputs, outputs, cluster), _written_out(op, inputs, outputs, cluster), key=sum)
    is_fused = attention_kernel(_call(op, inputs), cluster.attention_kernels) != SEPARATE
    return (_fused if is_fused else _written_out)(op, inputs, outputs, cluster)


def _in_steps(op: Op, inputs: Shapes, outputs: Shapes, cluster: Cluster) -> tuple[float, float]:
    """A loop: its steps one after the other, computed again in backward, with what is carried and given out written.

    Kernels of a step take as many times less as its results are smaller than the whole ones, but for their fixed cost.
    """
    share, once = share_of_step(op, outputs), replace(cluster, kernel_s=0.0)
    steps_s = [0.0, 0.0]
    for inner in body_called(op.args[3]).ops:
        whole = tuple(value.shape for value in inner.inputs), tuple(value.shape for value in inner.outputs)
        for number, (own_s, all_s) in enumerate(
            zip(shapes_time(inner, *whole, once), shapes_time(inner, *whole, cluster))
        ):
            steps_s[number] += own_s * share + all_s - own_s
    written_s = op_bytes(op, inputs, outputs) / cluster.memory_bandwidth_bytes_per_s
    forward_s, backward_s = (op.args[-1] * each_s for each_s in steps_s)
    is_tracked = not op.is_no_grad and any(value.needs_grad for value in op.outputs)
    return forward_s + written_s, forward_s + backward_s + written_s if is_tracked else 0.0


def _as_ops(op: Op, inputs: Shapes, outputs: Shapes, cluster: Cluster) -> tuple[float, float]:
    """A custom function: the kernels of its ops, one after the other; as one kernel where these are not known.

    Products that have no facts, such as a convolution's backward, count by torch's flops of the whole function.
    """
    body = body_on(op, inputs)
    if body is None:
        return _one_kernel(op, inputs, outputs, cluster)
    times = []
    for ops, counted in zip((body.forward, body.backward), function_flops(op, inputs)):
        seconds, flops = 0.0, 0.0
        for inner in ops:
            shapes = tuple(value.shape for value in inner.inputs), tuple(value.shape for value in inner.outputs)
            seconds += shapes_time(inner, *shapes, cluster)[0]
            flops += op_flops(inner, *shapes)
        times.append(seconds + max(0.0, counted - flops) / cluster.peak_flops_per_s(op.outputs[0].dtype))
    is_tracked = not op.is_no_grad and any(value.needs_grad for value in op.outputs)
    return times[0], times[1] if is_tracked else 0.0


def _is_dense(op: Op, inputs: Shapes) -> bool:
    """Whether parts of the keys are masked, which go around a ring (`sbp.local_ops`): no kernel gives their sums."""
    return inputs[1][-2] < op.inputs[1].shape[-2] and arguments_of(op)["attn_mask"] is not None


def _call(op: Op, inputs: Shapes) -> AttentionCall:
    arguments = arguments_of(op)
    query, key, value, *_ = inputs
    # causal attention of a part of the queries is squares on the diagonal and whole blocks
    is_causal = bool(arguments["is_causal"]) and query[-2] == op.inputs[0].shape[-2]
    drops_parts = arguments["dropout_p"] > 0 and bool(arguments["is_causal"]) and not is_causal  # by a mask
    has_mask = arguments["attn_mask"] is not None or drops_parts
    return AttentionCall(query, key, value, op.inputs[0].dtype, has_mask, is_causal)


def _written_out(op: Op, inputs: Shapes, outputs: Shapes, cluster: Cluster) -> tuple[float, float]:
    """Attention as separate products, softmax, mask and dropout, as torch's `_scaled_dot_product_attention_math`.

    Scores are written or read by both products 2 times in forward and 4 in backward, by softmax 2 and 3 times, by a
    mask 2 and 0, by dropout, which draws, scales and multiplies a mask of floats, 6 and 3. They and the products are at
    least float32 (torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp is off), and a causal mask leaves out none.
    """
    arguments, dtype = arguments_of(op), op.inputs[0].dtype
    wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
    query, _, value, *_ = inputs
    num_scores = math.prod(query[:-1]) * op.inputs[1].shape[-2]
    has_mask, drops = arguments["attn_mask"] is not None or arguments["is_causal"], arguments["dropout_p"] > 0
    pass_s = num_scores * wide.itemsize / cluster.memory_bandwidth_bytes_per_s
    once_s = 2.0 * num_scores * (query[-1] + value[-1]) / cluster.peak_flops_per_s(wide)
    once_s += op_bytes(op, inputs, outputs) / cluster.memory_bandwidth_bytes_per_s
    forward_s = once_s + (4 + 2 * has_mask + 6 * drops) * pass_s + 4 * cluster.kernel_s
    if op.is_no_grad or not any(value.needs_grad for value in op.outputs):
        return forward_s, 0.0
    return forward_s, 2 * once_s + (7 + 3 * drops) * pass_s + 6 * cluster.kernel_s


# Passes over a result by a part of the keys that went around a ring, in float32, to merge it with that by the parts
# before: both are multiplied by their shares, added and written in place; and over a gradient, which is added to the
# sum (`sbp.local_ops.sequence.attention_blocks`). Each takes one of the narrow result beside them.
_MERGE_PASSES, _ADD_PASSES = 7, 2


def _fused(op: Op, inputs: Shapes, outputs: Shapes, cluster: Cluster) -> tuple[float, float]:
    """Attention by a fused kernel; of keys that go around a ring one for each part, with their results merged."""
    forward_s, backward_s = _one_kernel(op, inputs, outputs, cluster)
    num_parts = op.inputs[1].shape[-2] // max(1, inputs[1][-2])
    if num_parts <= 1:
        return forward_s, backward_s
    size = op.outputs[0].dtype.itemsize
    pass_s = num_parts * max(size, torch.float32.itemsize) / cluster.memory_bandwidth_bytes_per_s
    narrow_s = num_parts * size / cluster.memory_bandwidth_bytes_per_s
    forward_s += math.prod(outputs[0]) * (_MERGE_PASSES * pass_s + narrow_s)
    if backward_s:
        backward_s += sum(map(math.prod, inputs[:3])) * (_ADD_PASSES * pass_s + narrow_s)
    return forward_s, backward_s


def _one_kernel(op: Op, inputs: Shapes, outputs: Shapes, cluster: Cluster) -> tuple[float, float]:
    flops, rate_dtype = op_flops(op, inputs, outputs), _rate_dtype(op)
    flops_s = again_s = flops / cluster.peak_flops_per_s(rate_dtype) if flops else 0.0
    dtype = str(rate_dtype).removeprefix("torch.")
    if flops_s and cluster.product_shares:
        reuse = least_reuse(inputs, outputs, flops)
        forward, backward = product_share(cluster.product_shares, family(op.target), dtype, reuse)
        flops_s, again_s = flops_s / forward, again_s / backward
    if flops_s and dtype in cluster.unaligned_shares and not is_aligned(op, inputs, outputs):
        share = cluster.unaligned_shares[dtype]
        flops_s, again_s = flops_s / share, again_s / share
    num_bytes = op_bytes(op, inputs, outputs)
    forward_s = backward_s = bytes_s = num_bytes / cluster.memory_bandwidth_bytes_per_s
    if bytes_s and cluster.memory_shares:
        dtype = str(op.outputs[0].dtype).removeprefix("torch.")
        row = memory_share(cluster.memory_shares, family(op.target), dtype, num_bytes)
        forward_s, backward_s = bytes_s / row.forward, bytes_s / row.backward
    fresh_s, fresh_back_s = _fresh_s(op, inputs, outputs, cluster)
    products = _backward_products(op, inputs) if flops_s else 1.0
    is_tracked = not op.is_no_grad and any(value.needs_grad for value in op.outputs)
    is_view = not flops_s and not bytes_s
    forward_s = max(flops_s, forward_s) + (0.0 if is_view else cluster.kernel_s) + fresh_s
    if not is_tracked:
        return forward_s, 0.0
    kernels_s = 0.0 if is_view else max(1, math.ceil(products)) * cluster.kernel_s
    return forward_s, max(products * again_s, backward_s * max(products, 1.0)) + kernels_s + fresh_back_s


_PASSED_ON = "aten.add", "aten.sub"  # gradients are that of the result


def _fresh_s(op: Op, inputs: Shapes, outputs: Shapes, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the memory of new tensors: results and what is saved beside them, and gradients of the inputs."""
    if not cluster.fresh_s_per_byte or footprint(op).is_view or op.target in (APPEND, WRITE):
        return 0.0, 0.0
    made = [math.prod(shape) * value.dtype.itemsize for shape, value in zip(outputs, op.outputs)]
    back = [math.prod(shape) * value.dtype.itemsize for shape, value in zip(inputs, op.inputs) if value.needs_grad]
    forward_s = sum(map(cluster.fresh_s, [*made, internal_bytes(op, inputs)]))
    return forward_s, 0.0 if family(op.target) in _PASSED_ON else sum(map(cluster.fresh_s, back))


def internal_bytes(op: Op, inputs: Shapes) -> int:
    """Bytes that `op` saves beyond its inputs and outputs, on local
    inputs of these shapes: split like its first input.
    """
    whole = footprint(op).internal_bytes
    if not whole or not op.inputs:
        return whole
    return whole * math.prod(inputs[0]) // max(math.prod(op.inputs[0].shape), 1)


def _rate_dtype(op: Op) -> torch.dtype:
    """The dtype at whose rate `op` multiplies: that of its factors, which may be narrower than the result."""
    product = facts_of(op.target).product
    return op.outputs[0].dtype if product is None else product.operands(op)[0].dtype


_ALIGNMENT_BYTES = 16


def is_aligned(op: Op, inputs: Shapes, outputs: Shapes) -> bool:
    """Whether rows of all matrices of a product are whole units of `_ALIGNMENT_BYTES`; true of other products."""
    product = facts_of(op.target).product
    if product is None or not product.is_of_matrices:
        return True
    tensors = [*zip(inputs, op.inputs), *zip(outputs[:1], op.outputs)]
    return not any(len(shape) > 1 and shape[-1] * value.dtype.itemsize % _ALIGNMENT_BYTES for shape, value in tensors)


def least_reuse(inputs: Shapes, outputs: Shapes, flops: float) -> float:
    """The fewest multiplications that an element of an operand or of the first output takes part in.

    A product of [m, k] and [k, n] has m k n multiplications, so it is the smallest of m, k and n, whatever batch dims
    there are.

    >>> least_reuse(((8, 64, 16), (8, 16, 32)), ((8, 64, 32),), 2.0 * 8 * 64 * 16 * 32)
    16.0
    """
    return min(flops / 2 / max(1, math.prod(shape)) for shape in (*inputs, *outputs[:1]))


def _backward_products(op: Op, inputs: Shapes) -> float:
    """The number of products of backward for each product of forward."""
    if is_function(op):
        forward, backward = function_flops(op, inputs)
        return backward / forward
    product = facts_of(op.target).product
    assert product is not None, f"{op.target} is no product"
    if family(op.target) == FLEX_ATTENTION and inputs[1][-2] < op.inputs[1].shape[-2]:
        return product.backward_ratio + 1  # around a ring forward is computed again
    return product.backward_ratio or float(sum(value.needs_grad for value in product.operands(op)))


def weight_gradients_s(
    graph: Graph, assignment: Assignment, mesh: Mesh, cluster: Cluster, *, is_split: bool = False
) -> float:
    """Seconds of backward for the gradients of weights, with those that splitting it takes if it `is_split`."""
    known: dict[tuple[int, int], float] = {}  # of a call and a strategy, which are kept as long as graph and assignment

    def of(op: Op) -> float:
        strategy = assignment.strategies[op.name]
        key = id(op.nameless), id(strategy)
        if key not in known:
            share = weight_share(op)
            known[key] = share * op_time(op, strategy, mesh.shape, cluster)[1] if share else 0.0
            if is_split:
                known[key] += splitting_s(op, *local_shapes(op, strategy, mesh.shape), cluster)
        return known[key]

    return sum(map(of, graph.ops))


# Fixed costs of kernels that a backward in two parts takes at each op that reads a weight and an activation: autograd
# is called for it once more (`runtime.pipeline.split_backward`). Measured on a CPU, where a kernel's is 25 us: 80 to
# 160 us for linear layers and norms of 256.
_CALLS = 4


def splitting_s(op: Op, inputs: Shapes, outputs: Shapes, cluster: Cluster) -> float:
    """Seconds by which backward of a layer on these local shapes is longer in two parts, for its input and its weight.

    A norm goes over all of its tensors each time.
    """
    is_norm = facts_of(op.target).is_norm and sum(value.needs_grad for value in op.inputs) > 1
    if not is_norm and not 0 < weight_share(op) < 1:
        return 0.0
    again_s = shapes_time(op, inputs, outputs, cluster)[1] if is_norm else 0.0
    return _CALLS * cluster.kernel_s + again_s


def weight_share(op: Op) -> float:
    """The share of a layer's backward that computes its weight's gradient, one of its products; 0 for other ops."""
    product = facts_of(op.target).product
    if product is None or product.weight != "always":
        return 0.0
    activation, weight = product.operands(op)
    return weight.needs_grad / max(1, activation.needs_grad + weight.needs_grad)
