"""In-place ops on DTensors that torch loses or cannot do: the tensor then has what it has on one device.

A view along a dim that ranks have in parts, `p[0]` or `p.view(-1)`, is in torch a copy of what all ranks have, so that
`p[0] = 0` and `p.grad[:4].zero_()` change nothing in `p`, without an error. Here such a write is repeated on the whole
tensor, of which each rank keeps its part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.errors import AutoparError
from autopar.mesh import PIPELINE
from autopar.torch_compat import OpOverload, as_torch_does, handle_dtensor_ops, pytree, root_of

aten = torch.ops.aten


@dataclass(frozen=True)
class _Copied:
    """A DTensor that torch calls a view of `base` and that has memory of its own: the ops from there to it, with their
    arguments after the tensor and the number of the result.
    """

    base: DTensor
    views: tuple[tuple[OpOverload, tuple[Any, ...], Mapping[str, Any], int], ...]


# Views that torch may make of redistributed parts, and those that only pass such a view on.
_MAY_COPY = ("select", "slice", "split", "split_with_sizes", "diagonal", "view", "squeeze")
_PASS_ON = ("alias", "detach", "expand", "permute", "t", "transpose", "unbind", "unsqueeze")
# Ops that torch has no rule for, refuses in parts, or refuses with a plain tensor of indices.
_ON_THE_WHOLE = (
    "cumprod_",
    "cumsum_",
    "index_add_",
    "index_copy_",
    "index_fill_",
    "index_put_",
    "index_reduce_",
    "masked_scatter_",
    "put_",
    "renorm_",
    "scatter_",
    "scatter_add_",
    "scatter_reduce_",
    "tril_",
    "triu_",
)
# Reads of the same kind.
_READ_ON_THE_WHOLE = (aten.allclose.default, aten.bincount.default, aten.masked_select.default, aten.nonzero.default)
_WITH_PLAIN = (
    aten.add_.Tensor,
    aten.copy_.default,
    aten.div_.Tensor,
    aten.lerp_.Scalar,
    aten.mul_.Tensor,
    aten.sub_.Tensor,
)
# By which a layer begins.
_OF_LAYERS = (
    aten.addmm.default,
    aten.bmm.default,
    aten.embedding.default,
    aten.mm.default,
    aten.native_layer_norm.default,
)
_RANDOM = frozenset(("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "uniform_"))
_copied: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # DTensor -> _Copied


def handle_writes() -> None:
    """From now on the functions here compute in-place ops of every DTensor of the process that torch cannot."""
    handle_dtensor_ops(dict.fromkeys(_overloads(_MAY_COPY), _view))
    handle_dtensor_ops(dict.fromkeys(_overloads(_ON_THE_WHOLE), write_whole))
    handle_dtensor_ops({aten.fill_.Tensor: _fill} | dict.fromkeys(_WITH_PLAIN, _write_plain))
    handle_dtensor_ops(dict.fromkeys((aten.index.Tensor, aten.index_select.default), _read_at))
    handle_dtensor_ops(dict.fromkeys(_OF_LAYERS, _check_all))
    handle_dtensor_ops(dict.fromkeys(_READ_ON_THE_WHOLE, _read_whole) | {aten.as_strided.default: _view})


def is_copied(x: DTensor) -> bool:
    """Whether what is written to `x` must be written to what it is a view of, too."""
    return x in _copied


@torch.no_grad()
def write_whole(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    """An in-place op, done on all of the tensor that its first argument is, or is a view of; each rank keeps its part.

    Plain tensors among the arguments are those of the first rank.
    """
    x = args[0]
    copied = _copied.get(x) or _Copied(x, ())
    base = copied.base
    if any(placement.is_partial() for placement in (*base.placements, *x.placements)):
        raise AutoparError(
            f"{op} would write to a value of which each rank has a summand, a DTensor of placements"
            f" {tuple(base.placements)}; call x.full_tensor() first, on every rank"
        )
    whole = base.full_tensor().clone()
    rest, named = pytree.tree_map(lambda item: _whole_of(item, base), (tuple(args[1:]), dict(kwargs)))
    written = whole
    for view, others, options, number in copied.views:
        made = view(written, *others, **options)
        written = made[number] if isinstance(made, (list, tuple)) else made
    op(written, *rest, **named)
    _keep_part(base, whole)
    if copied.views:
        _keep_part(x, written)
    return x


def _keep_part(x: DTensor, whole: torch.Tensor) -> None:
    part = distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None)
    x.to_local().copy_(part.to_local())


def _whole_of(item: Any, like: DTensor) -> Any:
    """Of a DTensor all of it, of a plain tensor the first rank's."""
    if not isinstance(item, torch.Tensor):
        return item
    return (item if isinstance(item, DTensor) else _of_first(item, like)).full_tensor()


