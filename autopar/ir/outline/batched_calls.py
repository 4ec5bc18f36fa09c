"""`with_batches`: calls of torch.vmap that an export recorded, as ops on the whole batch.

torch.export records what a function does with one sample, between the start and the end of a batch. Traced again below
torch.func, each op is that of all samples, by torch's own rules of batching.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.torch_compat import FakeTensor, OpOverload, peek_interpreter_stack

_STARTS, _ENDS = "_vmap_increment_nesting", "_vmap_decrement_nesting"
_OF_VMAP = (_STARTS, _ENDS, "lazy_load_decompositions", "_add_batch_dim", "_remove_batch_dim")
_CALL = "flat_apply"  # of a function that an export does not look into, such as the index of masks of transformers
_PLACE = ("stack_trace", "nn_module_stack")
# In the meta of what was written out: autocast would have seen the ops that it is made of.
BATCHED = "autopar_batched"


def with_batches(module: GraphModule) -> None:
    """Replace the batches in the graphs of `module` by ops, in place.

    One with other transforms, a region of its own, or sizes that are not known stays, and is refused when the graph is
    converted.
    """
    for part in [each for each in module.modules() if isinstance(each, GraphModule)]:
        batches = [nodes for nodes in _batches(part.graph) if _is_plain(nodes)]
        for nodes in batches:
            _write_out(part, nodes)
        if batches:
            part.recompile()


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _batches(graph: Graph) -> Iterator[list[Node]]:
    """The nodes of each outermost batch, with the call before it that loads rules."""
    nodes, depth = list[Node](), 0
    for node in graph.nodes:
        if not depth and _name(node) not in ("lazy_load_decompositions", _STARTS):
            nodes = []
            continue
        nodes.append(node)
        depth += (_name(node) == _STARTS) - (_name(node) == _ENDS)
        if not depth and _name(node) == _ENDS:
            yield nodes
            nodes = []


def _is_plain(nodes: list[Node]) -> bool:
    """Whether the batch can be traced again: of ops and functions alone, on tensors of known sizes."""
    is_call = all(isinstance(node.target, OpOverload) or _name(node) in (*_OF_VMAP, _CALL) for node in nodes)
    values = [each.meta.get("val") for each in _given(nodes) if each.op != "get_attr"]
    are_known = all(isinstance(x, FakeTensor) and all(type(size) is int for size in x.shape) for x in values)
    return is_call and are_known


def _given(nodes: list[Node]) -> list[Node]:
    """The nodes outside of a batch that it reads."""
    inside = set(nodes)
    return list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside))


def _write_out(module: GraphModule, nodes: list[Node]) -> None:
    inside, graph = set(nodes), module.graph
    given = [each for each in _given(nodes) if "val" in each.meta]
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    inner = Graph()
    own = {each: inner.placeholder(each.name) for each in given}
    for node in [*(each for each in _given(nodes) if each not in own), *nodes]:
        own[node] = inner.node_copy(node, own.__getitem__)
    inner.output(tuple(own[each] for each in results))
    end: Any = nodes[-1].target
    try:
        with torch.no_grad():
            traced = make_fx(GraphModule(module, inner))(*(each.meta["val"] for each in given))
    finally:  # a batch whose function failed has not ended
        while peek_interpreter_stack() is not None:
            end()
    place = next((node.meta for node in nodes if "stack_trace" in node.meta and _name(node) not in _OF_VMAP), {})
    made: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), given))
    with graph.inserting_before(nodes[0]):
        for node in traced.graph.nodes:
            if node.op == "call_function":
                made[node] = graph.node_copy(node, made.__getitem__)
                for key in _PLACE:
                    made[node].meta.pop(key, None)
                made[node].meta |= {key: place[key] for key in _PLACE if key in place} | {BATCHED: True}
    ends: Any = traced.graph.output_node().args[0]
    for old, new in zip(results, ends):
        old.replace_all_uses_with(made[new])
    for node in reversed(nodes):
        graph.erase_node(node)
