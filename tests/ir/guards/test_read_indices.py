"""`x[i]` for a tensor `i` without dims takes any index; one that is written to, the example's."""

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError, TraceError
from autopar.ir.graph import Graph
from autopar.ir.passes.normalise import normalise
from autopar.ir.run_graph import run
from autopar.ir.sizes.sized_trace import SizedTrace
from autopar.ir.trace import trace

Tensor = torch.Tensor
X = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))


class Reads(nn.Module):
    """A table and activations at a step that is an argument, and at one that is a buffer, which goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 3, 5))
        self.register_buffer("at", torch.tensor(1))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        read = self.table[i] + self.table[i, i] + self.table[:, i].sum(0) + self.table[self.at]
        self.at.copy_((self.at + 1) % 6)
        return x.sin()[:, i] * read.sum(0) + x[i, i]


class Writes(nn.Module):
    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        x = x.clone()
        x[:, i].mul_(2)
        return x + x.select(1, i)[:, None]


class Powers(nn.Module):
    """A number that is read is computed with."""

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return x * 0.5 ** i.item()


@pytest.mark.parametrize("i", [0, 2, -1])
def test_any_index_is_read(i: int) -> None:
    model = Reads()
    graph = trace(model, (X, torch.tensor(1)), {})
    state = {name: x.detach().clone() for name, x in (*model.named_parameters(), *model.named_buffers())}
    for _ in range(3):
        (found,), updates = _run(graph, state, torch.tensor(i))
        torch.testing.assert_close(found, model(X, torch.tensor(i)))
        state |= updates
    assert state["at"] == 4


class Beside(nn.Module):
    """An index beside others of each kind."""

    def forward(self, x: Tensor, i: Tensor, rows: Tensor) -> list[Tensor]:
        z = x[None].sin()
        plain = [z[..., i], z[:, 1:, i], z[0, ..., i, None], z[i - i, :, i], z[:, i, None, -1], z[None, ..., i, :]]
        return [*plain, z[0, rows] * z[0, i]]


def test_an_index_beside_others_is_as_in_eager() -> None:
    rows = torch.tensor([2, 0])
    graph = trace(Beside(), (X, torch.tensor(1), rows), {})
    for i in (torch.tensor(0), torch.tensor(2)):
        given = {item.value.name: {"x": X, "i": i, "rows": rows}[item.fqn] for item in graph.inputs}
        torch.testing.assert_close(run(graph, given)[0], Beside()(X, i, rows))


def test_an_index_out_of_range_is_an_error() -> None:
    model = Reads()
    graph = trace(model, (X, torch.tensor(1)), {})
    with pytest.raises(IndexError, match="out of bounds"):
        _run(graph, dict(model.state_dict()), torch.tensor(7))


def test_memory_that_is_written_to_has_the_index_of_the_example() -> None:
    model, i = Writes(), torch.tensor(1)
    graph = trace(model, (X, i), {})
    torch.testing.assert_close(_run(graph, {}, i)[0][0], model(X, i))
    with pytest.raises(AutoparError, match="another way"):
        _run(graph, {}, torch.tensor(2))


def test_a_trace_for_sizes_reads_any_index() -> None:
    model = Reads()
    sized = SizedTrace.of(model, (X, torch.tensor(1)), {}, {0: (0,)}, normalise)
    more, i = torch.cat([X, X]), torch.tensor(2)
    graph = sized.graph((more, i), {})
    assert graph is not None
    torch.testing.assert_close(_run(graph, dict(model.state_dict()), i, more)[0][0], model(more, i))


def test_a_trace_for_sizes_knows_no_number_that_is_read() -> None:
    sized = SizedTrace.of(Powers(), (X, torch.tensor(1)), {}, {0: (0,)}, normalise)
    with pytest.raises(TraceError, match="depends on the values of tensors"):
        sized.graph((torch.cat([X, X]), torch.tensor(2)), {})


def _run(graph: Graph, state: dict[str, Tensor], i: Tensor, x: Tensor = X) -> tuple[list[Tensor], dict[str, Tensor]]:
    given = {item.value.name: state.get(item.fqn, {"x": x, "i": i}.get(item.fqn)) for item in graph.inputs}
    return run(graph, {name: each for name, each in given.items() if each is not None})
