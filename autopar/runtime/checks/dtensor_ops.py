"""Ops on DTensors that torch computes from each rank's part alone: scalars that are read, means of losses, random
numbers, and GradScaler's test for infinite gradients.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autopar.errors import AutoparError
from autopar.mesh import PIPELINE
from autopar.runtime.checks.dtensor_writes import handle_writes
from autopar.runtime.checks.plain_operands import in_a_step, is_of_stages, read_beside, with_first
from autopar.runtime.process_groups import first_group
from autopar.torch_compat import OpOverload, as_torch_does, handle_dtensor_ops, root_of

aten = torch.ops.aten
_WRITTEN = frozenset(
    (
        aten.normal_.default,
        aten.uniform_.default,
        aten.log_normal_.default,
        aten.exponential_.default,
        aten.geometric_.default,
        aten.cauchy_.default,
        aten.bernoulli_.float,
    )
)
_LIKE = frozenset(
    (aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)
)
_OF_VALUES = frozenset((aten.bernoulli.default, aten.native_dropout.default, aten.multinomial.default))

# Means and their gradients, which torch divides by the number of entries of a part.
_MEANS = (
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_backward.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
)
_MEAN, _SUM = 1, 2  # torch's numbers of reductions


def handle_scalars_and_random_ops() -> None:
    """From now on `read_scalar`, `draw`, `unscale` and those of losses compute these ops of every DTensor of the
    process, and `deep_copy` copies it; writes as `dtensor_writes` says.
    """
    handle_writes()
    plain = {name: functools.partialmethod(_as_plain, name) for name in ("numpy", "tolist", "__dlpack__")}
    refused = {name: functools.partialmethod(_without_memory, name) for name in ("share_memory_", "apply_")}
    own = {"storage": _storage, "__deepcopy__": deep_copy, "__format__": _formatted}
    for name, method in (plain | refused | own).items():
        setattr(DTensor, name, method)
    handle_dtensor_ops(
        dict.fromkeys(_WRITTEN | _LIKE | _OF_VALUES, draw)
        | {aten._local_scalar_dense.default: read_scalar}
        | dict.fromkeys(_MEANS, _mean)
        | {aten.nll_loss_forward.default: _mean_of_classes, aten.nll_loss_backward.default: read_beside}
        | {aten._amp_foreach_non_finite_check_and_unscale_.default: unscale}
    )


def read_scalar(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`x.item()`, `float(x)`, `bool(x)` of a DTensor that every rank has whole; AutoparError for any other, of which
    torch reads this rank's part.
    """
    x = args[0]
    if _is_whole(x):
        return op(x.to_local(), **kwargs)
    if _is_initialised():  # whose random numbers are drawn by all ranks together
        return op(x.full_tensor(), **kwargs)
    raise AutoparError(
        f"a value of which each rank has a part, a DTensor of placements {tuple(x.placements)}, was read as a number"
        " (item(), float(), bool(), if); torch reads this rank's part of it. Call x.full_tensor() first, on every rank"
        f"{in_a_step()}"
    )


def _is_initialised() -> bool:
    """Whether a function of torch.nn.init asks, such as trunc_normal_, which draws until all numbers are in bounds."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != nn.init.__name__:
        frame = frame.f_back
    return frame is not None


def _as_plain(x: DTensor, method: str, *args: Any, **kwargs: Any) -> Any:
    """`x.numpy()`, `x.tolist()`, or the memory that torch.from_dlpack(x) reads, of a DTensor that every rank has whole;
    AutoparError for any other.
    """
    if _is_whole(x):
        return getattr(x.to_local(), method)(*args, **kwargs)
    raise AutoparError(
        f"{method}() of a DTensor of placements {tuple(x.placements)}, of which each rank has a part: call"
        f" x.full_tensor().{method}(), on every rank, or model.full_state_dict() for all of a model. Where a library"
        " does it (peft's AdaLoRA), keep whole what it reads: autopar.compile(..., pins="
        f"{{name: {'B' * x.device_mesh.ndim!r}}}){in_a_step()}"
    )


def _formatted(x: DTensor, how: str) -> str:
    """`f"{x:.3f}"` of a number, as of any tensor without dims; torch formats those of its own class alone."""
    return format(x.detach().item(), how) if how and not x.ndim else object.__format__(x, how)


def _without_memory(x: DTensor, method: str, *_: Any) -> NoReturn:
    """AutoparError in place of a crash: torch takes the memory of a DTensor, which has none, for that of its shape."""
    raise AutoparError(
        f"{method}() of a DTensor of shape {tuple(x.shape)}, of which each rank has a part in memory of its own: call"
        " it of the model before autopar.compile, or of what model.full_state_dict() or x.full_tensor() gives"
    )


def _storage(x: DTensor) -> NoReturn:
    """AutoparError in place of torch's about an invalid storage: safetensors asks for it before it writes."""
    raise AutoparError(
        f"storage() of a DTensor of shape {tuple(x.shape)}, of which each rank has a part: safetensors writes plain"
        " tensors. Call model.full_state_dict(rank0_only=True) on every rank and save_file of it on the first, in place"
        " of model.state_dict() and save_model; read by model.load_state_dict(load_file(path)) in place of load_model"
    )


