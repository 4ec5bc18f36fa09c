"""A program that is fitted to three sizes is, at any other that divides, the one that is made for it."""

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.codegen.emit import emit
from autopar.codegen.lower import lower
from autopar.codegen.program import Program
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.sizes.same_names import named_like
from autopar.ir.sizes.size import at
from autopar.ir.trace_with_loss import traced
from autopar.mesh import Mesh
from autopar.plans.validate import check_assignment
from autopar.runtime.sizes.sized_program import FittedProgram, fit_programs
from autopar.sbp.assignment import Assignment
from autopar.sbp.candidates import annotate
from tests.runtime.training import random_assignment

BATCH, FIRST, OTHERS = 8, 32, (24, 44, 50, 63, 128)


class Language(nn.Module):
    """Two layers with a loss over tokens that are next to one another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits = self.head(self.layers(self.table(tokens) + torch.sin(positions)[:, None]))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), logits


class Signal(nn.Module):
    """Convolutions along time, and what is joined, repeated and laid out in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(16, 4, 5, padding=2)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x))
        x = torch.cat((x, x.flip(2)), dim=1)
        x = self.second(F.pad(x, (2, 1)))
        both = torch.cat((x, x[..., :2]), dim=2).transpose(1, 2).repeat(1, 1, 2)
        return self.mix(both).flatten(0, 1).softmax(-1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "language": (Language, lambda size: torch.zeros(BATCH, size, dtype=torch.int64)),
    "signal": (Signal, lambda size: torch.zeros(BATCH, 4, size)),
}


@cache
def graph_of(name: str, size: int) -> Graph:
    """The graph for a size, with the names of the first."""
    make, example = MODELS[name]
    graph = traced(make().to("meta"), None, (example(size),), {})
    return graph if size == FIRST else named_like(graph, graph_of(name, FIRST))


def program_of(graph: Graph, mesh: Mesh, assignment: Assignment) -> Program | None:
    """The program of one size; None if something does not divide."""
    folded = fold(graph)
    try:
        check_assignment(assignment, graph, folded, annotate(graph, mesh, folded, near=assignment.strategies), mesh)
    except ValueError:
        return None
    return lower(graph, mesh, assignment)


def fitted(name: str, mesh: Mesh, seed: int) -> tuple[FittedProgram | None, Callable[[int], Program | None]]:
    """What fits programs for the first sizes under a drawn assignment, and the program made for any size."""
    first = graph_of(name, FIRST)
    folded = fold(first)
    assignment = random_assignment(first, folded, annotate(first, mesh, folded), mesh, random.Random(seed))

    def made(size: int) -> Program | None:
        return program_of(graph_of(name, size), mesh, assignment)

    sizes = [size for size in (20, 16, FIRST, 56, 96) if made(size) is not None][:3]
    if len(sizes) < 3:
        return None, made
    graphs = [graph_of(name, size) for size in sizes]
    return fit_programs(sizes, [(program_of(graph, mesh, assignment), graph) for graph in graphs]), made


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_programs_at_other_sizes(name: str, shape: tuple[int, ...]) -> None:
    mesh, num_fitted, num_equal, num_split = Mesh(shape, ("a", "b")[: len(shape)]), 0, 0, 0
    for seed in range(6):
        found, made = fitted(name, mesh, seed)
        if found is None:
            continue
        num_fitted += 1
        num_split += any(parts > 1 for _, parts in found.parts)
        for size in OTHERS:
            if found.divides(size):
                expected = made(size)
                assert expected is not None, (seed, size)
                assert emit(at(found.program, size)) == emit(expected), (seed, size)
                num_equal += 1
    assert num_fitted >= 3 and num_equal >= 8 and num_split, (num_fitted, num_equal, num_split)
