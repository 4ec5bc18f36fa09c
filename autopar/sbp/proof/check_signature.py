"""The referee of the rule table: run an op whole, run it on shards as a strategy says, join, compare; values and
gradients.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.ir.graph import Op, Slot, Value, resolve
from autopar.sbp.axis import Axis
from autopar.sbp.convert import dual
from autopar.sbp.local_ops import LOCAL_OPS, local_target
from autopar.sbp.localize import localize
from autopar.sbp.placement import can_split, is_even
from autopar.sbp.proof.cut_and_join import Coordinate, assert_near, cut, join, on_ranks
from autopar.sbp.signature import Signature, Strategy
from autopar.sbp.uneven.parts import PartSize

Tensors = tuple[torch.Tensor, ...]
# Calls a function of a rank's place and axes for every rank of a mesh, all at once.
OnThreads = Callable[[Callable[[Coordinate, tuple[Axis, ...]], Any], tuple[int, ...]], Mapping[Coordinate, Any]]


def make_op(target: str, *args: Any, **kwargs: Any) -> tuple[Op, Tensors]:
    """The IR op of one call, and its tensors; those that require grad are the differentiable inputs."""
    inputs: list[torch.Tensor] = []

    def freeze(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            inputs.append(arg)
            return Slot(len(inputs) - 1)
        return tuple(map(freeze, arg)) if isinstance(arg, (list, tuple)) else arg

    frozen = tuple(map(freeze, args)), tuple((name, freeze(arg)) for name, arg in kwargs.items())
    result = resolve(target)(*args, **kwargs)
    values = tuple(value_of(f"in{i}", x) for i, x in enumerate(inputs))
    outputs = tuple(value_of(f"out{i}", x) for i, x in enumerate(flat(result)))
    op = Op("op", target, *frozen, values, outputs, False, "", "test", isinstance(result, (list, tuple)))
    return op, tuple(inputs)


def value_of(name: str, x: torch.Tensor) -> Value:
    """The value of the IR that stands for `x`."""
    return Value(name, tuple(x.shape), x.dtype, x.requires_grad)


def flat(result: Any) -> Tensors:
    """The tensors that an op returned."""
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)


def check_signature(
    op: Op,
    signature: Signature,
    num_ranks: int,
    inputs: Tensors,
    on_threads: OnThreads | None = None,
    gradient_scale: float = 1.0,
) -> bool:
    """Check one signature on `num_ranks` ranks; False if it does not divide evenly, AssertionError if it is wrong."""
    placed = zip(op.inputs + op.outputs, signature.inputs + signature.outputs)
    if not all(is_even(value.shape, (placement,), (num_ranks,)) for value, placement in placed):
        return False
    return check_strategy(op, Strategy((signature,)), (num_ranks,), inputs, on_threads, gradient_scale)


def check_strategy(
    op: Op,
    strategy: Strategy,
    mesh_shape: tuple[int, ...],
    inputs: Tensors,
    on_threads: OnThreads | None = None,
    gradient_scale: float = 1.0,
) -> bool:
    """Check one strategy on a whole mesh; False if it cuts what has no parts, AssertionError if it is wrong.

    `on_threads`: runs the ranks of local ops, which communicate; only they need it. `gradient_scale`: of the
    gradients that come in.
    """
    ins = [strategy.input_layout(i) for i in range(len(op.inputs))]
    outs = [strategy.output_layout(i) for i in range(len(op.outputs))]
    values = list(zip(op.inputs + op.outputs, ins + outs))
    if not all(can_split(value.shape, layout, mesh_shape) for value, layout in values) or _cuts_units(
        strategy, mesh_shape
    ):
        return False
    whole_out, whole_grads, grads_out = _run_whole(op, inputs, gradient_scale)
    parts = [cut(x.detach(), layout, mesh_shape) for x, layout in zip(inputs, ins)]
    grad_parts = [cut(g, tuple(map(dual, layout)), mesh_shape) for g, layout in zip(grads_out, outs)]
    args, kwargs = localize(op, strategy, mesh_shape)

    def rank(at: Coordinate, axes: tuple[Axis, ...] = ()) -> tuple[Tensors, Tensors]:
        local = [part[at].clone().requires_grad_(value.needs_grad) for part, value in zip(parts, op.inputs)]
        local_args, local_kwargs = sizes_of((args, kwargs), at, mesh_shape)
        result = call(op, local_args, local_kwargs, local, _roles(strategy, axes))
        shapes, expected = [tuple(out.shape) for out in result], [tuple(g[at].shape) for g in grad_parts]
        assert shapes == expected, f"{op.target}: {strategy} expected shapes {expected}, found {shapes}"
        return result, _gradients(op, local, result, [g[at] for g in grad_parts])

    has_role = any(signature.role for signature in strategy.signatures)
    assert on_threads or not has_role, f"{op.target}: ranks that communicate need threads"
    found = on_threads(rank, mesh_shape) if on_threads and has_role else on_ranks(rank, mesh_shape)
    for index, (expected, layout) in enumerate(zip(whole_out, outs)):
        joined = join({at: result[index] for at, (result, _) in found.items()}, layout)
        _compare(joined, expected, f"{op.target}: output {index} of {strategy}")
    for index, (expected, layout) in enumerate(zip(whole_grads, ins)):
        if op.inputs[index].needs_grad:
            joined = join({at: grads[index] for at, (_, grads) in found.items()}, tuple(map(dual, layout)))
            _compare(joined, expected, f"{op.target}: gradient of input {index} of {strategy}")
    return True


def sizes_of(args: Any, at: Coordinate, mesh_shape: tuple[int, ...]) -> Any:
    """`args` with the sizes of the parts of the rank at `at`."""
    if isinstance(args, tuple):
        return tuple(sizes_of(arg, at, mesh_shape) for arg in args)
    if not isinstance(args, PartSize):
        return args
    size = args.extent
    for axis, placement in args.splits:
        own = Axis("", mesh_shape[axis], at[axis], None, shares=placement.shares)
        size = own.part_in(placement, size)
    return size


def _cuts_units(strategy: Strategy, mesh_shape: tuple[int, ...]) -> bool:
    """Whether the axes of a role together do not divide its units."""
    sizes: dict[str, int] = {}
    for signature, size in zip(strategy.signatures, mesh_shape):
        sizes[signature.role] = sizes.get(signature.role, 1) * size
    return any(signature.num_units % sizes[signature.role] for signature in strategy.signatures)


def _run_whole(op: Op, inputs: Tensors, scale: float) -> tuple[Tensors, Tensors, Tensors]:
    leaves = [x.detach().clone().requires_grad_(value.needs_grad) for x, value in zip(inputs, op.inputs)]
    result = call(op, op.args, op.kwargs, leaves, {})
    grads_out = tuple(
        torch.randn_like(out) * scale if value.needs_grad else torch.zeros_like(out)
        for out, value in zip(result, op.outputs)
    )
    return tuple(out.detach() for out in result), _gradients(op, leaves, result, grads_out), grads_out


def call(op: Op, args: Any, kwargs: Any, tensors: list[torch.Tensor], roles: dict[str, tuple[Axis, ...]]) -> Tensors:
    """The tensors that `op` gives for these arguments, whose slots are `tensors`; `roles`: of a local op."""

    def fill(arg: Any) -> Any:
        if isinstance(arg, Slot):
            return tensors[arg.index]
        return [fill(item) for item in arg] if isinstance(arg, tuple) else arg

    run = resolve(op.target)
    if roles:
        run = LOCAL_OPS[local_target(op.target)].run
    return flat(run(*map(fill, args), **{name: fill(arg) for name, arg in kwargs}, **roles))


def _roles(strategy: Strategy, axes: tuple[Axis, ...]) -> dict[str, tuple[Axis, ...]]:
    roles: dict[str, tuple[Axis, ...]] = defaultdict(tuple)
    for signature, axis in zip(strategy.signatures, axes):
        if signature.role:
            roles[signature.role] += (axis,)
    return dict(roles)


def _gradients(op: Op, leaves: list[torch.Tensor], outputs: Tensors, grads_out: Any) -> Tensors:
    """Gradients of all inputs, zeros where none flows."""
    pairs = [(out, grad) for out, grad, value in zip(outputs, grads_out, op.outputs) if value.needs_grad]
    wanted = [x for x in leaves if x.requires_grad]
    found = iter(
        torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        if pairs and wanted
        else ()
    )
    grads = [next(found, None) if x.requires_grad else None for x in leaves]
    return tuple(torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads))


def _compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, found {tuple(found.shape)}"
    assert_near(found, expected, what)
