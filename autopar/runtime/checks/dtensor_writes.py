"""In-place ops on DTensors that torch loses or cannot do: the tensor then has what it has on one device.

A view along a dim that ranks have in parts, `p[0]` or `p.view(-1)`, is in torch a copy of what all ranks have, so that
`p[0] = 0` and `p.grad[:4].zero_()` change nothing in `p`, without an error. Here such a write is repeated on the whole
tensor, of which each rank keeps its part.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from autopar.errors import AutoparError, warn
from autopar.runtime.checks.plain_operands import handle_plain_operands, in_a_step, of_first, with_first
from autopar.torch_compat import OpOverload, as_torch_does, compute_without_rule, handle_dtensor_ops, pytree

aten = torch.ops.aten


# Views that torch may make of redistributed parts.
_MAY_COPY = ("select", "slice", "split", "split_with_sizes", "diagonal", "view", "squeeze", "unbind")
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
_READ_ON_THE_WHOLE = (
    aten.allclose.default,
    aten.bincount.default,
    aten.masked_select.default,
    aten.nonzero.default,
    # of whose ops torch 2.13 tries the layouts, one after the other, for minutes; these draw no random numbers
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
# Reads of which torch 2.13's own result is wrong, along a dim counted from the last, or of which some ranks wait for
# others that do not come.
_WRONG_IN_PARTS = (
    aten.argmax.default,
    aten.argmin.default,
    aten.cumprod.default,
    aten.cumsum.default,
    aten.logcumsumexp.default,
)
# Reductions of which torch takes dims=[] for none of a DTensor, which are all: the backward of amax has such a sum.
_REDUCTIONS = (
    aten.amax.default,
    aten.amin.default,
    aten.linalg_vector_norm.default,
    aten.max.default,
    aten.mean.dim,
    aten.min.default,
    aten.std.correction,
    aten.sum.dim_IntList,
    aten.var.correction,
)
# Reductions over ranks whose result is what all of them have.
_ALIKE = ("avg", "max", "min")
_FACTORIES = ("arange", "eye", "full", "linspace", "logspace", "ones", "zeros")


def handle_writes() -> None:
    """From now on the functions here compute in-place ops of every DTensor of the process that torch cannot."""
    handle_dtensor_ops(dict.fromkeys(_overloads(_MAY_COPY), _view))
    handle_dtensor_ops(dict.fromkeys(_overloads(_ON_THE_WHOLE), write_whole))
    handle_dtensor_ops({aten.fill_.Tensor: _fill, aten.fill_.Scalar: _fill})
    handle_dtensor_ops(dict.fromkeys((aten.index.Tensor, aten.index_select.default), _read_at))
    handle_plain_operands()
    compute_without_rule(_without_rule)
    handle_dtensor_ops(dict.fromkeys(_overloads(_FACTORIES, with_out=True), _make))
    handle_dtensor_ops(dict.fromkeys(_READ_ON_THE_WHOLE, _read_whole) | {aten.as_strided.default: _view})
    handle_dtensor_ops(dict.fromkeys(_WRONG_IN_PARTS, _read_all) | dict.fromkeys(_REDUCTIONS, _reduced))
    handle_dtensor_ops(dict.fromkeys(_overloads(("t_", "transpose_")), _turned))
    _handle_data()


@functools.cache  # settings_counted puts its own around this
def _handle_data() -> None:
    kind: Any = DTensor
    kind.data = property(_CONTENT.__get__, _assign)


def _assign(x: DTensor, new: Any) -> None:
    """`x.data = new`, after which both have the same memory; of DTensors torch leaves the content as it is.

    Where `new` lies otherwise than `x` there is no such memory: the model's next call refuses what torch does then.
    """
    if type(x) is type(new) is DTensor and _described(x) == _described(new):
        x._local_tensor = _PART.__get__(new)
    else:
        _CONTENT.__set__(x, new)


def _described(x: DTensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.placements, x.device_mesh


@torch.no_grad()
def write_whole(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    """An in-place op, done on all of the tensor that its first argument is; each rank keeps its part, or a summand.

    Plain tensors among the arguments are those of the first rank.
    """
    x = args[0]
    whole = x.full_tensor().clone()
    rest, named = pytree.tree_map(lambda item: _whole_of(item, x), (tuple(args[1:]), dict(kwargs)))
    op(whole, *rest, **named)
    if not _can_be_summands(x, whole):
        check_no_summands(x, op)
    keep_part(x, whole)
    return x


@torch.no_grad()
def _make(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    """A factory with `out=`, as in nn.init.eye_: torch would make each rank's part as large as the whole."""
    x = kwargs["out"]
    keep_part(x, op(*args, **{**kwargs, "out": torch.empty(x.shape, dtype=x.dtype, device=x.device)}))
    return x


def check_no_summands(x: DTensor, op: OpOverload) -> None:
    """AutoparError if each rank has a summand of `x` only."""
    if any(placement.is_partial() for placement in x.placements):
        raise AutoparError(
            f"{op} would write to a value of which each rank has a summand, a DTensor of placements"
            f" {tuple(x.placements)}; call x.full_tensor() first, on every rank{in_a_step()}"
        )


