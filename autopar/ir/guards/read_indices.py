"""`with_read_indices`: `x[i]` for a tensor `i` without dims, as the op that reads it.

torch reads the number of `i` and selects by that, which would hold for one number only: a graph has `aten.index` of the
tensor instead, which takes any, and raises the same error for one that is out of range.
"""

from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.ir.export.inplace_ops import written_arguments
from autopar.torch_compat import FakeTensor, OpOverload

_SELECT = "aten.select.int"
_READS = ("aten.item.default", "aten._local_scalar_dense.default")


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
