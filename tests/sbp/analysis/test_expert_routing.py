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
from autopar.planner.handwritten.hand_plan import format_hand_plan, hand_plan, parse_hand_plan
from autopar.plans.fit_assignment import fit_assignment
from autopar.plans.validate import check_assignment
from autopar.sbp.analysis.expert_routing import num_exchanged, routed_signatures
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import E, I, L, R, S, codes_of, format_layout, is_convertible, parse_layout, placement_of
from autopar.sbp.redistribute import redistribute
from autopar.sbp.signature import EXCHANGES, Strategy
from tests.grouped_experts import GROUPED, grouped_case
from tests.runtime.any_plan import Example, differences
from tests.runtime.training import random_assignment, traced

WIDTH, EXPERTS, TOP = 4, 3, 2
Between = Callable[[torch.Tensor], torch.Tensor]
Counted = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


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


def test_a_range_over_all_tokens_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8192 sequences it is 2 GB for each layer."""
    monkeypatch.setattr("autopar.sbp.analysis.expert_routing.run_constants", None)
    graph, _ = routing_graph()
    assert any(op.target == "aten.index_put.default" and routed_signatures(graph)[op.name] for op in graph.ops)


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


class Grouped(nn.Module):
    """Experts as groups of two grouped products, with a bias in between."""

    def __init__(self, counted: Counted, between: Between = lambda rows: rows) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.first, self.last = (nn.Parameter(torch.randn(4, 8, 8)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(4, 8))
        self.counted, self.between = counted, between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts, order = self.gate(x).argmax(-1).sort()
        offs = self.counted(experts)
        rows = torch._grouped_mm(x[order], self.first, offs[0]) + self.bias[experts]
        rows = torch._grouped_mm(self.between(rows), self.last, offs[-1])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return rows[back]


def ends(experts: torch.Tensor, bins: int = 4, high: int = 3) -> torch.Tensor:
    return torch.histc(experts.float(), bins, 0, high).cumsum(0, dtype=torch.int32)


def grouped_graph(counted: Counted = lambda experts: (ends(experts),), between: Between = lambda rows: rows) -> Graph:
    with torch.device("meta"):
        model, x = Grouped(counted, between).bfloat16(), torch.randn(8, 8, dtype=torch.bfloat16)
    return trace(model, (x,), {})


@pytest.mark.parametrize("between", [torch.relu, lambda rows: torch.cat(rows.chunk(2, 1)[::-1], 1), nn.Dropout(0.5)])
def test_rows_of_grouped_products_are_exchanged_by_expert(between: Between) -> None:
    graph = grouped_graph(between=between)
    assert num_exchanged(graph) == 4
    roles = [one.role for found in routed_signatures(graph).values() for one in found if one.role]
    assert sorted(roles) == ["between", "between", "combine", "dispatch", "inverse"]


@pytest.mark.parametrize(
    "counted",
    [
        lambda experts: (ends(experts), ends(experts).long().int()),  # are two counts one?
        lambda experts: (ends(experts, 4, 7),),  # two experts in a bin
        lambda experts: (ends(experts, 8, 7)[:4],),  # more ids than experts
        lambda experts: (ends(experts, 4, 3)[[0, 1, 2, 3]],),
    ],
)
def test_rows_whose_counts_are_not_their_experts_are_not_exchanged(counted: Counted) -> None:
    assert num_exchanged(grouped_graph(counted)) == 0


def test_axes_that_exchange_rows_take_no_other_role() -> None:
    graph = grouped_graph()
    product = next(
        op for op in graph.ops if "dispatch" in {one.role for one in routed_signatures(graph).get(op.name, ())}
    )
    for strategy in annotate(graph, Mesh((2, 2), ("a", "b"))).strategies[product.name]:
        roles = {one.role for one in strategy.signatures} - {""}
        assert len(roles) < 2 or not roles & EXCHANGES, strategy


def test_a_row_count_in_an_argument_keeps_rows_where_they_are() -> None:
    graph = grouped_graph(between=lambda rows: rows.view(8, 2, 4).relu().view(8, 8))
    view = next(op for op in graph.ops if op.target in ("aten.view.default", "aten.reshape.default"))
    found = routed_signatures(graph)
    assert view.name in found
    assert not any(placement.kind == "E" for one in found[view.name] for placement in one.outputs)


def test_hand_plans_exchange_rows_from_the_first_product_to_the_last() -> None:
    mesh = Mesh((2, 2), ("a", "b"))
    graph = grouped_graph()
    folded, candidates = fold(graph), annotate(graph, mesh, fold(graph))
    for text, axes in (("megatron:ep=2,zero3", (1,)), ("megatron:ep=4", (0, 1)), ("megatron:dp=2,tp=2,ep=2", (0,))):
        plan = parse_hand_plan(text, mesh)
        assert plan.expert_axes == axes
        assert parse_hand_plan(format_hand_plan(plan, mesh), mesh) == plan
        found = hand_plan(plan, graph, folded, candidates, mesh)
        check_assignment(found, graph, folded, candidates, mesh)
        for axis in range(mesh.ndim):
            roles = [found.strategies[op.name].signatures[axis].role for op in graph.ops]
            expected = ["between", "combine", "dispatch"] if axis in axes else []
            assert sorted(role for role in roles if role in EXCHANGES) == expected, (text, axis)
    with pytest.raises(PlanError, match="ep must be the product of the last axes that split the batch"):
        parse_hand_plan("megatron:ep=3", mesh)
    dense = routing_graph()[0]
    wide = Mesh((8,), ("a",))
    with pytest.raises(PlanError, match=r"hand plan 'megatron:ep=8': the model has 4 experts .* which ep must divide"):
        hand_plan(parse_hand_plan("megatron:ep=8", wide), graph, folded, annotate(graph, wide, folded), wide)
    with pytest.raises(PlanError, match="the model has no experts whose rows can be exchanged"):
        hand_plan(parse_hand_plan("megatron:ep=4", mesh), dense, fold(dense), annotate(dense, mesh, fold(dense)), mesh)


def test_what_each_device_has_of_its_experts_is_not_converted() -> None:
    assert is_convertible((E(0), I), (E(0), R))
    for pair in (((E(0),), (L(0),)), ((L(0),), (E(0),)), ((E(0),), (I,)), ((S(0),), (E(0),))):
        assert not is_convertible(*pair)
    assert [placement_of(code) for code in codes_of((E(0), L(0), E(1), S(3)))] == [E(0), L(0), E(1), S(3)]
    assert parse_layout(format_layout((E(0), L(0), L(), I))) == (E(0), L(0), L(), I)


@pytest.mark.parametrize("form", GROUPED)
def test_forms_of_torchtitan_are_routed(form: str) -> None:
    graph = traced(grouped_case(form, 1))
    assert num_exchanged(graph) == 4
    seen = next(value for fqn, value in graph.mutations if fqn.endswith("seen"))
    (counted,) = (op for op in graph.ops if seen in op.outputs)
    assert counted.name not in routed_signatures(graph)  # who balances experts reads the counts of all rows


@pytest.mark.parametrize(
    "places",
    [
        lambda order: order.reshape(-1, 2).repeat_interleave(2, 0).repeat(1, 2),  # others than a row's own
        lambda order: order[:, None].expand(-1, WIDTH).flip(1).cumsum(0) % len(order),
        lambda order: order.expand(len(order), -1)[:, :WIDTH],  # each in the first row, not in its own
    ],
)
def test_places_that_are_not_those_of_rows_are_not_routed_locally(places: Between) -> None:
    class Read(nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            wide = places(ids.argsort())
            return torch.zeros_like(x).scatter_add(0, wide, torch.gather(x, 0, wide))

    graph = trace(Read(), (torch.randn(8, WIDTH, requires_grad=True), torch.randint(3, (8,))), {})
    assert any(op.target == "aten.argsort.default" for op in graph.ops)
    assert routed_signatures(graph) == {}