def _of_first(x: torch.Tensor, like: DTensor) -> DTensor:
    """The first rank's `x`, in parts as `like` if it has its shape.

    AutoparError for values with stages, of which a rank sees its own only: numbers drawn one after the other for all
    parameters would be others.
    """
    if x.ndim and x.is_floating_point() and PIPELINE in (root_of(like.device_mesh).mesh_dim_names or ()):
        raise AutoparError(
            "a plain tensor was written into one of this rank's stages; whether it is what one device would write, a"
            " rank that has some of the parameters only cannot know. Do it before autopar.compile, give whole tensors"
            " to model.load_state_dict, or write distribute_tensor(x, p.device_mesh, p.placements)"
        )
    placements = like.placements if x.shape == like.shape else [Replicate()] * like.device_mesh.ndim
    return distribute_tensor(x.detach().to(like.device), like.device_mesh, placements)


def _write(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An in-place op as torch does it, but on views that are copies."""
    if args[0] in _copied:
        return write_whole(op, args, kwargs)
    with as_torch_does(op):
        return op(*args, **kwargs)


def _check_all(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The op as torch does it; AutoparError if plain tensors meet DTensors, as where a layer is called by itself."""
    if any(type(item) in (torch.Tensor, torch.nn.Parameter) and item.ndim for item in args):
        raise AutoparError(
            f"{op} was called with a plain tensor beside a DTensor: a layer or method of a compiled model was called by"
            " itself, or its parameter used outside. Call the model, or compile that layer as a model of its own, or"
            " give distribute_tensor(x, p.device_mesh, [Replicate()] * p.device_mesh.ndim)"
        )
    with as_torch_does(op):
        return op(*args, **kwargs)


def _read_at(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A read at indices: plain ones are those of the first rank, for torch takes DTensors only; masks have no rule."""
    x, *rest = args
    if any(
        isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) for item in pytree.tree_leaves(rest)
    ):
        return _read_whole(op, args, kwargs)
    placed = pytree.tree_map(lambda item: _of_first(item, x) if type(item) is torch.Tensor else item, rest)
    with as_torch_does(op):
        return op(x, *placed, **kwargs)


@torch.no_grad()
def _read_whole(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of `op` for the whole tensors, on every rank."""
    x = args[0]
    args, kwargs = pytree.tree_map(lambda item: _whole_of(item, x), (tuple(args), dict(kwargs)))
    made, mesh = op(*args, **kwargs), x.device_mesh
    return pytree.tree_map_only(
        torch.Tensor, lambda y: distribute_tensor(y, mesh, [Replicate()] * mesh.ndim, src_data_rank=None), made
    )


@torch.no_grad()
def _write_plain(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An in-place op that may have a plain tensor for its second argument: the first rank's."""
    x, other, *rest = args
    if not isinstance(x, DTensor):
        raise AutoparError(
            f"{op} would write a DTensor, of which each rank has a part, into a plain tensor: give its full_tensor()."
            " If an optimizer does it, its state is one device's: read it by torch.distributed.checkpoint.state_dict's"
            " set_optimizer_state_dict(..., options=StateDictOptions(full_state_dict=True))"
        )
    if type(other) in (torch.Tensor, torch.nn.Parameter) and other.ndim:
        args = x, _of_first(other, x), *rest
    return _write(op, args, kwargs)


@torch.no_grad()
def _fill(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    """`x.fill_(value)` of a value without dims, which is also what `x[...] = 0` calls."""
    x, value = args
    if x in _copied:
        return write_whole(op, args, kwargs)
    x.to_local().fill_(_whole_of(value, x))
    return x


def _view(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view as torch makes it; what turns out to be a copy is remembered."""
    x = args[0]
    try:
        with as_torch_does(op):
            made = op(*args, **kwargs)
    except RuntimeError:
        if op is not aten.as_strided.default:
            raise
        made = _read_whole(op, (x.contiguous(), *args[1:]), kwargs)
    before = _copied.get(x)
    for number, y in enumerate(made if isinstance(made, (list, tuple)) else (made,)):
        if before is not None or not _share(x, y):
            if not _copied:
                handle_dtensor_ops(dict.fromkeys(_overloads(_PASS_ON), _view) | dict.fromkeys(_in_place_ops(), _write))
            base, views = (x, ()) if before is None else (before.base, before.views)
            _copied[y] = _Copied(base, (*views, (op, tuple(args[1:]), kwargs, number)))
    return made


@torch.no_grad()
def _share(x: DTensor, y: DTensor) -> bool:
    """Whether the parts have the same memory, which they have on all ranks or on none."""
    return x.to_local().untyped_storage()._cdata == y.to_local().untyped_storage()._cdata


def _overloads(names: Sequence[str]) -> list[OpOverload]:
    packets = [getattr(aten, name) for name in names]
    return [getattr(packet, name) for packet in packets for name in packet.overloads() if "out" not in name]


def _in_place_ops() -> list[OpOverload]:
    """The ops of tensors' methods that have no handler yet."""
    methods = (name for name in dir(torch.Tensor) if name.endswith("_") and not name.endswith("__"))
    names = [name for name in methods if hasattr(aten, name) and name not in (*_ON_THE_WHOLE, *_RANDOM)]
    return [op for op in _overloads(names) if op not in (*_WITH_PLAIN, aten.fill_.Tensor)]
