"""The functions of indices that `flex_attention` is given, `score_mod` and `mask_mod`, as graphs of torch's ops.

A graph reads the tensors that the function captures as further inputs, so that they have a layout like any others. It
is known to the process by a name made of its text: equal functions of all layers and ranks have one name.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.torch_compat import disable_proxy_modes_tracing

INDICES = ("batch", "head", "query", "key")  # the order in which both functions take them
_INDEX = "aten.index.Tensor"
# Further ops that give at each index what they give for one index alone; the last few make a constant.
_AT_EACH_INDEX = frozenset(
    f"aten.{name}"
    for name in (
        *("index.Tensor", "detach.default", "alias.default", "clone.default", "_to_copy.default", "to.dtype"),
        *("lift_fresh_copy.default", "scalar_tensor.default", "full.default", "new_ones.default", "new_zeros.default"),
    )
)
_NUM_SAMPLES = 256  # queries and keys that the share of scores is counted at
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class IndexFunctions:
    """`score(score, batch, head, query, key, *captured)` and `mask(batch, head, query, key, *captured)`, None for one
    that the call lacks.
    """

    score: GraphModule | None
    mask: GraphModule | None
    num_captured: int


_FUNCTIONS: dict[str, IndexFunctions] = {"": IndexFunctions(None, None, 0)}


def functions_called(name: str) -> IndexFunctions:
    """The functions that `traced` gave this name."""
    return _FUNCTIONS[name]


def traced(
    score: Callable[..., Any] | None, mask: Callable[..., Any] | None, device: torch.device
) -> tuple[str, tuple[torch.Tensor, ...]]:
    """(name of the functions as graphs, the tensors on `device` that they capture); neither need be given."""
    captured: list[torch.Tensor] = []
    with disable_proxy_modes_tracing(), torch.no_grad():
        indices = [torch.zeros((), dtype=torch.int32, device=device) for _ in INDICES]
        of_score = _graph(score, [torch.zeros((), device=device), *indices], captured)
        of_mask = _graph(mask, indices, captured)
    graphs = [None if graph is None else _with_captured(graph, len(captured)) for graph in (of_score, of_mask)]
    text = "\n".join("" if graph is None else graph.code for graph in graphs)
    name = hashlib.sha256(text.encode()).hexdigest()[:12] if text.strip() else ""
    _FUNCTIONS.setdefault(name, IndexFunctions(graphs[0], graphs[1], len(captured)))
    return name, tuple(captured)


def _graph(
    function: Callable[..., Any] | None, examples: Sequence[torch.Tensor], captured: list[torch.Tensor]
) -> GraphModule | None:
    """The graph of `function`, with a captured tensor as attribute `captured_0`, its place in `captured`."""
    if function is None:
        return None
    with _IndexedByTensors():
        graph = make_fx(function)(*examples)
    for node in graph.graph.nodes:
        if any(isinstance(arg, torch.SymInt) for arg in node.args):
            raise TraceError("flex_attention's functions of indices read a size that changes; give them its number")
        if node.op == "get_attr":
            tensor = getattr(graph, node.target)
            place = next((i for i, known in enumerate(captured) if known is tensor), len(captured))
            captured += [tensor] if place == len(captured) else []
            node.target = f"captured_{place}"
    return graph


def _with_captured(graph: GraphModule, num_captured: int) -> GraphModule:
    """`graph` with the captured tensors as inputs behind the others."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    added: list[Node] = []
    for number in range(num_captured):
        with graph.graph.inserting_after(added[-1] if added else last):
            added.append(graph.graph.placeholder(f"captured_{number}"))
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        node.replace_all_uses_with(added[int(str(node.target).removeprefix("captured_"))])
        graph.graph.erase_node(node)
    return GraphModule(torch.nn.Module(), graph.graph)


