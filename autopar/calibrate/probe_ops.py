"""Timed ops: products by shape and dtype, memory-bound ops by size, ops on next to nothing, and parameter updates."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.calibrate.call_time import TRIALS, Work, block_s, call_s, calls_within
from autopar.costmodel.cluster.hardware import FRESH_BYTES
from autopar.ir.call_args import call, resolve
from autopar.ir.graph import Op, Slot, Value
from autopar.runtime.interop.local_step import step_on_parts

T = TypeVar("T")
_MIB = 2**20
# The smallest dim of a product, whose other dims are the largest of these.
_REUSES = {"cpu": (8, 32, 128, 512), "cuda": (16, 64, 256, 1024, 4096)}
# (head size, rows) of products of heads.
_HEADS = {"cpu": ((32, 128), (64, 256)), "cuda": ((64, 256), (64, 1024), (128, 4096))}
# (channels, image size, channels of the kernel, kernel size) of convolutions of 8 images, 64 on a GPU.
_CONVOLUTIONS = {
    "cpu": ((64, 32, 64, 3),),
    "cuda": ((64, 56, 256, 1), (64, 56, 64, 3), (1024, 14, 256, 1), (256, 14, 256, 3)),
}
# Bytes of the operand of a memory-bound op: activations of small and of large layers.
_SIZES = {"cpu": (_MIB, 4 * _MIB, 16 * _MIB), "cuda": (64 * _MIB, 256 * _MIB)}
_FRESH_BYTES = 2 * FRESH_BYTES
_HELD_BYTES, _MOST_COPIES = 128 * _MIB, 16  # of operands and results of the calls in a row, beyond caches
_ROW = 512  # elements that an op with rows (softmax, norms) reduces
_CHANNELS, _IMAGE = (128, 256), 32  # of images whose batch is normed: a GPU is the faster the more channels there are
_UPDATE_SHAPES = {"cpu": ((64,), (256, 256), (1024, 1024), (4096, 1024)), "cuda": ((64,), (1024, 1024), (4096, 4096))}
_NUM_UPDATED = 4
_HAS_FLOAT8 = (8, 9)  # the first compute capability (CUDA C++ Programming Guide, Ada)


@dataclass(frozen=True, slots=True)
class OpTime:
    """Measured seconds of an op; `backward_s` 0 where it has none."""

    op: Op
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """Measured seconds of an AdamW step on `num_parameters` of `num_bytes` each."""

    num_parameters: int
    num_bytes: int
    seconds: float


def probe(target: str, shapes: Sequence[tuple[int, ...]], *extra: Any, dtype: torch.dtype = torch.float32) -> Op:
    """The op `target` on tensors of `shapes`, then `extra`: constants, and tensors given as a `Value`."""
    tensors = [Value(f"in{i}", shape, dtype, True) for i, shape in enumerate(shapes)]
    args: list[Any] = [Slot(i) for i in range(len(tensors))]
    for item in extra:
        if isinstance(item, Value):
            args.append(Slot(len(tensors)))
            tensors.append(item)
        else:
            args.append(item)
    is_tuple = len(resolve(target)._schema.returns) > 1
    op = Op("probe", target, tuple(args), (), tuple(tensors), (), False, "", "", is_tuple)
    results = call(op, [torch.empty(v.shape, dtype=v.dtype, device="meta") for v in tensors])
    return replace(op, outputs=tuple(Value(f"out{i}", tuple(x.shape), x.dtype, True) for i, x in enumerate(results)))


def products(device: torch.device, dtype: torch.dtype, *, is_quick: bool) -> Iterator[Op]:
    """Products of a range of shapes: of matrices with each dim the smallest, of batches of matrices, attention; on a
    GPU also the largest with rows of the result that are no whole units of 16 bytes.
    """
    reuses = _of(device, _REUSES)
    wide = reuses[-1]
    for reuse in reuses[1:] if is_quick else reuses:
        thin = (reuse, wide, wide), (wide, reuse, wide), (wide, wide, reuse)
        for m, k, n in thin[:1] if is_quick or reuse == wide else thin:
            yield probe("aten.linear.default", [(m, k), (n, k)], dtype=dtype)
    if device.type != "cpu":
        yield probe("aten.linear.default", [(wide, wide), (wide + 1, wide)], dtype=dtype)
    if dtype == torch.float32 or device.type != "cpu":
        for head, rows in _of(device, _HEADS):
            batch = max(1, wide * wide // (4 * rows * head))
            yield probe("aten.matmul.default", [(batch, rows, head), (batch, head, rows)], dtype=dtype)
            heads = (max(1, batch // 8), 8, rows, head)
            yield probe("aten.scaled_dot_product_attention.default", [heads] * 3, dtype=dtype)
    if not is_quick:
        for channels, size, outputs, kernel in _of(device, _CONVOLUTIONS):
            image, weight = (
                (8 if device.type == "cpu" else 64, channels, size, size),
                (outputs, channels, kernel, kernel),
            )
            yield probe("aten.conv2d.default", [image, weight], None, (1, 1), (kernel // 2,) * 2, dtype=dtype)


def _of(device: torch.device, by_type: Mapping[str, Sequence[T]]) -> Sequence[T]:
    return by_type.get(device.type, by_type["cuda"])


def float8_flops_per_s(device: torch.device, budget_s: float) -> float:
    """The rate of a large product in float8, each operand with one scale; 0 of a device without such products."""
    if device.type == "cpu" or torch.cuda.get_device_capability(device) < _HAS_FLOAT8:
        return 0.0
    wide = _of(device, _REUSES)[-1]
    x, scale = torch.randn(wide, wide, device=device).to(torch.float8_e4m3fn), torch.ones((), device=device)
    product = resolve("aten._scaled_mm.default")
    return 2.0 * wide**3 / call_s(lambda: product(x, x.t(), scale, scale, out_dtype=torch.bfloat16), device, budget_s)


def memory_bound(device: torch.device, dtype: torch.dtype, *, is_quick: bool) -> Iterator[Op]:
    """Ops of the usual families whose time is that of their bytes, for a range of sizes; the first family is `add`."""
    sizes = _of(device, _SIZES)
    for size in sizes[:2] if is_quick else sizes:
        yield from of_rows(size // dtype.itemsize // _ROW, dtype)


def of_rows(rows: int, dtype: torch.dtype = torch.float32) -> Iterator[Op]:
    """The families on `rows` rows of activations."""
    x, other = (rows, _ROW), torch.float32 if dtype != torch.float32 else torch.bfloat16

    def made(target: str, *args: Any) -> Op:
        return probe(f"aten.{target}", *args, dtype=dtype)

    yield made("add.Tensor", [x, x])
    for name in ("mul.Tensor", "sub.Tensor", "div.Tensor"):
        yield made(name, [x, x])
    for name in ("gelu", "relu", "silu", "tanh", "sigmoid", "exp"):
        yield made(f"{name}.default", [x])
    yield made("dropout.default", [x], 0.1, True)
    yield made("softmax.int", [x], -1)
    yield made("layer_norm.default", [x], (_ROW,), Value("w", (_ROW,), dtype, True))
    for channels in _CHANNELS:
        numbers = [Value(name, (channels,), dtype, name in "wb") for name in ("w", "b", "mean", "var")]
        images = (max(1, rows * _ROW // channels // _IMAGE**2), channels, _IMAGE, _IMAGE)
        yield made("_native_batch_norm_legit_functional.default", [images], *numbers, True, 0.1, 1e-5)
    yield made("clone.default", [x])
    yield made("to.dtype", [x], other)
    yield made("sum.dim_IntList", [x], (-1,))
    yield made("mean.dim", [x], (-1,))
    yield made("pow.Tensor_Scalar", [x], 2)
    yield made("embedding.default", [(max(rows, _ROW), _ROW)], Value("i", (rows,), torch.int64, False))
    yield made("cross_entropy_loss.default", [x], Value("i", (rows,), torch.int64, False))


def time_op(op: Op, device: torch.device, budget_s: float) -> OpTime:
    """The op timed on `device`: forward as in training, and backward of all its inputs.

    As in a step, operands were not just read, and results are kept until the last: their memory is new each time. On a
    CPU both cost more than the op on a few MiB does.
    """
    copies = _copies(op, device, budget_s)
    forward_s = call_s(lambda: [call(op, tensors) for tensors in copies], device, budget_s) / len(copies)
    outputs = [[x for x in call(op, tensors) if x.requires_grad] for tensors in copies]
    wanted = [[x for x in tensors if x.requires_grad] for tensors in copies]
    if not outputs[0] or not wanted[0]:
        return OpTime(op, forward_s, 0.0)
    gradients = [torch.ones_like(x) for x in outputs[0]]

    def backward() -> object:
        return [torch.autograd.grad(ys, xs, gradients, retain_graph=True) for ys, xs in zip(outputs, wanted)]

    return OpTime(op, forward_s, call_s(backward, device, budget_s) / len(copies))


def _copies(op: Op, device: torch.device, budget_s: float) -> list[list[torch.Tensor]]:
    """Operands of so many calls as hold `_HELD_BYTES` with their results, but take no longer than half a trial."""
    first = [_filled(value, device) for value in op.inputs]
    call(op, first)
    num_calls = calls_within(block_s(lambda: call(op, first), 1, device), budget_s / TRIALS / 2)
    held = sum(value.num_bytes for value in (*op.inputs, *op.outputs))
    num = min(num_calls, max(1, _HELD_BYTES // held), _MOST_COPIES)
    return [first, *([x.detach().clone().requires_grad_(x.requires_grad) for x in first] for _ in range(num - 1))]


def _filled(value: Value, device: torch.device) -> torch.Tensor:
    if value.dtype.is_floating_point:
        x = torch.randn(value.shape, device=device).to(value.dtype)
        return x.requires_grad_(value.needs_grad)
    return torch.randint(_ROW, value.shape, dtype=value.dtype, device=device)


def time_updates(mesh: DeviceMesh, device: torch.device, budget_s: float, *, is_quick: bool) -> list[UpdateTime]:
    """AdamW on parameters of several sizes, DTensors whose parts are updated as those of a compiled module are."""
    times = []
    for shape in _of(device, _UPDATE_SHAPES)[: 3 if is_quick else None]:
        parameters = [_parameter(shape, mesh, device) for _ in range(_NUM_UPDATED)]
        optimizer = torch.optim.AdamW(parameters, lr=1e-6)
        step_on_parts(optimizer, lambda _: None)
        work: Work = optimizer.step
        times.append(UpdateTime(_NUM_UPDATED, 4 * math.prod(shape), call_s(work, device, budget_s)))
    return times


def fresh_s_per_byte(device: torch.device, budget_s: float) -> float:
    """Seconds for each byte of new tensors that a CPU's allocator does not keep, beyond writing them; 0 on a GPU."""
    if device.type != "cpu":
        return 0.0
    x, kept = (torch.ones(_FRESH_BYTES, dtype=torch.uint8).view(torch.float32) for _ in range(2))
    new_s, again_s = call_s(lambda: x.neg(), device, budget_s), call_s(lambda: torch.neg(x, out=kept), device, budget_s)
    return max(0.0, new_s - again_s) / _FRESH_BYTES


def _parameter(shape: tuple[int, ...], mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    def made() -> torch.Tensor:
        return DTensor.from_local(torch.randn(shape, device=device), mesh, [Replicate()], run_check=False)

    parameter = torch.nn.Parameter(made())
    parameter.grad = made()
    return parameter
