"""Ranks that sort their own tokens by expert compute what one device computes of all tokens."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn

from autopar.errors import PlanError
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import Mesh
from autopar.plans.fit_assignment import fit_assignment
from autopar.plans.validate import check_assignment
from autopar.sbp.analysis.expert_routing import routed_signatures
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import I, L, S
from autopar.sbp.redistribute import redistribute
from autopar.sbp.signature import Strategy
from tests.runtime.any_plan import Example, differences
from tests.runtime.training import random_assignment

WIDTH, EXPERTS, TOP = 4, 3, 2
Between = Callable[[torch.Tensor], torch.Tensor]


class Experts(nn.Module):
    """Each token is scaled and shifted by what belongs to its best experts: an expert's product with one row."""

    def __init__(self, between: Between = lambda rows: rows) -> None:
        super().__init__()
        self.gate, self.product = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.scale, self.shift = (nn.Parameter(torch.randn(EXPERTS, WIDTH)) for _ in range(2))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.gate(x).softmax(-1).topk(TOP)
        experts, order = experts.flatten().sort()
        rows = self.product(x[order // TOP]) * self.scale[experts] + self.shift[experts]
        rows = self.between(rows) * weights.flatten()[order][:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return rows[back].unflatten(0, (len(x), TOP)).sum(1)


def pairs(rows: torch.Tensor) -> torch.Tensor:
    return (rows.unflatten(0, (-1, 2)) + rows.unflatten(0, (-1, 2)).sum(1, keepdim=True)).flatten(0, 1)


def routing_graph(rows: int = 8, between: Between = lambda rows: rows) -> tuple[Graph, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, x = Experts(between).double(), torch.randn(rows, WIDTH).double()
    graph = trace(model, (x,), {})
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    stored = {item.value.name: tensors[item.fqn].detach() for item in graph.inputs if item.fqn in tensors}
    stored |= {item.value.name: torch.arange(rows * TOP) for item in graph.of_kind("constant")}
    own_names = tuple(replace(item, fqn=item.value.name) for item in graph.inputs)
    return replace(graph, inputs=own_names), stored | {item.value.name: x for item in graph.of_kind("argument")}


def is_own(strategy: Strategy) -> tuple[bool, ...]:
    """For each axis whether ranks have tokens of their own."""
    return tuple("L" in {p.kind for p in one.inputs + one.outputs} for one in strategy.signatures)


def drawn(graph: Graph, mesh: Mesh, axes: tuple[bool, ...], draw: Random) -> Assignment:
    """Any strategies and layouts, with local routing on these axes."""
    folded, candidates = fold(graph), annotate(graph, mesh)
    routed = routed_signatures(graph)
    offered = {
        name: tuple(one for one in found if name not in routed or is_own(one) == axes)
        for name, found in candidates.strategies.items()
    }
    ends = folded, type(candidates)(offered, candidates.layouts, candidates.outputs, (), ())
    return random_assignment(graph, *ends, mesh, draw)


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2), (2, 2, 2)], ids=str)
def test_local_routing_computes_what_one_device_computes(shape: tuple[int, ...]) -> None:
    graph, values = routing_graph()
    cotangents = {0: torch.randn(8, WIDTH).double()}
    mesh = Mesh(shape, tuple(f"a{axis}" for axis in range(len(shape))))
    for axes, seed in itertools.product(itertools.product((False, True), repeat=len(shape)), range(3)):
        assignment = drawn(graph, mesh, axes, Random(f"{axes}{seed}"))
        wrong, other = differences(Example(graph, values, cotangents, mesh, assignment))
        assert not wrong and not other, (axes, seed, wrong, other)


@pytest.mark.parametrize(
    "between",
    [
        lambda rows: rows.cumsum(0),
        lambda rows: rows - rows.mean(0),
        lambda rows: rows.flip(0),
        lambda rows: rows.sort(0)[0],
    ],
)
def test_rows_that_mix_are_not_routed_locally(between: Between) -> None:
    graph, _ = routing_graph(between=between)
    assert routed_signatures(graph) == {}


def test_tokens_that_do_not_divide_are_not_routed_locally() -> None:
    graph, _ = routing_graph(rows=6)  # 12 rows divide by 4, the tokens do not
    for size, expected in ((2, True), (3, True), (4, False)):
        candidates = annotate(graph, Mesh((size,), ("dp",)))
        found = {name for name, offered in candidates.strategies.items() if any(is_own(one)[0] for one in offered)}
        assert found == (set(routed_signatures(graph)) if expected else set())


def test_local_routing_gives_way_where_another_batch_does_not_divide() -> None:
    mesh = Mesh((4,), ("dp",))
    graph, _ = routing_graph()
    assignment = drawn(graph, mesh, (True,), Random(0))
    assert fit_assignment(assignment, graph, mesh).strategies == assignment.strategies
    other, _ = routing_graph(rows=6)
    fitted = fit_assignment(assignment, other, mesh)
    check_assignment(fitted, other, fold(other), annotate(other, mesh), mesh)
    assert not any(is_own(one)[0] for one in fitted.strategies.values())


def test_what_is_in_a_ranks_own_order_is_not_converted() -> None:
    mesh = Mesh((4,), ("dp",))
    graph, _ = routing_graph()
    candidates, assignment = annotate(graph, mesh), drawn(graph, mesh, (True,), Random(0))
    sort = next(op.name for op in graph.ops if op.target == "aten.sort.default")
    for op in (op for op in graph.ops if op.name in routed_signatures(graph)):
        whole = {op.name: candidates.strategies[op.name][0]}
        broken = Assignment(assignment.strategies | whole, assignment.layouts, {}, assignment.outputs)
        with pytest.raises(PlanError, match="cannot be converted"):
            check_assignment(broken, graph, fold(graph), candidates, mesh)
    several = next(value.name for value in assignment_values(graph, sort) if len(graph.uses[value.name]) > 1)
    kept = Assignment(assignment.strategies, assignment.layouts, {several: (I,)}, assignment.outputs)
    with pytest.raises(PlanError, match=f"{several} in layout L.0., which cannot be converted to B"):
        check_assignment(kept, graph, fold(graph), candidates, mesh)
    for pair in (((L(0),), (I,)), ((I,), (L(0),)), ((L(0),), (S(0),)), ((L(),), (L(0),))):
        with pytest.raises(AssertionError, match="is not converted"):
            redistribute(*pair)
    assert redistribute((L(0),), (L(0),)) == ()


def assignment_values(graph: Graph, name: str) -> tuple:
    return next(op.outputs for op in graph.ops if op.name == name)
