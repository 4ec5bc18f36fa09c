"""Which ops are split in sections of a fused projection, and that each such signature is right."""

import itertools

import pytest
import torch

from autopar.ir.graph import Graph, Op
from autopar.ir.trace_with_loss import traced
from autopar.mesh import Mesh
from autopar.sbp.analysis.section_signatures import section_signatures
from autopar.sbp.candidates import annotate
from autopar.sbp.placement import S, can_be_stored, format_layout, is_even, parse_layout
from autopar.sbp.proof.check_signature import check_strategy
from autopar.sbp.signature import Strategy
from tests.fused_projections import BLOCKS, WIDTH, batch, model_of

THREE, HALVES, TWO = "3x1", "2+2x1", "2x1"
# block -> the signatures of its product and of the ops up to the cut
EXPECTED = {
    "Attention": [f"B* S(0|{THREE}) S(0|{THREE}) -> S(2|{THREE})", f"S(2|{THREE}) -> S(2) S(2) S(2)"],
    "Conv1D": [f"B* S(1|{THREE}) S(0|{THREE}) -> S(2|{THREE})", f"S(2|{THREE}) -> S(2) S(2) S(2)"],
    "Unbound": [f"B* S(0|{THREE}) S(0|{THREE}) -> S(2|{THREE})", f"S(2|{THREE}) -> S(3)"],
    "Multihead": [f"B* S(0|{THREE}) S(0|{THREE}) -> S(2|{THREE})", f"S(2|{THREE}) -> S(4)"],
    "Sliced": [f"B* S(0|{HALVES}) -> S(2|{HALVES})", *[f"S(2|{HALVES}) -> S(2)"] * 3],
    "HeadsFirst": [
        f"B* S(0|{HALVES}) -> S(2|{HALVES})",
        f"S(2|{HALVES}) -> S(2|{HALVES})",
        f"S(2|{HALVES}) -> S(2) S(2) S(2)",
    ],
    "CutTwice": [
        f"B* S(0|{THREE}) -> S(2|{THREE})",
        f"S(2|{THREE}) -> S(2) S(2|{TWO})",
        f"S(2|{TWO}) S(0|{TWO}) -> S(2|{TWO})",
        f"S(2|{TWO}) -> S(2) S(2)",
    ],
    "Adapted": [
        f"B* S(0|{THREE}) S(0|{THREE}) -> S(2|{THREE})",
        f"B* S(0|{THREE}) -> S(2|{THREE})",
        f"S(2|{THREE}) -> S(2|{THREE})",
        f"S(2|{THREE}) S(2|{THREE}) -> S(2|{THREE})",
        f"S(2|{THREE}) -> S(2) S(2) S(2)",
    ],
    "Gated": [f"B* S(0|{TWO}) -> S(2|{TWO})", f"S(2|{TWO}) -> S(2) S(2)"],
}


def graph_of(block: str) -> Graph:
    return traced(model_of(block), None, (batch().requires_grad_(),), {})


@pytest.mark.parametrize("block", BLOCKS)
def test_ops_up_to_the_cut_are_split_in_sections(block: str) -> None:
    found = section_signatures(graph_of(block)).values()
    assert [str(one) for (one,) in found] == EXPECTED[block] * 2


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2), (4,)], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_each_is_the_op(block: str, mesh_shape: tuple[int, ...]) -> None:
    """Values and gradients, split along all axes or along one of them."""
    graph = graph_of(block)
    signatures = section_signatures(graph)
    count = 0
    for op in (op for op in graph.ops if op.name in signatures):
        whole = [strategy.signatures[0] for strategy in annotate(graph, Mesh((1,), ("a",))).strategies[op.name]][:1]
        for chosen in itertools.product((*signatures[op.name], *whole), repeat=len(mesh_shape)):
            count += check_strategy(op, Strategy(chosen), mesh_shape, _contents(op))
    assert count > len(signatures)


def _contents(op: Op) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(value.shape, dtype=value.dtype, requires_grad=value.needs_grad) for value in op.inputs)


def test_nothing_else_is() -> None:
    """A residual stream that is cut is no product; a dim that is only reshaped to heads is not cut."""

    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.up(x).unflatten(-1, (8, 8)).transpose(1, 2).sin().transpose(1, 2).flatten(-2)
            x = x + self.down(heads)
            return x[..., : WIDTH // 2].square().mean() + x[:, -1].mean()

    assert not section_signatures(traced(Other().double(), None, (batch(),), {}))


def test_sections_divide() -> None:
    """Where they do not, there is no such candidate; a dim is split in one set of sections."""
    graph = graph_of("Attention")
    mesh = Mesh((5,), ("a",))
    assert not any("|" in str(one) for found in annotate(graph, mesh).strategies.values() for one in found)
    graph, mesh = graph_of("Sliced"), Mesh((2, 2), ("a", "b"))
    found = {str(one) for each in annotate(graph, mesh).strategies.values() for one in each}
    assert "B* S(0|2+2x1) -> S(2|2+2x1) | B* S(0|2+2x1) -> S(2|2+2x1)" in found
    assert "S(0) B* -> S(0) | B* S(0|2+2x1) -> S(2|2+2x1)" in found
    assert not any("S(0|" in one and "S(0) -> S(2) |" in one for one in found)


@pytest.mark.parametrize("text", ["S(0|3x1)B", "S(12|4+2x1)S(0)", "S(1|2+1)S(1|2+1)"])
def test_sections_are_written_and_read(text: str) -> None:
    layout = parse_layout(text)
    assert format_layout(layout) == text
    assert not can_be_stored((60,) * 13, layout, (2, 2))


def test_sections_are_even_parts() -> None:
    sections = S(0, sections=(2, 1))
    assert is_even((12,), (sections, sections), (2, 2)) and not is_even((12,), (sections,), (3,))
    assert not any(is_even((12,), (sections, other), (2, 2)) for other in (S(0), S(0, sections=(1, 2))))