def _can_be_summands(x: DTensor, whole: torch.Tensor) -> bool:
    """Whether `keep_part` can: of summands, and of norms of parts, whose norm is no negative number."""
    partial = [one for one in x.placements if one.is_partial()]
    if any(one.reduce_op not in ("sum", *_ALIKE) for one in partial if isinstance(one, Partial)):
        return False
    return not any(hasattr(one, "norm_type") for one in partial) or bool((whole >= 0).all())


def keep_part(x: DTensor, whole: torch.Tensor) -> None:
    """Write this rank's part of `whole` into `x`; a sum over ranks is the first one's, others have zeros."""
    placements = [Replicate() if one.is_partial() else one for one in x.placements]
    part = distribute_tensor(whole, x.device_mesh, placements, src_data_rank=None).to_local()
    is_zero = any(
        isinstance(one, Partial) and one.reduce_op not in _ALIKE and x.device_mesh.get_local_rank(axis)
        for axis, one in enumerate(x.placements)
    )
    x.to_local().copy_(torch.zeros_like(part) if is_zero else part)


def _whole_of(item: Any, like: DTensor) -> Any:
    """Of a DTensor all of it, of a plain tensor the first rank's."""
    if not isinstance(item, torch.Tensor):
        return item
    return (item if isinstance(item, DTensor) else of_first(item, like)).full_tensor()


def _read_at(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A read at indices: plain ones are those of the first rank, for torch takes DTensors only; masks have no rule."""
    x, *rest = args
    if any(
        isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) for item in pytree.tree_leaves(rest)
    ):
        return _read_whole(op, args, kwargs)
    placed = pytree.tree_map(lambda item: of_first(item, x) if type(item) is torch.Tensor else item, rest)
    with as_torch_does(op):
        return op(x, *placed, **kwargs)


def _without_rule(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> Any:
    """The result of an op that torch has no layouts for, computed on the whole tensors; `error` if that is unknown."""
    written = [
        argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write
    ]
    if op.namespace in ("c10d", "_c10d_functional"):
        raise AutoparError(
            f"{op}: a collective was called by hand with a DTensor, of which each rank has a part. Leave out what"
            " DistributedDataParallel's users write: gradients are those of the whole batch already, and weights those"
            " of one model. Of a value that differs give x.full_tensor() or x.to_local()"
        )
    if written and args and isinstance(args[0], (list, tuple)):
        return _write_parts(op, args, kwargs)
    if torch.Tag.nondeterministic_seeded in op.tags or written[1:]:
        raise error
    return (write_whole if written else _read_whole)(op, args, kwargs)


@torch.no_grad()
def _write_parts(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """An in-place op on lists, done on each rank's parts: those of torch (`_foreach_...`, `_fused_...`) compute element
    by element from the entries at the same place of all lists.

    AutoparError if such entries do not lie alike.
    """
    lists = [item for item in args if isinstance(item, (list, tuple))]
    for entries in zip(*(items for items in lists if len(items) == len(lists[0]))):
        tensors = [x for x in entries if isinstance(x, torch.Tensor) and x.ndim]
        layouts = {(x.device_mesh, x.placements) if isinstance(x, DTensor) else None for x in tensors}
        if len(layouts) > 1 or any(x.is_partial() for key in layouts if key is not None for x in key[1]):
            found = ", ".join(f"{tuple(x.shape)} {getattr(x, 'placements', 'plain')}" for x in tensors)
            raise AutoparError(
                f"{op} computes element by element, and expects tensors that lie alike; found {found}. Give all of them"
                " the placements of the parameter (distribute_tensor(x, p.device_mesh, p.placements)), or take the"
                " optimizer without fused=True and foreach=True"
            )
    op(*pytree.tree_map_only(DTensor, DTensor.to_local, tuple(args)), **kwargs)


@torch.no_grad()
def _read_whole(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of `op` for the whole tensors, on every rank."""
    x = next(item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, DTensor))
    args, kwargs = pytree.tree_map(lambda item: _whole_of(item, x), (tuple(args), dict(kwargs)))
    made, mesh = op(*args, **kwargs), x.device_mesh
    return pytree.tree_map_only(
        torch.Tensor, lambda y: distribute_tensor(y, mesh, [Replicate()] * mesh.ndim, src_data_rank=None), made
    )


