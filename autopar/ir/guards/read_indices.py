"""`with_read_indices`: `x[i]` for a tensor `i` without dims, as the op that reads it.

torch reads the number of `i` and selects by that, which would hold for one number only: a graph has `aten.index` of the
tensor instead, which takes any, and raises the same error for one that is out of range.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import EllipsisType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion

from autopar.ir.export.inplace_ops import written_arguments
from autopar.torch_compat import FakeTensor, OpOverload

_SELECT = "aten.select.int"
_READS = ("aten.item.default", "aten._local_scalar_dense.default")
_ALL = slice(None)


def indices_read() -> AbstractContextManager[Any]:
    """A context in which a tensor without dims as an index is read by an op, as torch.export does from 2.13 on."""
    return nullcontext() if TorchVersion(torch.__version__) >= "2.13" else _IndicesRead()


class _IndicesRead(TorchFunctionMode):
    """Until 2.12 torch reads such an index where no op is recorded, which fixes its number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_is_number, items)) and not any(map(_is_other_tensor, items)):
                return _selected(args[0], items)
        return func(*args, **(kwargs or {}))


def _is_number(item: Any) -> bool:
    is_tensor = isinstance(item, torch.Tensor) and item.ndim == 0 and item.dtype != torch.uint8  # which is a mask
    return is_tensor and item.dtype != torch.bool and not item.is_floating_point() and not item.is_complex()


def _is_other_tensor(item: Any) -> bool:
    """Whether the item is a tensor, mask or list, beside which numbers are repeated, and select no dim of their own."""
    plain = isinstance(item, int | torch.SymInt | slice | EllipsisType | None) and not isinstance(item, bool)
    return not plain and not _is_number(item)


def _selected(x: torch.Tensor, items: tuple[Any, ...]) -> torch.Tensor:
    """`x[items]`, of which those that are tensors are selected last."""
    others = tuple(_ALL if _is_number(item) else item for item in items)
    result = x if all(item is _ALL for item in others) else x[others]
    rest = x.ndim - sum(item is not None and item is not Ellipsis for item in items)
    dims = [rest if item is Ellipsis else int(not isinstance(item, int | torch.SymInt)) for item in items]
    for place in reversed(range(len(items))):
        if _is_number(items[place]):
            result = torch.select(result, sum(dims[:place]), items[place].item())
    return result


def with_read_indices(module: GraphModule) -> None:
    """Replace selects by a number that is read of a tensor, in the graphs of `module`, in place.

    One whose memory the forward writes to stays, since what `aten.index` gives is a copy.
    """
    parts = [each for each in module.modules() if isinstance(each, GraphModule)]
    written = {storage for part in parts for storage in _written(part.graph)}
    for part in parts:
        for node in [each for each in part.graph.nodes if _is_read_select(each)]:
            if _storage_of(node) not in written:
                _replace(part.graph, node)


def _is_read_select(node: Node) -> bool:
    if str(node.target) != _SELECT or not isinstance(node.meta.get("val"), FakeTensor):
        return False
    index = node.args[2]
    return isinstance(index, Node) and str(index.target) in _READS


def _written(graph: Graph) -> Iterator[int]:
    """The memory of what ops of the graph write to."""
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and (names := written_arguments(node.target)):
            arguments = node.target._schema.arguments
            given = {argument.name: value for argument, value in zip(arguments, node.args)} | node.kwargs
            for name in names:
                items = given.get(name)
                for item in items if isinstance(items, list | tuple) else (items,):
                    if isinstance(item, Node) and isinstance(item.meta.get("val"), torch.Tensor):
                        yield _storage_of(item)


def _storage_of(node: Node) -> int:
    return node.meta["val"].untyped_storage()._cdata


def _replace(graph: Graph, node: Node) -> None:
    x, dim, read = node.args
    assert isinstance(x, Node) and isinstance(dim, int) and isinstance(read, Node), "a select of a number that is read"
    fake = node.meta["val"]
    indices = [None] * (dim % x.meta["val"].ndim) + [read.args[0]]
    with graph.inserting_before(node):
        lookup = graph.call_function(torch.ops.aten.index.Tensor, (x, indices))
    with fake.fake_mode:
        made = torch.empty(fake.shape, dtype=fake.dtype, device=fake.device, requires_grad=fake.requires_grad)
    lookup.meta = node.meta | {"val": made}
    node.replace_all_uses_with(lookup)
    graph.erase_node(node)
