"""Plain tensors beside DTensors in one op, which torch refuses: element by element they are computed with, a layer or a
list of both is refused by name.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autopar.errors import AutoparError
from autopar.mesh import PIPELINE
from autopar.torch_compat import OpOverload, as_torch_does, handle_dtensor_ops, root_of

aten = torch.ops.aten

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OUTSIDE = (
    "{} was called with a plain tensor that needs a gradient beside a DTensor: a parameter of a compiled model was used"
    " outside of it, with what the model returned. Do that in the model's forward, or give p.full_tensor()"
)


def _of_several(names: str, kind: str = "Tensor") -> tuple[OpOverload, ...]:
    """The overloads of these ops that read more than one tensor, or list of them, and give a new one or write to it."""
    packets = [getattr(aten, name) for name in names.split()]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads() if "out" not in name]
    return tuple(op for op in overloads if _num_arguments(op, kind) > 1)


def _num_arguments(op: OpOverload, kind: str) -> int:
    return sum(kind in str(argument.type) for argument in op._schema.arguments)


# In place.
_WRITES = _of_several(
    "add_ addcdiv_ addcmul_ addmm_ atan2_ baddbmm_ bitwise_and_ bitwise_or_ bitwise_xor_ clamp_ clamp_max_ clamp_min_"
    " copy_ copysign_ div_ eq_ floor_divide_ fmod_ ge_ gt_ heaviside_ hypot_ le_ lerp_ logical_and_ logical_or_"
    " logical_xor_ lt_ masked_fill_ mul_ ne_ pow_ remainder_ sub_ xlogy_"
)
# Out of place.
_READS = _of_several(
    "add addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor clamp clamp_max clamp_min copysign div eq"
    " floor_divide fmax fmin fmod ge gt heaviside hypot le lerp logaddexp logical_and logical_or logical_xor lt"
    " masked_fill maximum minimum mul ne pow remainder sub where xlogy"
)
# By which a layer begins.
_OF_LAYERS = (
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.embedding.default,
    aten.mm.default,
    aten.native_batch_norm.default,
    aten.native_group_norm.default,
    aten.native_layer_norm.default,
)
# By which the norm of all gradients is computed, and DistributedDataParallel makes one tensor of all parameters.
_OF_ALL = (aten._foreach_norm.Scalar, aten.cat.default, aten.stack.default)
# Of lists, by which optimizers update all parameters at once.
_OF_LISTS = _of_several(
    "_foreach_add_ _foreach_addcdiv_ _foreach_addcmul_ _foreach_clamp_max_ _foreach_clamp_min_ _foreach_div_"
    " _foreach_lerp_ _foreach_maximum_ _foreach_minimum_ _foreach_mul_ _foreach_pow_ _foreach_sub_",
    "List[Tensor]",
)
_PLAIN_STATE = (
    "{} would write a DTensor, of which each rank has a part, into a plain tensor: give its full_tensor()."
    " If an optimizer does it, which makes plain state of its own or was given one device's, call"
    " autopar.step_on_whole(optimizer) right after it is made: each step then has whole tensors."
    " What copies weights into new layers, as resize_token_embeddings, is called before autopar.compile"
)


def handle_plain_operands() -> None:
    """From now on the functions here compute or refuse such ops of every DTensor of the process."""
    handle_dtensor_ops(dict.fromkeys(_WRITES, _write) | dict.fromkeys(_READS, read_beside))
    handle_dtensor_ops(dict.fromkeys(_OF_LAYERS, _check_all) | dict.fromkeys(_OF_ALL, _check_alike))
    handle_dtensor_ops(dict.fromkeys(_OF_LISTS, _write_lists))


def in_a_step() -> str:
    """The remedy where an op is of an optimizer's step, to be said behind what else there is to do; "" elsewhere."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
        frame = frame.f_back
    if frame is None:
        return ""
    return (
        f". It is in a step of {type(frame.f_locals['self']).__name__}, whose update needs whole weights: call"
        " autopar.step_on_whole(optimizer) right after it is made"
    )


def is_of_stages(mesh: DeviceMesh) -> bool:
    """Whether tensors on `mesh` are those of a rank's own stages; what is not planned yet lies on all ranks."""
    return PIPELINE in (root_of(mesh).mesh_dim_names or ()) and PIPELINE not in (mesh.mesh_dim_names or ())