def _read_all(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same; AutoparError for a plain tensor that needs a gradient."""
    return _read_whole(op, with_first(op, args), kwargs)


def _reduced(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A reduction as torch does it, where no dims stand for all."""
    x, *rest = args
    if _is_empty_somewhere(x):  # of no entries there is no largest one
        return _read_whole(op, args, kwargs)
    rest = [list(range(x.ndim)) if isinstance(item, (list, tuple)) and not item else item for item in rest]
    with as_torch_does(op):
        return op(x, *rest, **kwargs)


def _is_empty_somewhere(x: DTensor) -> bool:
    """Whether some rank has no entry of `x`."""
    sizes = list(x.shape)
    for placement, num_ranks in zip(x.placements, x.device_mesh.shape):
        if isinstance(placement, Shard):
            last = sizes[placement.dim] - (num_ranks - 1) * -(-sizes[placement.dim] // num_ranks)
            sizes[placement.dim] = max(last, 0)
    return 0 in sizes


def _turned(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    """AutoparError in place of a wait without end."""
    raise AutoparError(
        f"{op} would give a DTensor of shape {tuple(args[0].shape)}, of which each rank has a part, another shape in"
        " place: expected x.t() or x.transpose(...), which returns it, or to be called before autopar.compile"
    )


@torch.no_grad()
def _fill(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    """`x.fill_(value)`, also of a value without dims, which is what `x[...] = 0` calls."""
    x, value = args
    if any(placement.is_partial() for placement in x.placements):
        return write_whole(op, args, kwargs)
    x.to_local().fill_(_whole_of(value, x))
    return x


def _view(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view as torch makes it, or one that follows the tensor where torch made a copy."""
    x = args[0]
    try:
        with as_torch_does(op):
            made = op(*args, **kwargs)
    except RuntimeError:
        if op is not aten.as_strided.default:
            raise
        made = _read_whole(op, (x.contiguous(), *args[1:]), kwargs)
    for number, y in enumerate(made if isinstance(made, (list, tuple)) else (made,)):
        if not _share(x, y):
            follow(y, x, ((op, tuple(args[1:]), kwargs, number),))
    return made


@torch.no_grad()
def _share(x: DTensor, y: DTensor) -> bool:
    """Whether the parts have the same memory, which they have on all ranks or on none."""
    return x.to_local().untyped_storage()._cdata == y.to_local().untyped_storage()._cdata


def _overloads(names: Sequence[str], *, with_out: bool = False) -> list[OpOverload]:
    packets = [getattr(aten, name) for name in names]
    named = [(packet, name) for packet in packets for name in packet.overloads()]
    return [getattr(packet, name) for packet, name in named if ("out" in name) == with_out]


# The ops from a tensor to a view of it, with their arguments after the tensor and the number of the result.
Steps = tuple[tuple[OpOverload, tuple[Any, ...], Mapping[str, Any], int], ...]


class CopiedView(DTensor):
    """A DTensor that torch calls a view of `_base_of_view` and that has memory of its own: what is read of it is what
    the base has by now, what is written to it reaches the base.
    """

    _base_of_view: DTensor
    _steps: Steps
    _seen: int  # version of the base whose content this one has

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        if _version(self._base_of_view) != self._seen:
            self._read_base()
        return _PART.__get__(self)

    @torch.no_grad()
    def _read_base(self) -> None:
        self._seen = _version(self._base_of_view)
        keep_part(self, self._taken(self._base_of_view.full_tensor()))

    def _taken(self, whole: torch.Tensor) -> torch.Tensor:
        """This view of all of the base."""
        for op, others, options, number in self._steps:
            made = op(whole, *others, **options)
            whole = made[number] if isinstance(made, (list, tuple)) else made
        return whole

    @torch.no_grad()
    def _write_base(self, content: torch.Tensor) -> None:
        """Give the base what this view has, which is all of `content`."""
        base = self._base_of_view
        whole = base.full_tensor().clone()
        self._taken(whole).copy_(content)
        keep_part(base, whole)
        if not base.is_inference():
            torch.autograd.graph.increment_version(base)
        self._seen = _version(base)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
        aliases = {argument.name: argument.alias_info for argument in func._schema.arguments}
        is_written = [given[name] for name, alias in aliases.items() if name in given and alias and alias.is_write]
        written = [x for x in pytree.tree_leaves(is_written) if isinstance(x, CopiedView)]
        for x in written:
            check_no_summands(x._base_of_view, func)
            check_no_summands(x, func)
        made = super().__torch_dispatch__(func, types, args, kwargs)
        for x, content in [(x, x.full_tensor()) for x in written]:  # all before one changes a base
            x._write_base(content)
        if written:
            return args[0] if func._schema.returns and func._schema.returns[0].alias_info is not None else made
        alias = func._schema.arguments[0].alias_info
        if alias is not None and isinstance(x := args[0], CopiedView):
            step = (func, tuple(args[1:]), kwargs)
            for number, y in enumerate(made if isinstance(made, (list, tuple)) else (made,)):
                follow(y, x._base_of_view, (*x._steps, (*step, number)))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.clone().__reduce_ex__(proto)


_PART: Any = vars(DTensor)["_local_tensor"]
_CONTENT: Any = inspect.getattr_static(torch.Tensor, "data")


def follow(view: DTensor, base: DTensor, steps: Steps) -> None:
    """Make `view`, a copy of a part of `base`, a view of it."""
    vars(view).update(_base_of_view=base, _steps=steps, _seen=_version(base))
    view.__class__ = CopiedView
    if torch.__version__.startswith("2.11."):  # which computes ops of such a view without its `__torch_dispatch__`
        warn(f"torch 2.11 loses what is written to {steps[-1][0]} of a DTensor: write to all of it, or update torch")


def _version(x: DTensor) -> int:
    return 0 if x.is_inference() else x._version
