"""The autograd footprint of an op: the tensors saved for backward, and aliases, observed by running it on meta."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.ir.function_ops import class_of
from autopar.ir.functions.function_body import body_of
from autopar.ir.gradients.observed_footprint import Footprint, Spec, fill, observe, storages
from autopar.ir.graph import Graph, Op, Value
from autopar.ir.op_facts import ATTENTION, family
from autopar.sbp.axis import Axis
from autopar.sbp.local_ops import LOCAL_OPS, local_target
from autopar.sbp.localize import localize
from autopar.sbp.placement import local_shape
from autopar.sbp.signature import RING, Strategy

# The most steps of a ring that are run: hundreds would take seconds.
_FEW_STEPS = 3


def footprint(op: Op) -> Footprint:
    """The footprint of `op`; nothing is saved if no output needs a gradient."""
    return op.nameless.once(_of_call) if class_of(op.target) is None else op.once(_of_call)


def _of_call(op: Op) -> Footprint:
    is_tracked = not op.is_no_grad and any(value.needs_grad for value in op.outputs)
    inputs = tuple((v.shape, v.dtype, is_tracked and v.needs_grad) for v in op.inputs)
    found = _footprint(op.target, op.args, op.kwargs, inputs, tuple(spec(v) for v in op.outputs), is_tracked)
    return found if class_of(op.target) is None or not is_tracked else _of_function(op, found)


def _of_function(op: Op, found: Footprint) -> Footprint:
    """The footprint of a custom function of which this was `found`: what it keeps as attributes of its context is not
    seen, so that it saves all it is given, unless its backward is known to read what was found and no more.
    """
    body = body_of(op)
    read = set() if body is None else {value.name for value in body.saved}
    if body is None or {slot for slot, v in enumerate(body.inputs) if v.name in read} - found.saved_inputs:
        return replace(found, saved_inputs=frozenset(range(len(op.inputs))), is_assumed=True)
    return found


def footprints(graph: Graph, representative: Mapping[str, str] | None = None) -> dict[str, Footprint]:
    """Op name -> its footprint; repeated ops have that of their `representative`."""
    same = representative or {}
    known: dict[str, Footprint] = {}
    for op in graph.ops:
        if same.get(op.name, op.name) == op.name:
            known[op.name] = footprint(op)
    return {op.name: known[same.get(op.name, op.name)] for op in graph.ops}


def regatherable(graph: Graph, representative: Mapping[str, str]) -> frozenset[str]:
    """The classes of parameters that may be regathered: each member is read once, by an op that saves it for backward.

    A parameter that is read several times is kept, as FSDP keeps the parameters of its root. What is gathered along a
    later dim is no contiguous tensor, of which some ops save a copy instead (tensordot).
    """
    readings = graph.uses
    ops = {op.name: op for op in graph.ops}
    classes: dict[str, bool] = {}
    for item in graph.of_kind("parameter"):
        uses, name = readings.get(item.value.name, []), representative[item.value.name]
        reader = ops.get(representative.get(uses[0].user, uses[0].user)) if len(uses) == 1 else None
        classes[name] = classes.get(name, True) and reader is not None and _saves(reader, uses[0].slot)
    return frozenset(name for name, is_fit in classes.items() if is_fit)


def _saves(op: Op, slot: int) -> bool:
    """Whether autograd saves the memory of parameter `slot` for `op`, along whichever dim it was gathered."""
    found = footprint(op)
    if found.is_assumed or slot not in found.saved_inputs:
        return False
    inputs = tuple(map(spec, op.inputs))
    try:
        return all(
            slot in observe(op.target, op.args, op.kwargs, inputs, (slot, dim)).saved_inputs
            for dim in range(1, len(op.inputs[slot].shape))
        )
    except (RuntimeError, ValueError):  # a kernel that takes no such strides
        return False


def spec(value: Value) -> Spec:
    """Shape, dtype and needs_grad of a value, from which a tensor without data is made."""
    return value.shape, value.dtype, value.needs_grad


@lru_cache(maxsize=2**16)
def _footprint(
    target: str, args: Any, kwargs: Any, inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], is_tracked: bool
) -> Footprint:
    if family(target) == ATTENTION:
        return _attention(outputs, is_tracked)
    try:
        return observe(target, args, kwargs, inputs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, AssertionError):
        # ops that depend on contents (nonzero, unique) have no meta kernel, and custom functions may have none: assume
        # that everything is saved
        saved = frozenset(range(len(inputs))) if is_tracked else frozenset()
        return Footprint(saved, frozenset(), 0, (-1,) * len(outputs), is_assumed=True)


def _attention(outputs: tuple[Spec, ...], is_tracked: bool) -> Footprint:
    """The footprint of fused attention: q, k, v, the result and its float32 log-sum-exp (Dao, FlashAttention-2, 2023).

    On the meta device the unfused kernel would run.
    """
    if not is_tracked:
        return Footprint(frozenset(), frozenset(), 0, (-1,), is_assumed=True)
    log_sum_exp_bytes = 4 * torch.Size(outputs[0][0][:-1]).numel()
    return Footprint(frozenset((0, 1, 2)), frozenset((0,)), log_sum_exp_bytes, (-1,), is_assumed=True)


def saved_by_local_op(op: Op, strategy: Strategy, mesh_shape: tuple[int, ...]) -> int | None:
    """Bytes that the local op of `op` saves for backward, without inputs that the op itself saves; `strategy` has a
    role.

    None if it depends on contents, which meta tensors lack. The axes of a role are treated as one: their position in
    the mesh changes no size. Of a ring a few steps are run: each one more saves as much as the last of these.
    """
    if op.is_no_grad or not any(value.needs_grad for value in op.outputs):
        return 0
    sizes: dict[str, int] = {}
    for size, signature in zip(mesh_shape, strategy.signatures):
        if signature.role:
            sizes[signature.role] = sizes.get(signature.role, 1) * size
    shapes = (local_shape(value.shape, strategy.input_layout(i), mesh_shape) for i, value in enumerate(op.inputs))
    specs = tuple((shape, value.dtype, value.needs_grad) for shape, value in zip(shapes, op.inputs))
    call = localize(op, strategy, mesh_shape)

    def saved(roles: Mapping[str, int]) -> int | None:
        return _saved_by_local_op(op.target, *call, specs, tuple(sorted(roles.items())), footprint(op).saved_inputs)

    if sizes.get(RING, 0) <= _FEW_STEPS:
        return saved(sizes)
    few, more = (saved(sizes | {RING: size}) for size in (_FEW_STEPS - 1, _FEW_STEPS))
    return None if few is None or more is None else more + (sizes[RING] - _FEW_STEPS) * (more - few)


@lru_cache(maxsize=2**16)
def _saved_by_local_op(
    target: str,
    args: Any,
    kwargs: Any,
    inputs: tuple[Spec, ...],
    roles: tuple[tuple[str, int], ...],
    saved_inputs: frozenset[int],
) -> int | None:
    tensors = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs) for shape, dtype, needs in inputs]
    axes = {role: (Axis(role, size, 0, None),) for role, size in roles}
    kept: dict[int, torch.Tensor] = {}
    try:
        with (
            torch.enable_grad(),
            saved_tensors_hooks(lambda t: kept.setdefault(id(t.untyped_storage()), t) is None or t, lambda t: t),
        ):
            LOCAL_OPS[local_target(target)].run(
                *fill(args, tensors), **{name: fill(x, tensors) for name, x in kwargs}, **axes
            )
    except (RuntimeError, NotImplementedError):
        return None
    own = storages([tensors[slot] for slot in saved_inputs])
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)