def deep_copy(x: DTensor, memo: dict[int, Any]) -> torch.Tensor:
    """`copy.deepcopy` of a DTensor, with its gradient.

    torch copies the storage of one that begins behind the start of its storage, as a gradient of a bucket does, and a
    DTensor has none; and none of a class of its own, as a gradient of a stage has.
    """
    gradient = x.grad if x.is_leaf else None
    if isinstance(gradient, DTensor):
        memo.setdefault(id(gradient), _cloned(gradient))
    if x.is_leaf and not x.requires_grad and (type(x) is not DTensor or x.storage_offset()):
        return memo.setdefault(id(x), _cloned(x))
    return torch.Tensor.__deepcopy__(x, memo)


def _cloned(x: DTensor) -> torch.Tensor:
    cloned = x.detach().clone()
    cloned.__class__ = type(x)
    return cloned


def _is_whole(x: DTensor) -> bool:
    return all(placement.is_replicate() or size == 1 for placement, size in zip(x.placements, x.device_mesh.shape))


def unscale(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """GradScaler's division of all gradients, and whether one has an infinite entry, on which all ranks agree.

    torch's own asks only the ranks that hold other parts of the first gradient: if that is whole, ranks that hold parts
    of others do not learn of each other's, and some update while others skip the step. Ranks of other stages are asked
    too: each has a gradient, and all are of one dtype (`Trainer.step`), so that each rank comes here once.
    """
    gradients, found, *others = args
    op([x.to_local() if isinstance(x, DTensor) else x for x in gradients], found, *others, **kwargs)
    meshes = {x.device_mesh: None for x in gradients if isinstance(x, DTensor)}
    roots = {root: None for mesh in meshes if PIPELINE in ((root := root_of(mesh)).mesh_dim_names or ())}
    groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
    for group in (*groups, *(first_group(root.get_group(PIPELINE)) for root in roots)):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)


def _mean(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A loss as the sum, or the gradient of that, over the number of all entries."""
    arguments = op._schema.arguments
    given: list[Any] = [*with_first(op, args), *(argument.default_value for argument in arguments[len(args) :])]
    named = {argument.name: number for number, argument in enumerate(arguments)}
    is_mean, count = given[named["reduction"]] == _MEAN, given[named["self"]].numel()
    if is_mean:
        given[named["reduction"]] = _SUM
        if "grad_output" in named:
            given[named["grad_output"]] = given[named["grad_output"]] / count
    with as_torch_does(op):
        made = op(*given, **kwargs)
    return made / count if is_mean and "grad_output" not in named else made


def _mean_of_classes(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The loss of labels, and what its mean is over: the number of labels that count, or the sum of their weights, of
    which torch takes the mean of the parts' means.
    """
    *given, reduction, ignored = with_first(op, args)
    with as_torch_does(op):
        total, counted = op(*given, _SUM if reduction == _MEAN else reduction, ignored, **kwargs)
    return total / counted if reduction == _MEAN else total, counted


def draw(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Random numbers for a DTensor: those of the whole tensor by the first rank's generator, of which each rank takes
    its part, as on one device. On the CPU torch draws the same numbers in each part.

    AutoparError where a pipeline's other ranks draw for tensors of their own.
    """
    x = args[0]
    if is_of_stages(x.device_mesh):
        raise AutoparError(
            "random numbers were drawn for a tensor of this rank's stages; a rank knows nothing of those of its own"
            " stages that others draw, so that they would not be one device's. Initialise the model before"
            " autopar.compile, or give whole tensors to model.load_state_dict"
        )
    if x.device_mesh.device_type != "cpu":
        with as_torch_does(op):
            return op(*args, **kwargs)
    is_read = op in _OF_VALUES
    whole = x.full_tensor() if is_read else torch.empty(x.shape, dtype=x.dtype)
    drawn = op(whole, *args[1:], **kwargs)
    placements = [Replicate() if placement.is_partial() else placement for placement in x.placements]
    if op in _WRITTEN:
        x.to_local().copy_(distribute_tensor(drawn, x.device_mesh, placements).to_local())
        return x
    outputs = drawn if isinstance(drawn, tuple) else (drawn,)
    parts = tuple(distribute_tensor(output, x.device_mesh, placements) for output in outputs)
    return parts if isinstance(drawn, tuple) else parts[0]