class _IndexedByTensors(TorchFunctionMode):
    """`table[query, key]` reads the table at indices, where Python would ask them for their numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            are_tensors = [isinstance(x, torch.Tensor) for x in index]
            if any(are_tensors) and all(isinstance(x, torch.Tensor | int) for x in index):
                here = args[0].device
                places = [x if isinstance(x, torch.Tensor) else torch.full((), x, device=here) for x in index]
                return torch.ops.aten.index.Tensor(args[0], places)
        return func(*args, **(kwargs or {}))


def broadcasting(name: str) -> GraphModule:
    """The mask, which takes tensors of indices that broadcast; TraceError if an op of it is not elementwise."""
    mask = functions_called(name).mask
    assert mask is not None, f"{name} has no mask"
    for node in mask.graph.nodes:
        if node.op == "call_function" and not _is_elementwise(node.target):
            raise TraceError(
                f"the mask of create_block_mask calls {node.target}, which is not computed at all indices at once:"
                " make the BlockMask outside the model, or write its function in elementwise ops"
            )
    return mask


def _is_elementwise(target: Any) -> bool:
    return torch.Tag.pointwise in target.tags or str(target) in _AT_EACH_INDEX


@lru_cache(maxsize=1024)
def dims_read(name: str, index: str) -> tuple[int | None, ...] | None:
    """For each captured tensor the dim along which the functions read it at `index`, None for one that is not read so.

    None in place of all if the functions do more with the index: its number matters then, not only what lies there.
    """
    functions = functions_called(name)
    dims: list[int | None] = [None] * functions.num_captured
    for graph in (graph for graph in (functions.score, functions.mask) if graph is not None):
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        captured = inputs[len(inputs) - len(dims) :]
        counted = inputs[len(inputs) - len(dims) - len(INDICES) + INDICES.index(index)]
        for user in counted.users:
            if str(user.target) != _INDEX or user.args[0] not in captured or user.args[1].count(counted) > 1:
                return None
            place, dim = captured.index(user.args[0]), user.args[1].index(counted)
            if dims[place] not in (None, dim):
                return None
            dims[place] = dim
        # a table that is read elsewhere along that dim, at another index or as a whole, cannot be split
        for tensor, dim in zip(captured, dims):
            if dim is not None and not all(_reads_at(user, tensor, dim, counted) for user in tensor.users):
                return None
    return tuple(dims)


def _reads_at(user: Node, tensor: Node, dim: int, index: Node) -> bool:
    if str(user.target) != _INDEX:
        return False
    args: Any = user.args
    table, indices = args
    return table is tensor and tensor not in indices and len(indices) > dim and indices[dim] is index


@lru_cache(maxsize=1024)
def share_seen(name: str, shapes: tuple[Shape, ...], num_queries: int, num_keys: int, num_parts: int) -> float:
    """The share of the scores that the mask leaves, of the part of the queries, of `num_parts`, that sees most.

    Counted at evenly spaced queries and keys of the first head of the first sample, with zeros for what the mask
    captures, of these `shapes`: sequence ids are then those of a single document, which is the most that any may see.
    """
    mask = functions_called(name).mask
    if mask is None:
        return 1.0
    captured = [torch.zeros((), dtype=torch.int64).expand(shape) for shape in shapes]
    queries, keys = _spaced(num_queries, -(-_NUM_SAMPLES // num_parts) * num_parts), _spaced(num_keys, _NUM_SAMPLES)
    first = torch.zeros(1, dtype=torch.int32)
    seen = over_indices(mask, (first, first, queries, keys), captured)[0, 0].double().mean(1)
    parts = seen.view(num_parts, -1) if len(seen) % num_parts == 0 else seen[None]
    return max(float(parts.mean(1).max()), 1 / _NUM_SAMPLES)


def _spaced(size: int, num: int) -> torch.Tensor:
    """`num` of `size` positions, each in the middle of its share; all if there are fewer."""
    num = min(size, num)
    return ((torch.arange(num) * size + size // 2) // num).to(torch.int32)


def over_indices(
    function: Callable[..., torch.Tensor],
    indices: Sequence[torch.Tensor],
    captured: Sequence[torch.Tensor],
    score: torch.Tensor | None = None,
) -> torch.Tensor:
    """[batch, head, query, key]: `function` at all combinations of the `indices`, each a vector."""
    given, first = [*indices, *captured], () if score is None else (score,)
    for place in reversed(range(len(INDICES))):
        dims = [0] * len(first) + [0 if i == place else None for i in range(len(given))]
        function = torch.vmap(function, in_dims=tuple(dims))
    return function(*first, *given)
