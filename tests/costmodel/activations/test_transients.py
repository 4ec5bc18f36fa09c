"""The largest transient of a step, by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.costmodel.activations.autograd_footprint import footprints
from autopar.costmodel.activations.transients import Transient, largest_transient
from autopar.costmodel.evaluate import evaluate
from autopar.costmodel.pricing.encode_decode import decode
from autopar.costmodel.pricing.price import PricedStep, price
from autopar.costmodel.training import Training
from autopar.ir.folding.fold import fold
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.mesh import parse_mesh
from autopar.sbp.analysis.sampled_graph import Sampled
from autopar.sbp.candidates import annotate
from autopar.search.table import memory_of
from tests.planner.cases import CPU

TOKENS, WIDTH, CLASSES = 64, 8, 512
LOGITS = 4 * TOKENS * CLASSES  # bytes in float32


class Classifier(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.head = nn.Linear(width, CLASSES, bias=False, dtype=torch.float16)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).float(), target)


def traced(width: int = WIDTH) -> Graph:
    with torch.device("meta"):
        return trace(
            Classifier(width),
            (torch.zeros(TOKENS, width, dtype=torch.float16), torch.zeros(TOKENS, dtype=torch.long)),
            {},
        )


NOTHING = Transient({}, frozenset())


def memory(graph: Graph, training: Training) -> dict[str, int]:
    """On one device."""
    mesh, folded = parse_mesh("1"), fold(graph)
    priced = price(graph, folded, annotate(graph, mesh, folded), mesh, CPU, PricedStep(training))
    return evaluate(
        graph, decode(priced, graph, folded, (0,) * len(priced.entities)), mesh, CPU, training=training
    ).memory_bytes


def found(graph: Graph, num_microbatches: int) -> Transient:
    return largest_transient(Sampled(graph), footprints(graph), (), (), num_microbatches)


def test_a_loss_takes_two_gradients_of_its_logits_while_those_of_weights_are_to_come():
    graph = traced()
    one, two = found(graph, 1), found(graph, 2)
    assert one.ops == two.ops == {graph.ops[-1].name: 1.0} and one.pending == {"head_weight"}
    assert two.pending == frozenset()  # that of the microbatch before is there
    for num_microbatches, gradients in ((1, 2 * WIDTH * CLASSES), (2, 0)):
        size = memory(graph, Training("adamw", num_microbatches))["transient"]
        assert size == pytest.approx(2 * LOGITS - gradients, abs=16)  # the loss's own gradient is a scalar


def test_nothing_is_added_where_gradients_to_come_are_larger():
    assert found(traced(width=1024), 1) == NOTHING


def test_a_stage_that_ends_in_no_loss_has_none():
    with torch.device("meta"):
        graph = trace(nn.Sequential(nn.Linear(8, 512), nn.GELU()), (torch.zeros(64, 8),), {})
    assert found(graph, 1) == NOTHING


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("mesh", ["4", "2x2"])
def test_the_table_has_it_for_every_layout(mesh: str, num_microbatches: int):
    graph, mesh, training = traced(), parse_mesh(mesh), Training("adamw", num_microbatches)
    folded = fold(graph)
    priced = price(graph, folded, annotate(graph, mesh, folded), mesh, CPU, PricedStep(training))
    sizes = set()
    for number, entity in enumerate(priced.entities):
        for option in range(len(entity.options)):
            choice = tuple(option if at == number else 0 for at in range(len(priced.entities)))
            memory = evaluate(graph, decode(priced, graph, folded, choice), mesh, CPU, training=training).memory_bytes
            assert memory_of(priced.table, choice) == pytest.approx(sum(memory.values()), rel=1e-9, abs=1)
            sizes.add(memory["transient"])
    assert len(sizes) > 1 and max(sizes) > 2 * min(sizes)  # it is split with its logits
