"""Rows exchanged by expert between ranks as threads, whatever the experts' shares of the rows are."""

import math
from random import Random
from typing import Any

import pytest
import torch

from autopar.errors import AutoparError
from autopar.sbp.axis import Axis
from autopar.sbp.exchange import from_experts, route_by, to_experts
from autopar.sbp.local_ops import LOCAL_OPS
from autopar.sbp.proof.cut_and_join import Coordinate
from autopar.sbp.signature import EXCHANGES
from tests.sbp.simulate import on_threads

EXPERTS = 12
SHAPES = [(2,), (4,), (2, 2), (3, 2)]
TARGET = "aten._grouped_mm.default"


def drawn_counts(kind: str, num_ranks: int) -> list[list[int]]:
    """For each rank how many rows it has of each expert."""
    draw = Random(kind)
    if kind == "one expert":
        return [[0] * 5 + [9] + [0] * (EXPERTS - 6) for _ in range(num_ranks)]
    counts = [[draw.randrange(4) for _ in range(EXPERTS)] for _ in range(num_ranks)]
    if kind == "a rank without rows":
        counts[-1] = [0] * EXPERTS
    if kind == "an idle rank":
        counts = [[0] * (EXPERTS // num_ranks) + row[EXPERTS // num_ranks :] for row in counts]
    return [[0] * EXPERTS] * num_ranks if kind == "no rows" else counts


KINDS = ["any", "one expert", "a rank without rows", "an idle rank", "no rows"]


def rows_of(counts: list[int], rank: int) -> torch.Tensor:
    """Rows [their expert, their rank, their number], sorted by expert."""
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    rows = [(expert, rank, number) for number, expert in enumerate(experts)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)


def offs_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


def place(at: Coordinate, shape: tuple[int, ...]) -> int:
    return int(torch.arange(math.prod(shape)).reshape(shape)[at])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_expert_gets_its_rows_of_all_ranks_and_sends_them_back(shape: tuple[int, ...], kind: str) -> None:
    counts = drawn_counts(kind, math.prod(shape))

    def rank(at: Coordinate, axes: tuple[Axis, ...]) -> Any:
        mine = counts[place(at, shape)]
        rows = rows_of(mine, place(at, shape)).requires_grad_()
        route = route_by(offs_of(mine), axes, len(rows))
        at_experts = to_experts(rows, route)
        (at_experts * at_experts[:, :1].detach()).sum().backward()
        return rows.detach(), rows.grad, at_experts.detach(), route, from_experts(at_experts, route).detach()

    per_rank = EXPERTS // math.prod(shape)
    for at, (rows, gradient, at_experts, route, back) in on_threads(rank, shape).items():
        own = range(place(at, shape) * per_rank, (place(at, shape) + 1) * per_rank)
        everything = torch.cat([rows_of(of_rank, number) for number, of_rank in enumerate(counts)])
        expected = sorted(row for row in everything.tolist() if row[0] in own)
        assert sorted(at_experts.tolist()) == expected
        assert at_experts[:, 0].tolist() == [row[0] for row in expected]
        assert route.num_rows == len(expected)
        assert route.offs.tolist() == [sum(row[0] <= expert for row in expected) for expert in own]
        torch.testing.assert_close(back, rows)
        torch.testing.assert_close(gradient, rows[:, :1].expand_as(rows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_products_of_exchanged_rows_are_those_of_one_device(shape: tuple[int, ...], kind: str) -> None:
    """Values and gradients of two products with a table between them, as if each rank had all experts."""
    torch.manual_seed(0)
    ranks = math.prod(shape)
    counts = drawn_counts(kind, ranks)
    first, last = (torch.randn(EXPERTS, 8, 8, requires_grad=True) for _ in range(2))
    table = torch.randn(EXPERTS, 8, requires_grad=True)
    rows = [torch.randn(sum(of_rank), 8, requires_grad=True) for of_rank in counts]
    keys = [torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(of_rank)) for of_rank in counts]

    def rank(at: Coordinate, axes: tuple[Axis, ...]) -> Any:
        number, parts = place(at, shape), slice(*(EXPERTS // ranks * (place(at, shape) + i) for i in (0, 1)))
        mine = [x.detach().clone().requires_grad_() for x in (rows[number], first[parts], table[parts], last[parts])]
        x, own_first, own_table, own_last = mine
        offs = offs_of(counts[number])
        hidden = LOCAL_OPS[TARGET].run(x, own_first, offs, dispatch=axes)
        hidden = (hidden + LOCAL_OPS["aten.index.Tensor"].run(own_table, [keys[number]], between=axes)).tanh()
        out = LOCAL_OPS[TARGET].run(hidden, own_last, offs, combine=axes)
        return out.detach(), *torch.autograd.grad(out.square().sum(), mine)

    outs = [
        torch.einsum("tk,tkn->tn", (torch.einsum("tk,tkn->tn", x, first[key]) + table[key]).tanh(), last[key])
        for x, key in zip(rows, keys)
    ]
    sum(out.square().sum() for out in outs).backward()
    for at, (out, *gradients) in on_threads(rank, shape).items():
        number, parts = place(at, shape), slice(*(EXPERTS // ranks * (place(at, shape) + i) for i in (0, 1)))
        expected = outs[number].detach(), rows[number].grad, first.grad[parts], table.grad[parts], last.grad[parts]
        for one, other in zip((out, *gradients), expected):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_rows_without_expert_are_refused_on_all_ranks() -> None:
    def rank(at: Coordinate, axes: tuple[Axis, ...]) -> str:
        with pytest.raises(AutoparError) as error:
            route_by(offs_of([2, 1, 0, 1]), axes, 5 if at == (1,) else 4)
        return str(error.value)

    for message in on_threads(rank, (2,)).values():
        assert "on rank 1 of the axis the experts' counts of rows, [2, 1, 0, 1], are not those of all its" in message


def test_a_dry_run_has_as_many_rows_as_before() -> None:
    axes = (Axis("a", 4, 0, None),)
    rows, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((6, 8), (3, 8, 8)))
    offs = torch.empty(EXPERTS, dtype=torch.int32, device="meta")
    for role in EXCHANGES:
        assert LOCAL_OPS[TARGET].run(rows, weight, offs, **{role: axes}).shape == (6, 8)