def of_first(x: torch.Tensor, like: DTensor) -> DTensor:
    """The first rank's `x`, in parts as `like` if it has its shape.

    AutoparError for values with stages, of which a rank sees its own only: numbers drawn one after the other for all
    parameters would be others.
    """
    if x.ndim and x.is_floating_point() and is_of_stages(like.device_mesh):
        raise AutoparError(
            "a plain tensor was written into one of this rank's stages, or used with one; whether it is one device's, a"
            " rank that has some of the parameters only cannot know. Do it before autopar.compile, give whole tensors"
            " to model.load_state_dict, or write distribute_tensor(x, p.device_mesh, p.placements)"
        )
    is_alike = x.shape == like.shape and not any(placement.is_partial() for placement in like.placements)
    placements = like.placements if is_alike else [Replicate()] * like.device_mesh.ndim
    # torch writes the first rank's values into what it is given
    return distribute_tensor(x.detach().to(like.device, copy=True), like.device_mesh, placements)


def _check_all(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The op as torch does it; AutoparError if plain tensors meet DTensors, as where a layer is called by itself."""
    if any(type(item) in _PLAIN and item.ndim for item in args):
        raise AutoparError(
            f"{op} was called with a plain tensor beside a DTensor: a layer or method of a compiled model was called by"
            " itself, or its parameter used outside. Call the model, or compile that layer as a model of its own, or"
            f" give distribute_tensor(x, p.device_mesh, [Replicate()] * p.device_mesh.ndim){in_a_step()}"
        )
    with as_torch_does(op):
        return op(*args, **kwargs)


def _check_alike(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The op as torch does it; AutoparError if a list has plain tensors beside DTensors."""
    if any(not isinstance(item, DTensor) for item in args[0]):
        raise AutoparError(
            f"{op} was called with plain tensors beside DTensors, as where a norm is of the gradients of a compiled"
            " model and of layers outside of it, or DistributedDataParallel is around both. Compile the module that has"
            " both, or call clip_grad_norm_ for each, and wrap the layers outside alone"
        )
    with as_torch_does(op):
        return op(*args, **kwargs)


@torch.no_grad()
def _write_lists(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same for each tensor of the first list, and those beside it in further ones."""
    written, *rest = args
    if not all(isinstance(x, DTensor) for x in written):
        raise AutoparError(_PLAIN_STATE.format(op))
    for at, items in enumerate(rest):
        if isinstance(items, list | tuple) and any(type(item) in _PLAIN and item.ndim for item in items):
            pairs = zip(written, items)
            rest[at] = [of_first(y, x) if type(y) in _PLAIN and y.ndim else y for x, y in pairs]
    with as_torch_does(op):
        return op(written, *rest, **kwargs)


def read_beside(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The op as torch does it, beside plain tensors."""
    args = with_first(op, args)
    with as_torch_does(op):
        return op(*args, **kwargs)


def with_first(op: OpOverload, args: Sequence[Any]) -> Sequence[Any]:
    """`args`, of which plain tensors are the first rank's.

    AutoparError for one that needs a gradient, which would be a DTensor.
    """
    plain = [type(item) in _PLAIN and item.ndim > 0 for item in args]
    if not any(plain):
        return args
    if any(is_plain and item.requires_grad for is_plain, item in zip(plain, args)):
        raise AutoparError(_OUTSIDE.format(op))
    like = next(item for item in args if isinstance(item, DTensor))
    return [of_first(item, like) if is_plain else item for is_plain, item in zip(plain, args)]


@torch.no_grad()
def _write(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An in-place op that may have plain tensors behind its first argument: the first rank's. Into a plain tensor only
    what every rank has whole is written, as all is before the first call (an adapter that is copied, a layer resized).
    """
    x, *rest = args
    if not isinstance(x, DTensor):
        if not all(one.is_replicate() for item in rest if isinstance(item, DTensor) for one in item.placements):
            raise AutoparError(_PLAIN_STATE.format(op))
        return op(x, *(item.to_local() if isinstance(item, DTensor) else item for item in rest), **kwargs)
    rest = [of_first(item, x) if type(item) in _PLAIN and item.ndim else item for item in rest]
    with as_torch_does(op):
        return op(x, *rest, **kwargs)
