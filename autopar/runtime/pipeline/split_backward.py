"""A backward in two parts, for zero-bubble schedules: first the gradients of the inputs, later those of the weights.

In autograd's graph a path from a weight joins those from the inputs at some node. The first part keeps the gradients
that arrive at such nodes, the second starts there. `torch.distributed.pipelining` has both parts too, but goes from one
use of a weight to the next through the nodes between, whose saved tensors another weight's turn may have freed. Here
each node is run for its weights alone, so each use of a weight needs a node of its own (`codegen.program.Variable`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autopar.torch_compat import stage_backward

# (a node of autograd, the number of the result of its forward): where a gradient is sent to
Edge = tuple[Node, int]
Sent = Iterable[tuple[Edge, torch.Tensor]]


@dataclass(eq=False, slots=True)
class _Join:
    """A node that sends gradients to inputs and, along the edges `weights`, to weights alone; `came`: what it got."""

    node: Node
    weights: tuple[Edge, ...]
    came: tuple[torch.Tensor | None, ...] = ()

    def take(self, came: tuple[torch.Tensor | None, ...]) -> None:
        self.came = came

    def sent(self) -> Sent:
        """The gradients for weights; what the node saved is freed."""
        came = {GradientEdge(self.node, at): x for at, x in enumerate(self.came) if x is not None}
        edges = [GradientEdge(*edge) for edge in self.weights]
        made = torch.autograd.grad(list(came), edges, list(came.values()), allow_unused=True) if came else ()
        return ((edge, x) for edge, x in zip(self.weights, made) if x is not None)


@dataclass(eq=False, slots=True)
class WeightPart:
    """The rest of a backward: the gradients of the weights.

    `joins`: from the outputs on. `outputs`: (edge, gradient) of outputs that depend on weights alone. `piece_of`: node
    that leads to weights alone -> number of the connected piece that it is in, which is run once, with all gradients.
    """

    joins: list[_Join]
    outputs: list[tuple[Edge, torch.Tensor]]
    piece_of: Mapping[Node, int]

    def run(self) -> None:
        """Add the gradients to those of the leaves; what is done with is freed on the way."""
        missing = Counter(piece for join in self.joins for piece in self._pieces(join))
        waiting: dict[int, dict[Edge, torch.Tensor]] = {}
        self._add(waiting, self.outputs)
        self._finish(waiting, [piece for piece in waiting if not missing[piece]])
        while self.joins:
            join = self.joins.pop(0)
            pieces = self._pieces(join)
            self._add(waiting, join.sent())
            missing.subtract(pieces)
            self._finish(waiting, [piece for piece in pieces if not missing[piece]])

    def _pieces(self, join: _Join) -> set[int]:
        return {self.piece_of[node] for node, _ in join.weights}

    def _add(self, waiting: dict[int, dict[Edge, torch.Tensor]], sent: Sent) -> None:
        for edge, x in sent:
            sums = waiting.setdefault(self.piece_of[edge[0]], {})
            sums[edge] = sums[edge] + x if edge in sums else x

    @staticmethod
    def _finish(waiting: dict[int, dict[Edge, torch.Tensor]], pieces: Iterable[int]) -> None:
        for piece in pieces:
            if sums := waiting.pop(piece, None):
                torch.autograd.backward([GradientEdge(*edge) for edge in sums], list(sums.values()))


def backward_of_inputs(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None, inputs: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor | None, ...], WeightPart | None]:
    """The gradients of `inputs`, None for those that have none, and what is left to do.

    `gradients`: those of `outputs`, None for one that nobody has used; None: ones. The outputs are detached. Where two
    ops read a weight by the same node, the whole backward is run, and nothing is left.
    """
    given = gradients or [torch.ones_like(out) for out in outputs]
    pairs = [(out, x) for out, x in zip(outputs, given) if out.requires_grad and x is not None]
    wanted = [x for x in inputs if x.requires_grad]
    left = _weight_part([(get_gradient_edge(out), x) for out, x in pairs], [get_gradient_edge(x).node for x in wanted])
    if left is None:
        return stage_backward([out for out, _ in pairs], [x for _, x in pairs], list(inputs)), None
    handles = [join.node.register_prehook(join.take) for join in left.joins]
    try:
        ends, came = [out for out, _ in pairs], [x for _, x in pairs]
        can = bool(wanted and pairs)
        made = torch.autograd.grad(ends, wanted, came, retain_graph=True, allow_unused=True) if can else ()
    finally:
        for handle in handles:
            handle.remove()
    of_input = dict(zip(map(id, wanted), made))
    found = tuple(of_input.get(id(x)) for x in inputs)
    for out in ends:
        if not out._is_view():  # as a loss may be, which torch does not detach in place
            out.detach_()
    return found, left


def _weight_part(outputs: Sequence[tuple[GradientEdge, torch.Tensor]], inputs: Sequence[Node]) -> WeightPart | None:
    """The second part of a backward that starts with the gradients of `outputs`; None where it cannot be told apart."""
    nodes = _in_order([edge.node for edge, _ in outputs])
    to_inputs, users, joins = set(inputs), Counter[Node](), list[_Join]()
    for node in nodes:
        before = _edges(node)
        if any(edge[0] in to_inputs for edge in before):
            to_inputs.add(node)
            weights = tuple(dict.fromkeys(edge for edge in before if edge[0] not in to_inputs))
            users.update({edge[0] for edge in weights})
            joins += [_Join(node, weights)] if weights else []
    of_weights = [node for node in nodes if node not in to_inputs]
    for node in of_weights:
        users.update({edge[0] for edge in _edges(node)})
    if any(users[edge[0]] > 1 for join in joins for edge in join.weights):
        return None
    ends = [((edge.node, edge.output_nr), x) for edge, x in outputs if edge.node not in to_inputs]
    return WeightPart(joins[::-1], ends, _pieces(of_weights))


def _edges(node: Node) -> list[Edge]:
    """The edges along which `node` sends gradients."""
    return [(before, at) for before, at in node.next_functions if before is not None]


def _in_order(roots: Iterable[Node]) -> list[Node]:
    """The nodes that gradients reach from `roots`, each behind those that it sends gradients to."""
    done, seen, waiting = list[Node](), set[Node](), [(node, False) for node in roots]
    while waiting:
        node, is_left = waiting.pop()
        if is_left:
            done.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(before, False) for before, _ in _edges(node)]
    return done


def _pieces(nodes: Iterable[Node]) -> dict[Node, int]:
    """Node -> number of its connected piece; so each leaf gets its gradient at once, as its hooks expect."""
    graph = nx.Graph()
    for node in nodes:
        graph.add_node(node)
        graph.add_edges_from((node, before) for before, _ in _edges(node))
    return {node: number for number, piece in enumerate(nx.connected_components(graph)) for node in piece}
